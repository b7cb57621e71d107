"""The engine on paper: the core plays a recorded pass on a device without bytes, and plans (csrc/device/paper.h).

It is the core that runs, from the same arguments as manage() gives it. Only what no core can know is added here: what
torch's allocator and the driver hold around the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gemini_strategy import _C
from gemini_strategy.estimates.machines import Machine
from gemini_strategy.estimates.step import Held, RecordedPass
from gemini_strategy.estimates.tensors import Work
from gemini_strategy.memory.budget import DRIVER_RESERVE, first_reserve, slack
from gemini_strategy.memory.segments import choose_segments, missing_bytes
from gemini_strategy.memory.torch_memory import is_worth
from gemini_strategy.optim import managed
from gemini_strategy.optim.opaque_optimizer import OpaqueOptimizer
from gemini_strategy.parameters.foreign import check_modules
from gemini_strategy.parameters.registration import Registration
from gemini_strategy.parameters.sharing import check_sharing
from gemini_strategy.precision import Precision
from gemini_strategy.settings import Settings
from gemini_strategy.weights.transformers import adapter_parameters

When = Literal["speculated", "deferred", "immediate"]

_KIND = _C.RECORDED
_SMALL = 1 << 20  # tensors of at most so much have segments of their own
_SMALL_SEGMENT = 2 << 20

# With several passes in a step the first plan is made of the first of them. What follows times them and plans again.
_STEPS = 4

# Measured on an H100 and an H200: the context with the libraries' handles and kernels, and the page tables of pinned
# host memory, 8 bytes for each 4 KiB (benchmarks/results/offload_h200.jsonl: outside_peak_bytes less what torch holds).
_CONTEXT_BYTES = 819_000_000
_BYTES_PER_PAGE_ENTRY = 512
# A communicator of NCCL, on 2 and on 4 H200 (benchmarks/results/sharded_h200.jsonl, less the above).
_COMMUNICATOR_BYTES = 807_000_000
# Of the process before a model, and what CUDA's libraries add in the first step: on an H200, torch 2.11
# (benchmarks/results/offload_h200.jsonl: host_peak_rss_bytes less host_bytes and the model's own).
PROCESS_BYTES = 1_900_000_000
# cuBLAS takes of torch's allocator, on Hopper, for the forward's thread and autograd's.
_WORKSPACES = 2 * (32 << 20)


class _PaperRanks:
    """Ranks that all do the same, as Registration wants to find them."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self.shard = self

    def gather(self, what: str, value: Any) -> list[Any]:
        return [value] * self.size


class PaperModel:
    """A model as Registration wants to find it, with no engine.

    Args:
        optimizer: as for manage(); None: AdamW over every parameter that requires a gradient.
        n_ranks: that share each chunk.

    Raises:
        GeminiError: manage() would refuse the model or its optimizer; the same text.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
        precision: Precision,
        n_ranks: int = 1,
    ) -> None:
        if optimizer is None:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained) if trained else None
        self.model = model
        self.optimizer = optimizer
        self.device = device
        self.precision = precision.name
        self.precision_plan = precision
        self.core: Any = None
        self.ranks: Any = _PaperRanks(n_ranks)
        self.opaque: OpaqueOptimizer | None = None
        if optimizer is not None and managed.is_opaque(optimizer):
            self.opaque = OpaqueOptimizer(self, optimizer)  # type: ignore[arg-type]
        grouped = managed.check(optimizer, model) if optimizer is not None else set()
        check_modules(model, device, True)
        self.registration = Registration(self, grouped, adapter_parameters(model), None)  # type: ignore[arg-type]
        check_sharing(model)


@dataclass(frozen=True)
class Planned:
    """What the core has planned.

    Attributes:
        plan: as `Core.plan_info`; None: the budget has no room for a plan.
        stats: as `Core.stats`.
        context_bytes: what the driver and the libraries hold.
    """

    plan: dict[str, Any] | None
    stats: dict[str, int | float]
    context_bytes: int


def context_bytes(host_bytes: int, n_ranks: int = 1) -> int:
    """Device memory of this process that is neither torch's nor ours, with `host_bytes` of pinned host memory."""
    between = _COMMUNICATOR_BYTES if n_ranks > 1 else 0
    return _CONTEXT_BYTES + host_bytes // _BYTES_PER_PAGE_ENTRY + between


def pool_bytes(recorded: RecordedPass) -> int:
    """What torch's allocator holds from the second step on: as DeviceMemory.tidy leaves it."""
    sizes = dict(event for event in recorded.tensors if event[1])
    large = [event for event in recorded.tensors if sizes[event[0]] > _SMALL]
    now = small = 0
    for number, size in recorded.tensors:
        if sizes[number] <= _SMALL:
            now += size or -sizes[number]
            small = max(small, now)
    beside = recorded.kept_bytes + _WORKSPACES + -(-small // _SMALL_SEGMENT) * _SMALL_SEGMENT
    held = missing_bytes(large, []) + beside
    segments = choose_segments(large)
    return sum(segments) + beside if is_worth(segments, recorded.kept_bytes, held) else held


def _events(entries: list[Any], machine: Machine, outside: int | None) -> Iterator[tuple[int, ...]]:
    """Entries of a recorded pass as the core takes them; outside: bytes around torch's; None: none count."""
    seconds = 0.0
    for entry in entries:
        if isinstance(entry, Work):
            seconds += machine.seconds(entry)
            continue
        if seconds:
            yield _KIND["ELAPSE"], round(seconds * 1e9)
            seconds = 0.0
        if not isinstance(entry, Held):
            yield entry
        elif outside is not None:
            yield _KIND["OUTSIDE"], outside + entry.bytes
    if seconds:
        yield _KIND["ELAPSE"], round(seconds * 1e9)


def _no_update(*_: Any) -> bool:
    """On paper there is nothing to step."""
    return False


def _updates(recorded: RecordedPass) -> list[tuple[Any, ...]]:
    return [(i, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, True, True, 1.0, 1.0) for i in recorded.parameters]


def _play(
    core: Any,
    recorded: RecordedPass,
    machine: Machine,
    outside: int | None,
    micro_batches: int,
    when: When,
) -> None:
    """The passes of one optimizer step, and its norm where updates are speculated: it is below the limit."""
    for parameter in recorded.parameters:  # zero_grad
        if core.has_grad(parameter):
            core.grad_drop(parameter)
    forward = recorded.entries[: recorded.backward_at]
    backward = recorded.entries[recorded.backward_at :]
    for number in range(micro_batches):
        core.replay(list(_events(forward, machine, outside)))
        if when == "immediate" and number == micro_batches - 1:
            core.arm(_updates(recorded), True)
        core.replay(list(_events(backward, machine, outside)))
    if when == "speculated":
        core.grad_sumsq(sorted(recorded.parameters), 0)


def _host_bytes(settings: Settings, machine: Machine) -> int:
    """Of the host, for the engine, as the core would find it before it has anything; -1: no limit.

    A budget is believed, as it may be of another machine. Without one a host that is not known has nothing beside the
    homes.
    """
    if settings.host_budget >= 0:
        return -1
    return max((machine.host_memory or 0) - PROCESS_BYTES, 0)


def plan_on_paper(
    paper: PaperModel,
    settings: Settings,
    recorded: RecordedPass,
    machine: Machine,
    *,
    pool: int,
    micro_batches: int = 1,
    when: When = "deferred",
) -> Planned:
    """Plays the first optimizer steps under these settings, until the core has planned for good.

    Args:
        paper: the model.
        settings: of the run; their rates are the machine's.
        recorded: one pass of it.
        machine: how fast it is.
        pool: `pool_bytes` of the pass.
        micro_batches: passes in a step.
        when: updates run inside the last backward ("immediate": no clipping, no loss scale), under the next forward
            ("deferred"), or there and, as far as the host has spares, in the backward already ("speculated": the norm
            is asked for and below its limit).

    Raises:
        GeminiMemoryError: a budget does not suffice; the text is the run's.
    """
    is_cuda = settings.device.type == "cuda"
    budget = settings.device_budget
    has_limit = is_cuda and budget >= 0
    n_ranks = paper.ranks.size
    more: dict[str, Any] = {}
    if n_ranks > 1:  # as Ranks.communicators of a run whose ranks share all chunks
        rate = machine.collective_rate(n_ranks)
        more = {"shard_comm": _C.comm_paper(n_ranks), "gather_rate": rate, "reduce_rate": rate}
    if paper.opaque is not None:
        more |= paper.opaque.core_arguments() | {"opaque": _no_update}
    core = _C.Core(
        **settings.core_arguments(paper.registration, n_ranks),
        threads=1,
        external_bytes=context_bytes(0, n_ranks) + DRIVER_RESERVE if is_cuda else 0,
        slack_bytes=slack(budget) if has_limit else 0,
        is_paper=True,
        host_bytes=_host_bytes(settings, machine),
        **more,
    )

    def context() -> int:
        """With the homes, and the spares as soon as there are some."""
        host_bytes = int(core.stats()["host_bytes"])
        return context_bytes(host_bytes, n_ranks) + DRIVER_RESERVE if is_cuda else 0

    try:
        paper.core = core
        outside = None
        if is_cuda:
            outside = context()
            core.set_external_bytes(outside)
        if budget >= 0 and settings.policy != "cuda":
            available = budget - (outside or 0)
            spare = paper.registration.check_floor(budget, available)
            if is_cuda and outside is not None:
                outside += first_reserve(budget, spare)
        for _ in range(1 if micro_batches == 1 else _STEPS):
            _play(core, recorded, machine, outside, micro_batches, when)
            if is_cuda:
                core.forget_outside()
                core.set_external_bytes(context() + pool)
                core.forget_outside()
            core.step(_updates(recorded), 0)
            outside = None  # torch's memory is in order from now on
        return Planned(core.plan_info(), core.stats(), context())
    finally:
        paper.core = None
        core.close()
