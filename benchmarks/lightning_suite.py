"""Lightning's own tests, with its default strategy and with ours in its place.

    python benchmarks/lightning_suite.py TESTS [FILE ...] [--out FILE.json] [--timeout 120]

TESTS is the folder of Lightning's repository that holds `tests_pytorch` and `tests_fabric`, of the release that is
installed; FILE are files or folders in it, as `tests_fabric/strategies` (default: both of them). Nothing is written
there. The tests run twice on the CPU, in a process of their own for each file and way. In both ways torch.optim.SGD is
torch.optim.AdamW (what SGD alone takes is left out), as an engine has no SGD. In the second way a Trainer or a Fabric
that is given no strategy, on one CPU device, gets `GeminiStrategy()` or `GeminiFabricStrategy()`. Who imports
`lightning.fabric.strategies.SingleDeviceStrategy` gets the latter, too, and where Lightning would ask for
`fabric.launch()`, as it does for all strategies but its own of one device, that is called.

Printed are the counts, and every test that passes with Lightning's strategy and does not with ours, with the error.
An error of the package's own, or one that Lightning raises as it was told to, is marked "refusal": it names a limit.
The exit status is 1 if there is a test that is not. Whether such a test only assumes something else, a person says.

pytest-timeout has to be installed. As a plugin of pytest this file is what replaces and counts.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WAYS = ("auto", "gemini")
_WAY, _RESULTS = "LIGHTNING_SUITE_WAY", "LIGHTNING_SUITE_RESULTS"
_SGD_ONLY = ("momentum", "dampening", "nesterov")

# ---- in pytest's process --------------------------------------------------------------------------


class Plugin:
    """Replaces what is to be replaced, and keeps how each test ended."""

    def __init__(self, way: str, results: Path) -> None:
        self._results = results
        self._ended: dict[str, dict[str, Any]] = {}
        self._engines = 0
        _replace_sgd()
        if way == "gemini":
            _replace_strategy()
            self._count_engines()

    def _count_engines(self) -> None:
        from gemini_strategy.lightning import strategy

        make = strategy.gs.manage

        def manage(*args: Any, **kwargs: Any) -> Any:
            self._engines += 1
            return make(*args, **kwargs)

        strategy.gs.manage = manage

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self._engines
        entry = self._ended[item.nodeid] = {"outcome": "died", "error": "", "is_refusal": False}
        self._keep()
        result = yield
        entry["has_engine"] = self._engines > before
        self._keep()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        entry = self._ended[item.nodeid]
        # Not that a setup or teardown did pass.
        is_news = report.when == "call" or not report.passed
        if is_news and entry["outcome"] in ("died", "passed"):
            entry["outcome"] = report.outcome
        if report.failed and call.excinfo is not None and not entry["error"]:
            error = call.excinfo.value
            entry["error"] = f"{type(error).__name__}: {error}"[:2000]
            entry["is_refusal"] = _is_refusal(error)
        return report

    def _keep(self) -> None:
        self._results.write_text(json.dumps(self._ended))


def _is_refusal(error: BaseException | None) -> bool:
    """Whether the package itself raised this, or what this came from, in an error's words."""
    while error is not None:
        kind = type(error)
        last = traceback.extract_tb(error.__traceback__)[-1:]
        is_ours = any(
            "/gemini_strategy/" in frame.filename and (frame.line or "").startswith("raise ")
            for frame in last
        )
        if is_ours or kind.__module__.startswith("gemini_strategy"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _replace_sgd() -> None:
    import torch

    real = torch.optim.AdamW.__init__

    def init(self: Any, params: Any, lr: Any = 1e-3, *args: Any, **kwargs: Any) -> None:
        real(self, params, lr, *args, **{k: v for k, v in kwargs.items() if k not in _SGD_ONLY})

    torch.optim.AdamW.__init__ = init  # type: ignore[method-assign]
    torch.optim.SGD = torch.optim.AdamW  # type: ignore[misc,assignment]


def _replace_strategy() -> None:
    from lightning.fabric import Fabric, connector, strategies
    from lightning.fabric.accelerators import cuda
    from lightning.pytorch.trainer.connectors import accelerator_connector

    from gemini_strategy.lightning import GeminiFabricStrategy  # registers the names

    _replace_default(accelerator_connector._AcceleratorConnector, cuda)
    _replace_default(connector._Connector, cuda)
    strategies.SingleDeviceStrategy = GeminiFabricStrategy
    validate = Fabric._validate_launched

    def validate_launched(fabric: Any) -> None:
        if isinstance(fabric.strategy, GeminiFabricStrategy) and not fabric._launched:
            fabric.launch()
        validate(fabric)

    Fabric._validate_launched = validate_launched


def _replace_default(connector: Any, cuda: Any) -> None:
    real = connector.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Tests pretend that there are GPUs, which the host device is none of.
        is_cpu = kwargs.get("accelerator", "auto") == "cpu" or (
            kwargs.get("accelerator", "auto") == "auto" and not cuda.num_cuda_devices()
        )
        is_one = kwargs.get("devices", "auto") in ("auto", 1, "1") and kwargs.get("num_nodes") == 1
        if not args and is_cpu and is_one and kwargs.get("strategy", "auto") == "auto":
            kwargs["strategy"] = "gemini"
        real(self, *args, **kwargs)

    connector.__init__ = init


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(os.environ[_WAY], Path(os.environ[_RESULTS])))


# ---- the command ---------------------------------------------------------------------------------


def run(way: str, tests: Path, file: Path, timeout: int) -> dict[str, dict[str, Any]]:
    """How the tests of one file ended."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        here = Path(__file__).resolve().parent
        paths = [str(here), str(here.parent), str(tests), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            _WAY: way,
            _RESULTS: str(results),
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += ["-p", Path(__file__).stem, "--timeout", str(timeout), "--timeout-method=signal"]
        command += ["--rootdir", str(tests), "-o", "addopts=", "--basetemp", f"{folder}/tmp"]
        ended = subprocess.run(
            [*command, str(file)], cwd=folder, env=environment, capture_output=True, text=True
        )
        if not results.exists():
            raise RuntimeError(f"{file} does not run:\n{ended.stdout}{ended.stderr}")
        return json.loads(results.read_text())


def files_of(tests: Path, wanted: list[str]) -> list[Path]:
    found = []
    for path in [tests / name for name in wanted or ("tests_pytorch", "tests_fabric")]:
        found += sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    return found


def compare(ways: dict[str, dict[str, dict[str, Any]]]) -> int:
    """Prints the counts and what fails with our strategy alone; gives how many of these are no refusals."""
    for way, ended in ways.items():
        counts = collections.Counter(entry["outcome"] for entry in ended.values())
        print(f"{way}: {len(ended)} tests,", dict(sorted(counts.items())))
    engines = sum(bool(entry.get("has_engine")) for entry in ways["gemini"].values())
    print(f"with an engine: {engines} tests")
    lost = [
        (name, entry)
        for name, entry in ways["gemini"].items()
        if ways["auto"].get(name, {}).get("outcome") == "passed" and entry["outcome"] != "passed"
    ]
    refused = [name for name, entry in lost if entry.get("is_refusal")]
    print(f"pass with auto and not with gemini: {len(lost)}, refusals: {len(refused)}")
    for name, entry in lost:
        kind = "refusal" if entry.get("is_refusal") else entry["outcome"]
        error = " ".join(entry["error"].split())[:400]
        print(f"- {kind}: {name}\n    {error}")
    return len(lost) - len(refused)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tests", type=Path)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--out", type=Path, help="a .json file for how each test ended")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for one test")
    options = parser.parse_args()
    tests = options.tests.resolve()
    ways: dict[str, dict[str, dict[str, Any]]] = {way: {} for way in WAYS}
    for file in files_of(tests, options.files):
        for way in WAYS:
            ways[way] |= run(way, tests, file, options.timeout)
    if options.out is not None:
        options.out.write_text(json.dumps(ways, indent=1))
    return int(compare(ways) > 0)


if __name__ == "__main__":
    sys.exit(main())
