"""What every test gets: the markers, the same random numbers whatever ran before, and the rates of one machine.

The rates are given and not measured, so that plans do not depend on who else uses this machine, no test takes a
second to measure and none reads or writes the cache of a user.  A test of the measurement itself asks for it.
"""

import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import torch

import helpers.seeds  # noqa: F401
from helpers.forked import RATES


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--asserted",
        action="store_true",
        help="refuse a core without its own assertions and the address sanitizer (make check)",
    )
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of each test's parametrized cases run the first and then every N-th",
    )


def pytest_configure(config: pytest.Config) -> None:
    # How long examples take depends on who else uses this machine.
    calm = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("tests", deadline=None, suppress_health_check=calm)
    hypothesis.settings.load_profile("tests")
    torch.set_num_threads(1)  # as in the processes of ranks: sums of some kernels depend on it
    config.addinivalue_line("markers", "gpu: needs a CUDA GPU (make test-gpu)")
    config.addinivalue_line("markers", "core: of engine, guard, plans and ranks (make check)")
    os.environ.setdefault("GEMINI_RATES", RATES)
    # Of torch's compiler: a process that compiles beside this one imports torch first.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    if config.getoption("asserted"):
        from gemini_strategy import _C

        if not (_C.BUILT_WITH_ASSERTIONS and _C.BUILT_WITH_SANITIZER):
            raise pytest.UsageError(
                f"--asserted: {_C.__file__} was built without assertions or without the address "
                "sanitizer: run make check, which builds and names one that has them"
            )


@pytest.hookimpl(trylast=True)  # of what -m and -k have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("every")
    if every == 1:
        return
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        (left if seen[test] % every else kept).append(item)
        seen[test] += 1
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def pytest_collection_finish() -> None:
    """Leaves out of every collection what the modules of tests have imported, which lasts: a full one took 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _imports_last() -> Iterator[None]:
    """The same for what a module's tests have imported on their way."""
    yield
    pytest_collection_finish()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    random.seed(1234)
    torch.manual_seed(1234)


@pytest.fixture(autouse=True)
def _no_settings_of_other_parameters() -> None:
    """bitsandbytes keeps those of single parameters by their id(), which a later parameter may have."""
    if "bitsandbytes.optim" in sys.modules:
        sys.modules["bitsandbytes.optim"].GlobalOptimManager._instance = None


def _settings_of_torch() -> dict[str, object]:
    """What a test could leave behind for the tests after it in the same process."""
    return {
        "modes of functions": torch._C._len_torch_function_stack(),
        "modes of operators": torch._C._len_torch_dispatch_stack(),
        "functions of subclasses": torch._C._is_torch_function_enabled(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
    }


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    before = _settings_of_torch()
    yield
    after = _settings_of_torch()
    assert after == before, "a test leaves torch's settings as it found them"
