"""Several GPUs train one model: the bits of one rank, of every policy and budget, and what a rank leaves that goes.

Each test runs on two GPUs where there are two, the first also on 3, 4 and 8 where there are as many. The same bodies
run on the host device, where less of it shows that the tests themselves are right. Processes are started once for a
group of cases; what they have trained they tell as digests of its bits.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

# read by cuBLAS when its first handle is made
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gemini_strategy as gs
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Managed,
    Outcome,
    Plain,
    Recipe,
    assert_same_outcome,
    assert_trained,
    bits,
    drive,
    managed,
    plain,
    state_bytes,
)
from helpers.zoo import Case
from test_planned_gpu import loss_of, tokens, transformer

MIB = 1 << 20
N_GPUS = torch.cuda.device_count()
# On one GPU there is nothing to share: the cases of "cuda" are there from two on.
BOTH = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if N_GPUS >= 2 else [])]
SIZES = {"cuda": [n for n in (1, 2, 3, 4, 8) if n <= N_GPUS], "cpu": [1, 2]}
CHUNK = {"cuda": 2 * MIB, "cpu": 4096}
WIDTH = {"cuda": 1031, "cpu": 37}  # a prime: nothing divides
STEPS = {"cuda": 50, "cpu": 8}
PATIENT = 100.0  # seconds that a rank waits for another
SHORT = {"cuda": 10.0, "cpu": 5.0}  # where one is killed; NCCL's start has to fit in


def prepare(rank: int, device: str) -> str:
    """This rank's device, with kernels whose bits do not change from run to run."""
    if device == "cpu":
        return device
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)
    for name in ("flash", "mem_efficient", "cudnn", "math"):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(name == "math")
    return f"cuda:{rank}"


def digests(outcome: Outcome) -> dict[str, Any]:
    """One short word for each tensor of an outcome, losses left out: they are of a rank's own batch."""

    def short(value: Any) -> Any:
        if isinstance(value, Tensor):
            return hashlib.sha256(bits(value).numpy().tobytes()).hexdigest()[:16]
        if isinstance(value, dict):
            return {str(key): short(item) for key, item in value.items()}
        return [short(item) for item in value] if isinstance(value, list) else value

    names = [field.name for field in fields(outcome) if field.name != "losses"]
    return {name: short(getattr(outcome, name)) for name in names}


# ---- exactly summable gradients ------------------------------------------------------------------

ROWS = 24  # of one batch, over all ranks: 1, 2, 3, 4 and 8 divide it
BAD_STEP = 5  # where the last rank's gradients overflow, in fp16


class Terms(nn.Module):
    """The sum over its parts of what each makes of numbers of its own, times numbers.

    So gradients do not depend on weights. All numbers are -1, 0 or 1: a gradient is an integer of at most ROWS times
    a power of two, and its every partial sum over rows and ranks is exact, in half precision, too.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(33, 12)
        self.layers = nn.ModuleList(nn.Linear(width + i, width - i) for i in range(5))
        self.again = nn.Linear(width, width)
        self.again.weight = self.layers[0].weight  # tied
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, ids: Tensor, numbers: list[Tensor], factors: list[Tensor]) -> Tensor:
        parts = [(self.words(ids) * factors[-1]).sum(dtype=torch.float32)]
        for layer, x, c in zip(
            [*self.layers, self.again, self.frozen], numbers, factors, strict=False
        ):
            parts.append((layer(x) * c).sum(dtype=torch.float32))
        parts.append((self.gain * numbers[0][:, :1]).sum(dtype=torch.float32))
        return torch.stack(parts).sum()


def exact_case(rank: int, size: int, width: int) -> Case:
    """The rows of one rank of the batches that all sizes have in common."""
    per = ROWS // size
    own = slice(rank * per, (rank + 1) * per)
    widths = [(width + i, width - i) for i in range(5)] + [(width, width), (7, 5), (12, 12)]

    def signs(count: int, seed: torch.Generator) -> Tensor:
        return torch.randint(-1, 2, (ROWS, count), generator=seed)[own].float()

    def batch(number: int) -> dict[str, Any]:
        seed = torch.Generator().manual_seed(3000 + number)
        ids = torch.randint(0, 33, (ROWS,), generator=seed)[own]
        numbers, factors = zip(*((signs(a, seed), signs(b, seed)) for a, b in widths), strict=True)
        is_bad = number == 2 * BAD_STEP and rank == size - 1
        return {"is_bad": is_bad, "inputs": (ids, list(numbers), list(factors))}

    def loss(run: Plain, batch: dict[str, Any]) -> Tensor:
        total = run(*batch["inputs"]) * (size / 64)  # the mean over ranks is the sum over rows
        is_bad = batch["is_bad"] and run.recipe.precision == "16-mixed"
        return total * float("inf") if is_bad else total

    return Case("exact", lambda: Terms(width), batch, loss)


PRECISIONS = ("32-true", "bf16-true", "16-mixed")


def exact_recipe(precision: str, device: str, where: str) -> Recipe:
    return Recipe(
        precision=precision,
        steps=STEPS[device],
        clip=0.5,
        accumulate=2,
        initial_scale=2.0**9,
        growth_interval=1000,
        hysteresis=1,
        device=where,
    )


def train_exact(rank: int, size: int, device: str) -> dict[str, dict[str, Any]]:
    """By precision what a rank has at the end; a rank that is alone trains without an engine, too."""
    where, found = prepare(rank, device), {}
    case = exact_case(rank, size, WIDTH[device])
    for precision in PRECISIONS:
        recipe = exact_recipe(precision, device, where)
        if size == 1:
            reference = plain(case.build, recipe)
            before = reference.outcome()
            drive(reference, case, recipe.steps)
            after = reference.outcome()
            assert_trained(before, after)
            found[f"{precision} unmanaged"] = digests(after)
        run = managed(case.build, recipe, chunk_size=CHUNK[device], timeout=PATIENT)
        with contextlib.closing(run.engine):
            drive(run, case, recipe.steps)
            stats = run.engine.stats()
            assert stats["shards"] == size and (size == 1 or stats["gathers"] >= recipe.steps), (
                stats
            )
            found[precision] = digests(run.outcome())
    return found


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[dict[str, Any]]]:
    """What all ranks of a size have; trained when it is first asked for."""
    known: dict[tuple[str, int], list[dict[str, Any]]] = {}

    def of(device: str, size: int) -> list[dict[str, Any]]:
        if (device, size) not in known:
            folder = tmp_path_factory.mktemp("exact")
            known[device, size] = values(run_ranks(size, folder, train_exact, device))
        return known[device, size]

    return of


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("device", BOTH)
def test_every_number_of_ranks_has_the_same_bits(exact: Any, device: str, precision: str) -> None:
    """Weights, masters, moments, clip norms and loss scales at the end, on every rank."""
    want = exact(device, 1)[0][f"{precision} unmanaged"]
    assert len(want["norms"]) == STEPS[device] - (precision == "16-mixed")
    for size in SIZES[device]:
        for rank, found in enumerate(exact(device, size)):
            assert found[precision] == want, f"rank {rank} of {size}"


@pytest.mark.parametrize("device", BOTH)
def test_overflow_on_one_rank_skips_on_all(exact: Any, device: str) -> None:
    """In the last rank's batch of one step; the scale falls once, and nowhere else is a step skipped."""
    for size in SIZES[device]:
        for found in exact(device, size):
            assert found["16-mixed"]["skipped"] == 1
            scales = found["16-mixed"]["scales"]
            assert scales == [2.0**9] * BAD_STEP + [2.0**8] * (STEPS[device] - BAD_STEP)
            assert found["32-true"]["skipped"] == found["bf16-true"]["skipped"] == 0


# ---- real data -----------------------------------------------------------------------------------

FEW = {"cuda": 16, "cpu": 6}
SHAPE = {"cuda": (1024, 6), "cpu": (64, 2)}  # width and depth of the transformer
RUNS = [
    ("cuda", None),
    ("cuda", None),  # the same again
    ("auto", None),
    ("auto", 1.0),
    ("auto", 0.6),
    ("auto", 0.35),
    ("cpu", None),
]
SPARE = {"cuda": 128 * MIB, "cpu": 48 * CHUNK["cpu"]}  # gathered chunks, what comes and goes


def real_case(rank: int, size: int, device: str) -> Case:
    whole = transformer(*SHAPE[device])
    return Case("real", whole.build, lambda step: tokens(step * size + rank), loss_of)


def used_beside(run: Managed, device: str) -> int:
    """Bytes on the device that are not the engine's: the context, NCCL, workspaces, activations."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - run.engine._runtime.core.stats()["device_bytes"]


@contextlib.contextmanager
def told(run: Managed, policy: str, budget: int | None, beside: int) -> Iterator[None]:
    """An error inside says what the device held at that time."""
    try:
        yield
    except Exception as error:
        runtime = run.engine._runtime
        memory, chunks = runtime.memory, runtime.core.stats()["device_bytes"]
        around = (
            memory.external_bytes(chunks),
            memory.torch_bytes(),
            used_beside(run, run.recipe.device),
        )
        error.add_note(
            f"policy {policy}, budget {budget}, beside {beside}; chunks {chunks}, around them, torch, used: {around}; "
            f"refused: {runtime.core.refusal()!r}"
        )
        raise


def train_real(rank: int, size: int, device: str) -> list[dict[str, Any]]:
    """The digests of each of RUNS; where one parts from the first, its first tensor that does is named."""
    where, found = prepare(rank, device), []
    case, first, beside = real_case(rank, size, device), None, 0
    recipe = Recipe(
        precision="bf16-true", steps=FEW[device], clip=0.35, accumulate=2, lr=3e-4, device=where
    )
    state = state_bytes(case.build, recipe) / size
    for policy, share in RUNS:
        # One rank's GPU may have more of others than another's; the engine takes the least budget of all ranks.
        most = torch.tensor(beside)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        budget = None if share is None else int(most.item() + SPARE[device] + share * state)
        run = managed(
            case.build,
            recipe,
            placement_policy=policy,
            device_budget=budget,
            chunk_size=CHUNK[device],
            timeout=PATIENT,
        )
        with contextlib.closing(run.engine), told(run, policy, budget, beside):
            drive(run, case, recipe.steps)
            stats = run.engine.stats()
            beside = max(beside, used_beside(run, device))
            outcome = run.outcome()
        first = first or outcome
        assert_same_outcome(outcome, first)
        kept = ("evictions", "planned", "plans", "gathers", "device_peak_bytes", "chunks")
        of_run = {"policy": policy, "share": share, **{key: stats[key] for key in kept}}
        if budget is not None:
            assert stats["device_peak_bytes"] <= budget, (of_run, budget)
        found.append({**of_run, "budget": budget, "digests": digests(outcome)})
    return found


@pytest.mark.parametrize("device", BOTH)
def test_real_data_has_the_same_bits_under_every_policy(device: str, tmp_path: Path) -> None:
    """And in two runs of one policy; within a rank losses, too, and between ranks everything else."""
    ranks = values(run_ranks(2, tmp_path, train_real, device))
    for of_run in ranks[0]:
        print({key: value for key, value in of_run.items() if key != "digests"})
    assert any(of_run["evictions"] for of_run in ranks[0])
    for own, other in zip(*ranks, strict=True):
        assert own["digests"] == other["digests"], own["policy"]
        assert len(own["digests"]["norms"]) == FEW[device]


def count_waits(rank: int, size: int, device: str) -> list[int]:
    """Of the host in planned steps that clip, and whose clips fire or do not, by policy."""
    where, found = prepare(rank, device), []
    case = real_case(rank, size, device)
    for policy in ("cuda", "auto", "cpu"):
        recipe = Recipe(precision="bf16-true", clip=1e9, accumulate=2, lr=3e-4, device=where)
        how = {"placement_policy": policy, "chunk_size": CHUNK[device], "timeout": PATIENT}
        run = managed(case.build, recipe, **how)
        with contextlib.closing(run.engine):
            drive(run, case, 24)  # passes that are timed end with waits
            before = run.engine.stats()["host_waits"]
            for first, clip in ((24, 0.01), (27, 1e9), (30, 0.01), (33, 1e9)):
                run.recipe = replace(recipe, clip=clip)
                drive(run, case, 3, first=first)
            assert run.engine.stats()["planned"], policy
            found.append(int(run.engine.stats()["host_waits"] - before))
    return found


@pytest.mark.parametrize("device", BOTH)
def test_no_wait_in_a_step_that_clips(device: str, tmp_path: Path) -> None:
    assert values(run_ranks(2, tmp_path, count_waits, device)) == [[0, 0, 0]] * 2


# ---- a rank that is killed ----------------------------------------------------------------------------


class Local:
    """Something that a frame has."""


def train_until(rank: int, size: int, device: str, how: str) -> tuple[float, str, bool, list[int]]:
    """Rank 1 is killed in its fourth step.

    Of rank 0: seconds until it raised, what, whether the engine that failed holds the frames that it was called from,
    and, once it is gone, sizes of what is left on the device.
    """
    where = prepare(rank, device)
    case = real_case(rank, size, device)
    recipe = Recipe(precision="bf16-true", clip=0.35, lr=3e-4, device=where)
    run = managed(case.build, recipe, chunk_size=CHUNK[device], timeout=SHORT[device])
    drive(run, case, 3)
    if rank == 1:
        leave(run, how)
    began = time.monotonic()
    text, locals_of_frames = "", []

    def go_on() -> None:
        local = Local()
        locals_of_frames.append(weakref.ref(local))
        drive(run, case, 2, first=3)

    try:
        go_on()
    except gs.GeminiError as error:
        text = str(error)
    seconds = time.monotonic() - began
    gc.collect()
    has_frames = locals_of_frames[0]() is not None
    with pytest.warns(RuntimeWarning, match="ended inside a step"):
        run.engine.close()
    left: list[int] = []
    if device == "cuda":
        del go_on, run
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        blocks = [b for part in torch.cuda.memory_snapshot() for b in part["blocks"]]
        left = [b["size"] for b in blocks if b["state"] != "inactive"]
    return seconds, text, has_frames, left


def leave(run: Managed, how: str) -> None:
    """The next time that the second layer runs, forward or backward, this rank is killed."""

    def go(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    layer = run.model.layers[1]
    if how == "backward":
        layer.register_full_backward_pre_hook(go)
    else:
        layer.register_forward_pre_hook(go)


def used_bytes(device: str) -> list[int]:
    """Of each GPU, in use by all processes; contexts of this one are made first."""
    if device == "cpu":
        return []
    return [total - free for free, total in map(torch.cuda.mem_get_info, range(2))]


@contextlib.contextmanager
def nothing_left(device: str) -> Iterator[None]:
    """Inside, processes come and go; none of their memory stays."""
    used_bytes(device)
    before = used_bytes(device)
    yield
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        left = [b - a for a, b in zip(before, used_bytes(device), strict=True)]
        if all(n <= 16 * MIB for n in left):
            return
        time.sleep(0.1)
    raise AssertionError(f"bytes left on the GPUs: {left}")


@pytest.mark.parametrize("how", ["forward", "backward"])
@pytest.mark.parametrize("device", BOTH)
def test_rank_that_is_killed(device: str, how: str, tmp_path: Path) -> None:
    with nothing_left(device):
        first, second = run_ranks(2, tmp_path, train_until, device, how, timeout=100.0)
        assert second.exit_code == -signal.SIGKILL
        seconds, text, has_frames, left = values([first])[0]
    print(f"killed in {how}: {seconds:.1f} s, bytes left: {left}: {text}")
    assert seconds < 2 * SHORT[device] + 10, seconds
    assert "rank 1" in text, text
    assert not has_frames
    assert sum(left) <= 4 * MIB, left
