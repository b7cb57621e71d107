"""`estimate()`: what a training run will take of the device, of the host and of time, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini_strategy import _C
from gemini_strategy.arguments import Arguments, suggesting
from gemini_strategy.choices import PolicyName, PrecisionName
from gemini_strategy.errors import GeminiMemoryError
from gemini_strategy.estimates.causes import Gain, Part, gains, parts
from gemini_strategy.estimates.machines import Machine, is_here, machine_of, with_host
from gemini_strategy.estimates.paper import (
    PROCESS_BYTES,
    PaperModel,
    Planned,
    When,
    context_bytes,
    plan_on_paper,
    pool_bytes,
)
from gemini_strategy.estimates.step import RecordedPass, StepFunction, record
from gemini_strategy.memory.budget import DRIVER_RESERVE
from gemini_strategy.optim.managed import moment_bytes
from gemini_strategy.precision import Precision
from gemini_strategy.report.verdict import Verdict, verdict
from gemini_strategy.roots import joined, title
from gemini_strategy.settings import Settings, Sizes, check
from gemini_strategy.sizes import (
    SIZES,
    ChunkSizes,
    host_limit,
    parse_bytes,
    parse_device_budget,
    physical_memory,
)

_SAVING_BYTES = 64 << 20  # pieces of engine.save on their way


@dataclass(frozen=True)
class Schedule:
    """A step of one schedule.

    Attributes:
        when: "speculated": clipping, with the norm below its limit, and with spares. "deferred": the clip fires in each
            step, or there is a loss scale; all clipping, without "speculated". "immediate": `backward(step=True)`.
        seconds: of a step.
        tokens_per_s: of all ranks together; NaN where the inputs have no tokens.
        verdict: what binds.
        plan: as `Core.plan_info`.
    """

    when: When
    seconds: float
    tokens_per_s: float
    verdict: Verdict
    plan: Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """Why a budget cannot work.

    Attributes:
        what: "device" or "host".
        missing: bytes that lack; None: no budget suffices.
        enough: the budget that suffices, in bytes; None: none does.
        text: what the run would say.
    """

    what: str
    missing: int | None
    enough: int | None
    text: str


@dataclass(frozen=True)
class Estimate:
    """What a run will take; `str()` of it is a table.

    All bytes are of one rank.

    Attributes:
        model: the class's name; parameters and trained: how many elements there are, quantized ones as they are stored.
        machine: what the figures are of.
        settings: what manage() would make of the arguments, budgets among them.
        refusals: why it cannot work; () if it can.
        schedules: speculated where the host has spares and they change the plan, deferred and, where the precision
            allows it, immediate; () if it cannot work. The first is that of ordinary clipping.
        device_peak_bytes: of the run: that of planned steps, or of the first ones, which are on demand and keep what
            they have fetched as long as the budget has room.
        planned_peak_bytes: of planned steps: blocks of weights, states and gradients, with activations and what is
            around them.
        optimizer: its class's name; "" where nothing is trained.
        state_bytes: of its states, beside masters.
        is_opaque: its own step() makes the updates, on the device.
        chunk_bytes: of weights in a chunk, as manage() would choose it.
        weight_bytes, gradient_bytes: of the weights that are computed with, and of the gradients that a pass leaves.
        activation_bytes: of both peaks the most that tensors of a pass hold (activations, their gradients, buffers).
        buffer_bytes: of them, what stays between passes.
        pool_bytes, context_bytes: what torch's allocator makes of those, and the driver with its libraries.
        host_bytes: homes of weights, states and gradients, and spares.
        spare_bytes: of host_bytes, what clipping takes beside the homes.
        staying_bytes: of the device, blocks of chunks that have no home there, as the host has no room for all.
        host_peak_bytes: of the process, with the model built on the meta device and `weights=`.
        model_bytes: what is there beside the homes until manage() is done if the model is built on the CPU.
        saving_peak_bytes: of the process while engine.save writes.
        state_dict_peak_bytes: of it while torch.save(engine.state_dict()) does, as an ordinary Lightning checkpoint.
        stats: what the core says, of it chunks, layout_hash, state_bytes and weight_bytes as engine.stats() will.
        tokens: of a step, of all ranks; 0: not known.
        ranks: that share each chunk, each with a GPU of its own.
        is_quantized: there are quantized parameters.
        parts: of each schedule, by its `when`, what makes a step longer than its compute.
        gains: what more memory and more tokens would buy.
        unquantized: where there are quantized parameters, the frozen ones with three dimensions that are not: how many,
            their bytes, and the name of the first. Experts are such, and no linear layers.
        sweep: the same for each device budget that was asked for beside.
    """

    model: str
    parameters: int
    trained: int
    machine: Machine
    settings: Settings
    refusals: tuple[Refusal, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    device_peak_bytes: int = 0
    planned_peak_bytes: int = 0
    optimizer: str = ""
    state_bytes: int = 0
    is_opaque: bool = False
    chunk_bytes: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    buffer_bytes: int = 0
    pool_bytes: int = 0
    context_bytes: int = 0
    host_bytes: int = 0
    spare_bytes: int = 0
    staying_bytes: int = 0
    host_peak_bytes: int = 0
    model_bytes: int = 0
    saving_peak_bytes: int = 0
    state_dict_peak_bytes: int = 0
    stats: Mapping[str, int | float] = field(default_factory=dict)
    tokens: int = 0
    ranks: int = 1
    is_quantized: bool = False
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    gains: tuple[Gain, ...] = ()
    unquantized: tuple[int, int, str] = (0, 0, "")
    sweep: tuple[Estimate, ...] = ()

    @property
    def fits(self) -> bool:
        return not self.refusals

    def __str__(self) -> str:
        from gemini_strategy.estimates.tables import table

        return table(self)


def settings_of(given: Mapping[str, Any], machine: Machine) -> Settings:
    """What manage() would make of the arguments of estimate(), on this machine."""
    is_cuda = given["device"] == "cuda"
    memory = physical_memory() // given["ranks"]
    host_budget = -1
    if given["host_budget"] is not None:
        host_budget = parse_bytes(given["host_budget"], memory, "host_budget")
    elif given["ranks"] > 1 and machine.host_memory is not None:  # as manage() has it
        host_budget = machine.host_memory // given["ranks"]
    limit = host_budget  # is believed where it is given, as it may be of another machine
    if given["host_budget"] is None and machine.host_memory is not None:  # as manage() finds it
        alone = max(machine.host_memory - PROCESS_BYTES, 0)
        limit = host_limit(None, alone if given["ranks"] == 1 else host_budget)
    return Settings(
        host_limit=limit,
        device=torch.device("cuda", 0) if is_cuda else torch.device("cpu"),
        precision=Precision(given["precision"]),
        policy=given["placement_policy"],
        device_budget=parse_device_budget(given["device_budget"], is_cuda, machine.memory),
        host_budget=host_budget,
        sizes=ChunkSizes(*(given[name] for name in SIZES)),
        is_grad_f32=given["gradient_dtype"] is torch.float32,
        convert_inputs=given["convert_inputs"],
        threads=1,
        rates=tuple(machine.rates[name] for name in _C.RATES),
    )


def _with_host(settings: Settings, budget: int) -> Settings:
    """-1: no limit."""
    return replace(settings, host_budget=budget, host_limit=budget)


class Forecaster:
    """One recorded pass of a model, planned under as many budgets as are asked for."""

    def __init__(
        self, paper: PaperModel, recorded: RecordedPass, machine: Machine, micro_batches: int
    ) -> None:
        self.paper = paper
        self.recorded = recorded
        self.machine = machine
        self.micro_batches = micro_batches
        self._least: dict[Settings, int | None] = {}
        self._tried: dict[tuple[Settings, When], Planned | str] = {}
        self.pool = pool_bytes(recorded) if paper.device.type == "cuda" else 0
        is_half = any(s.dtype is torch.float16 and s.has_moments for s in paper.registration.slots)
        self.whens: tuple[When, ...] = ("speculated", "deferred", "immediate")
        if is_half or not recorded.parameters:
            self.whens = ("deferred",)

    def with_micro_batches(self, n: int) -> Forecaster:
        """The same for steps of so many passes."""
        return Forecaster(self.paper, self.recorded, self.machine, n)

    def try_budget(self, settings: Settings, when: When = "deferred") -> Planned | str:
        """What is planned; or why nothing is. Each is found out once."""
        if (settings, when) not in self._tried:
            self._tried[settings, when] = self._try(settings, when)
        return self._tried[settings, when]

    def _try(self, settings: Settings, when: When) -> Planned | str:
        try:
            found = plan_on_paper(
                self.paper,
                settings,
                self.recorded,
                self.machine,
                pool=self.pool,
                micro_batches=self.micro_batches,
                when=when,
            )
        except GeminiMemoryError as error:
            return str(error).splitlines()[0]
        if found.plan is None:
            return "the budget has room for a module at a time, but not for a plan: every step would be on demand"
        return found

    def schedules(self, settings: Settings) -> tuple[list[Schedule], Planned | None]:
        found: list[Schedule] = []
        first = None
        for when in self.whens:
            planned, schedule = self.try_budget(settings, when), self.schedule(settings, when)
            if schedule is None or isinstance(planned, str):
                continue
            if when == "deferred" and found and found[0].plan["hash"] == schedule.plan["hash"]:
                found.clear()  # there was nothing to speculate
            first = first or planned
            found.append(schedule)
        return found, first

    def schedule(self, settings: Settings, when: When) -> Schedule | None:
        """A step of one schedule; None: there is no plan."""
        planned = self.try_budget(settings, when)
        if isinstance(planned, str) or planned.plan is None:
            return None
        seconds = planned.plan["step_seconds"]
        tokens = self.recorded.tokens * self.micro_batches * self.paper.ranks.size
        rate = tokens / seconds if tokens and seconds else float("nan")
        return Schedule(when, seconds, rate, verdict(planned.plan), planned.plan)

    def device_peaks(self, settings: Settings, when: When) -> tuple[int, int]:
        """Of a schedule that there is: planned, and on demand before that, if chunks and the rest peak at once."""
        planned = self.try_budget(settings, when)
        assert not isinstance(planned, str) and planned.plan is not None
        outside = int(planned.stats["outside_peak_bytes"])
        on_demand = int(planned.stats["device_peak_bytes"]) + outside
        if settings.device_budget >= 0:
            on_demand = min(on_demand, settings.device_budget)
        return int(planned.plan["device_bytes"]) + outside, on_demand

    def refusals(self, settings: Settings) -> list[Refusal]:
        """Why these budgets cannot work; [] if they can."""
        why = self.try_budget(settings)
        if not isinstance(why, str):
            return []
        found, with_enough, unlimited = [], settings, _with_host(settings, -1)
        text = self.try_budget(unlimited)
        if settings.device_budget >= 0 and isinstance(text, str):
            enough = self.least_device(unlimited)
            missing = None if enough is None else enough - settings.device_budget
            found.append(Refusal("device", missing, enough, text))
            with_enough = replace(settings, device_budget=enough or settings.device_budget)
        if settings.policy != "cuda" and settings.host_limit >= 0:
            found = self._host_refusals(with_enough) + found
        return found or [Refusal("device", None, None, why)]

    def _host_refusals(self, settings: Settings) -> list[Refusal]:
        """What the host lacks, if the device does not; with "auto" what has no home stays on the device."""
        text = self.try_budget(settings)
        at_home = replace(settings, policy="cpu", device_budget=_plenty(settings))
        with_homes = self.try_budget(_with_host(at_home, -1))
        if not isinstance(text, str) or isinstance(with_homes, str):
            return []
        wanted, limit = int(with_homes.stats["host_bytes"]), settings.host_limit
        if settings.policy == "auto":
            wanted = self._least_host(settings, wanted)
        return [Refusal("host", wanted - limit, wanted, text)] if wanted > limit else []

    def _least_host(self, settings: Settings, high: int) -> int:
        """The least of the host with a plan, to about 1 %; `high` suffices, if any does."""

        def suffices(budget: int) -> bool:
            return not isinstance(self.try_budget(_with_host(settings, budget)), str)

        return _least(settings.host_limit, high, suffices)

    def least_device(self, settings: Settings) -> int | None:
        """The least device budget with a plan, to about 1 %; None: none is enough. Found once for all that are less."""
        key = replace(settings, device_budget=0)
        least = self._least.get(key, 0)
        if key not in self._least or (least is not None and least <= settings.device_budget):
            self._least[key] = self._find_least(settings)
        return self._least[key]

    def _find_least(self, settings: Settings) -> int | None:
        def suffices(budget: int) -> bool:
            return not isinstance(self.try_budget(replace(settings, device_budget=budget)), str)

        low = settings.device_budget  # does not suffice
        if not suffices(_plenty(settings)):
            return None
        step = max(low // 16, 1)
        while not suffices(low + step):
            low, step = low + step, 2 * step
        return _least(low, low + step, suffices)


def _least(low: int, high: int, suffices: Callable[[int], bool]) -> int:
    """The least budget that does, to about 1 %: `low` does not, `high` does, if any."""
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _plenty(settings: Settings) -> int:
    """A device budget that anything fits."""
    return max(settings.device_budget, 1 << 44)


def _changed(
    forecaster: Forecaster, settings: Settings, host_bytes: int, now: Sequence[Schedule]
) -> dict[str, Any]:
    """The parts and gains of an Estimate."""
    is_compute = all(schedule.verdict.is_compute for schedule in now)
    return {
        "parts": {} if is_compute else parts(forecaster, settings, now),
        "gains": tuple(gains(forecaster, settings, host_bytes, now)),
    }


def _unquantized(slots: Sequence[Any]) -> tuple[int, int, str]:
    left = [s for s in slots if not s.is_raw and not s.has_moments and s.parameter.ndim >= 3]
    if not left or not any(slot.is_raw for slot in slots):
        return 0, 0, ""
    return len(left), sum(s.parameter.numel() * s.dtype.itemsize for s in left), left[0].name


def _forecast(forecaster: Forecaster, settings: Settings, *, has_gains: bool) -> Estimate:
    paper, recorded = forecaster.paper, forecaster.recorded
    slots = paper.registration.slots
    arguments = settings.core_arguments(paper.registration, paper.ranks.size)
    left = [slots[number] for number in recorded.parameters]
    base = Estimate(
        model=title(paper.model),
        parameters=sum(slot.parameter.numel() for slot in slots),
        trained=sum(slot.parameter.numel() for slot in slots if slot.has_moments),
        machine=forecaster.machine,
        settings=settings,
        optimizer="" if paper.optimizer is None else type(paper.optimizer).__name__,
        state_bytes=sum(moment_bytes(slot) for slot in slots if slot.has_moments),
        is_opaque=paper.opaque is not None,
        chunk_bytes=arguments["chunk_bytes"],
        weight_bytes=sum(slot.parameter.numel() * slot.dtype.itemsize for slot in slots),
        gradient_bytes=sum(
            slot.parameter.numel() * (4 if settings.is_grad_f32 else slot.dtype.itemsize)
            for slot in left
        ),
        activation_bytes=recorded.peak_bytes,
        buffer_bytes=recorded.kept_bytes,
        pool_bytes=forecaster.pool,
        tokens=recorded.tokens * forecaster.micro_batches * paper.ranks.size,
        ranks=paper.ranks.size,
        is_quantized=any(slot.is_raw for slot in slots),
        unquantized=_unquantized(slots),
    )
    refusals = forecaster.refusals(settings)
    if refusals:
        host = next((r.enough for r in refusals if r.what == "host"), None)
        is_cuda = settings.device.type == "cuda"
        context = context_bytes(host or 0, base.ranks) + DRIVER_RESERVE if is_cuda else 0
        return replace(base, refusals=tuple(refusals), context_bytes=context, host_bytes=host or 0)
    schedules, planned = forecaster.schedules(settings)
    assert planned is not None and planned.plan is not None
    stats = planned.stats
    host_bytes = int(stats["host_bytes"])
    most = max(int(s.plan["device_bytes"]) for s in schedules)
    on_host = most if settings.device.type == "cpu" else 0
    peak = PROCESS_BYTES + host_bytes + on_host
    masters = sum(s.parameter.numel() * (4 if s.has_low else s.dtype.itemsize) for s in slots)
    peaks = [forecaster.device_peaks(settings, schedule.when) for schedule in schedules]
    return replace(
        base,
        schedules=tuple(schedules),
        device_peak_bytes=max(map(max, peaks)),
        planned_peak_bytes=max(planned_peak for planned_peak, _ in peaks),
        context_bytes=planned.context_bytes,
        host_bytes=host_bytes,
        spare_bytes=int(stats["spare_bytes"]),
        staying_bytes=int(stats["staying_bytes"]),
        host_peak_bytes=peak,
        model_bytes=sum(s.parameter.numel() * s.original_dtype.itemsize for s in slots),
        saving_peak_bytes=peak + _SAVING_BYTES,
        state_dict_peak_bytes=peak + masters + base.state_bytes,
        stats=stats,
        **(_changed(forecaster, settings, host_bytes, schedules) if has_gains else {}),
    )


@suggesting
def estimate(
    model: nn.Module | Sequence[nn.Module],
    inputs: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    step_fn: StepFunction | None = None,
    gpu: str | Machine | None = None,
    rates: str | Path | Mapping[str, Any] | None = None,
    device: str = "cuda",
    device_budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    placement_policy: PolicyName = "auto",
    precision: PrecisionName | None = None,
    micro_batches: int = 1,
    ranks: int = 1,
    chunk_size: int | str | None = None,
    block_size: int | str | None = None,
    chunk_search_range: int | str | None = None,
    chunk_search_n_grids: int | None = None,
    min_chunk_size: int | str | None = None,
    gradient_dtype: torch.dtype | None = None,
    convert_inputs: bool = True,
    sweep: Sequence[int | str] = (),
) -> Estimate:
    """What training `model` under `manage()` with the same arguments will take. Nothing is allocated or computed.

    A forward and backward run on tensors without bytes, activation checkpointing included, and the core itself plans
    from what they did (csrc/device/paper.h). What stays unknown is what the driver and torch's allocator add, for which
    measured figures are taken, and, without measured rates, the machine.

    Args:
        model: on any device, the meta device best; it is as before afterwards. Or a list of models, as for manage(),
            of which step_fn gets an nn.ModuleList.
        inputs: of the model, as (meta) tensors: one, a list of arguments, or a dict of them. Values do not count.
        optimizer: as for manage(), over parameters on the meta device, too; None: AdamW over every parameter that
            requires a gradient. What others than Adam and AdamW keep is found by stepping tensors without bytes; how
            fast they step is not known before a run, and Adam's rate on the device is taken.
        step_fn: (model, inputs) -> the loss, or None if it runs the backward itself. None: the model's own loss.
        gpu: a name of `gemini_strategy.estimates.machines.GPUS`, or a Machine; None: the GPU that is here.
        rates: measured figures in the place of the GPU's (see machine_of).
        device: "cuda"; "cpu": the host device.
        device_budget, host_budget, placement_policy, precision, chunk_size, block_size, chunk_search_range,
            chunk_search_n_grids, min_chunk_size, gradient_dtype, convert_inputs: as for manage(). host_budget None: for
            homes what is free on this host, and for spares half of what is free beside them, if the GPU is this one's,
            or the device the host device. The host of another GPU is not known: then there is no limit for homes, and
            there are no spares.
        micro_batches: passes in one optimizer step.
        ranks: that train together on one host, each with a GPU and inputs of its own. They share weights and states;
            budgets and rates are of each. Collectives take the time that the GPUs' links give (Machine.link).
        sweep: device budgets for a table; see Estimate.sweep.

    Raises:
        ValueError: an argument is out of its range.
        GeminiError: manage() would refuse the model, or its forward asks for values of tensors.
    """
    given = dict(locals())
    model = joined(model)
    arguments = Arguments("estimate", given)
    arguments.check_choice("device", ("cuda", "cpu"))
    arguments.check_count("micro_batches")
    arguments.check_count("ranks")
    arguments.check_choice("gradient_dtype", (None, torch.float32))
    check("estimate", given, Sizes)
    machine = gpu if isinstance(gpu, Machine) else machine_of(gpu, rates)
    if not isinstance(gpu, Machine) and (device == "cpu" or is_here(gpu)):
        machine = with_host(machine)
    settings = settings_of(given, machine)
    budgets = [parse_bytes(size, machine.memory, "sweep, a device_budget") for size in sweep]
    paper = PaperModel(model, optimizer, settings.device, settings.precision, ranks)
    if paper.opaque is not None and settings.precision.is_mixed:  # as manage() has them
        settings = replace(settings, is_grad_f32=True)
    recorded = record(
        model,
        inputs,
        paper.registration,
        settings.precision,
        step_fn=step_fn,
        is_cuda=device == "cuda",
        convert_inputs=convert_inputs,
    )
    forecaster = Forecaster(paper, recorded, machine, micro_batches)
    result = _forecast(forecaster, settings, has_gains=True)
    others = [
        _forecast(forecaster, replace(settings, device_budget=size), has_gains=False)
        for size in budgets
    ]
    return replace(result, sweep=tuple(others))
