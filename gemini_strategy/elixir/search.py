"""The searches: a chunk size, a budget, and what the planner predicts of a training step.

The size is the layout's (sizes.py), the prediction the planner's: a step on an example batch is run and traced on a
twin of the model, under an engine of its own, on the device where the model will be trained.

Invariants
    1. The model does not change: the twin has modules and buffers of its own, reads the model's parameters once, in
       place, and makes its step with a learning rate of 0. Random numbers are as they were.
    2. What is found is what `manage()` would take with the same arguments.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy import _C
from gemini_strategy._torch import make_subclass, tree_map
from gemini_strategy.arguments import Arguments
from gemini_strategy.close import give_back
from gemini_strategy.precision import weight_dtypes
from gemini_strategy.report.tables import bytes_text, plan_of, plan_table
from gemini_strategy.sizes import ChunkSizes, parse_device_budget
from gemini_strategy.wrapper import is_first_rank, refuse

PRECISION_OF = {torch.float32: "32-true", torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}
StepFunction = Callable[[nn.Module, Any], Any]
"""(model, inp): runs a forward of the model and a backward; what it returns is not looked at."""
NO_GRADIENT = "step_fn has left no gradient: it has to run the forward of the model that it is given, and a backward"


@dataclass(frozen=True)
class SearchResult:
    """What a search has found; for ElixirModule.

    Attributes:
        chunk_size: bytes of weights in one chunk.
        device_budget: bytes that the engine may use on each device; None: what the device has.
        placement_policy: "auto", "cpu" or "cuda", as manage() knows them.
        unified_dtype: of the weights that are computed with.
        world_size: ranks that share the chunks.
        numels: elements of each parameter, by which the model is known again.
        predicted: of a step on the example batch: "step_seconds", "device_peak_bytes", "host_peak_bytes", "classes"
            (chunks by the place of their update), "when" (of updates) and the other figures of the plan. None without
            an example, and where the budget leaves no room to plan.
        table: the plan's table as text; "" without one.
    """

    chunk_size: int
    device_budget: int | None
    placement_policy: str
    unified_dtype: torch.dtype
    world_size: int
    numels: tuple[int, ...]
    predicted: Mapping[str, Any] | None = field(default=None, repr=False)
    table: str = field(default="", repr=False)


def minimum_waste_search(
    m: nn.Module,
    group_size: int,
    unified_dtype: torch.dtype = torch.float,
    cpu_offload: bool = False,
    prefetch: bool = False,
    verbose: bool = False,
    pin_memory: bool = True,
    inp: Any = None,
    step_fn: StepFunction | None = None,
    device_budget: int | float | str | None = None,
) -> SearchResult:
    """The chunk size that leaves the least of each chunk unused.

    Args:
        m: the model.
        group_size: ranks that share the chunks.
        unified_dtype: torch.float32, float16 or bfloat16.
        cpu_offload: everything has its place on the host; False: on the device, and nothing on the host.
        prefetch: predict a step whose updates run inside the backward; needs `inp` and `step_fn`.
        verbose: rank 0 prints the result, and the plan's table if there is an example.
        pin_memory: True; the host's part of the chunks is always pinned.
        inp, step_fn: an example batch, and a function of a model and it that runs forward and backward. With them a
            step is traced, and the result has a prediction.
        device_budget: bytes on each device, as for manage().

    Raises:
        ValueError: an argument is refused, by name.
    """
    given = dict(locals())
    call = "minimum_waste_search"
    precision = _checked(call, given)
    refuse(
        call, given, {"pin_memory": (True, "places on the host are pinned memory; leave it out")}
    )
    policy = "cpu" if cpu_offload else "cuda"
    sizes = ChunkSizes(None, None, None, 4096, None)
    chunk_size, _ = sizes.choose(_shapes(m, precision), -1, torch.cuda.is_available())
    if prefetch and step_fn is None:
        raise ValueError(
            f"{call}(prefetch=True): what can overlap is known from a step: give inp= and step_fn="
        )
    return _result(m, given, chunk_size, policy, prefetch)


def optimal_search(
    m: nn.Module,
    group_size: int,
    unified_dtype: torch.dtype = torch.float,
    optimizer_type: str = "Adam",
    overlap: bool = False,
    verbose: bool = False,
    inp: Any = None,
    step_fn: StepFunction | None = None,
    device_budget: int | float | str | None = None,
) -> SearchResult:
    """The chunk size and the places that the planner chooses for a step on an example batch.

    Args:
        m, unified_dtype, device_budget: as minimum_waste_search has them.
        group_size: ranks that share the chunks; all of them call this.
        optimizer_type: "Adam".
        overlap: predict a step whose updates run inside the backward (ElixirModule(prefetch=True)).
        verbose: rank 0 prints the plan's table.
        inp: an example batch, for step_fn; its tensors are moved to the device.
        step_fn: step_fn(model, inp) runs forward and backward.

    Raises:
        ValueError: an argument is refused, by name; or step_fn leaves no gradient, or one that is not finite.
        GeminiMemoryError: a module does not fit the budget.
    """
    given = dict(locals())
    call = "optimal_search"
    _checked(call, given)
    refuse(call, given, {"optimizer_type": ("Adam", "the engine updates with Adam and AdamW")})
    if step_fn is None:
        raise ValueError(
            f"{call}(step_fn=None): the step is traced to plan it: give inp= and step_fn=, a function of a model and "
            "that batch which runs forward and backward; minimum_waste_search needs neither"
        )
    return _result(m, given, None, "auto", overlap)


def _checked(call: str, given: dict[str, Any]) -> str:
    """The precision of the dtype."""
    arguments = Arguments(call, given)
    arguments.check_count("group_size")
    arguments.check_choice("unified_dtype", tuple(PRECISION_OF))
    names = [name for name in ("cpu_offload", "prefetch", "overlap", "verbose") if name in given]
    arguments.check_bool(*names)
    arguments.check_size("device_budget", of_total=True)
    if given["step_fn"] is None and given["inp"] is not None:
        raise ValueError(f"{call}(inp=...): without step_fn= nothing uses it")
    return PRECISION_OF[given["unified_dtype"]]


def _shapes(model: nn.Module, precision: str) -> list[tuple[int, int, int]]:
    """(elements, bytes of each, kind) of every parameter, as the layout packs them."""
    dtypes = weight_dtypes(model, precision)
    kinds: dict[tuple[torch.dtype, bool], int] = {}
    return [
        (p.numel(), dtypes[p].itemsize, kinds.setdefault((dtypes[p], p.requires_grad), len(kinds)))
        for p in model.parameters()
    ]


def _result(
    model: nn.Module, given: dict[str, Any], chunk_size: int | None, policy: str, overlap: bool
) -> SearchResult:
    found: dict[str, Any] = {"chunk_size": chunk_size, "device_budget": given["device_budget"]}
    if given["step_fn"] is not None:
        found |= _traced(model, given, chunk_size, policy, overlap)
    elif given["device_budget"] is not None:
        cuda = torch.cuda.is_available()
        gpu_bytes = torch.cuda.mem_get_info()[1] if cuda else None
        found["device_budget"] = parse_device_budget(given["device_budget"], cuda, gpu_bytes)
    result = SearchResult(
        placement_policy=policy,
        unified_dtype=given["unified_dtype"],
        world_size=given["group_size"],
        numels=tuple(p.numel() for p in model.parameters()),
        **found,
    )
    if given["verbose"] and is_first_rank():
        text = f"chunk size {bytes_text(result.chunk_size)}\n{result.table}"
        print(text.strip(), file=sys.stderr, flush=True)
    return result


def _twin(model: nn.Module) -> nn.Module:
    """A copy of the model that shows the memory of its parameters, and has all else of its own."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        shown = _shown(parameter.detach())
        memo[id(parameter)] = make_subclass(type(parameter), shown, parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _shown(values: torch.Tensor) -> torch.Tensor:
    """The same memory in a storage of its own: manage() refuses two parameters of one storage."""
    if values.is_meta:
        return torch.empty_like(values)
    try:
        return torch.from_dlpack(values)
    except BufferError:  # a dtype that DLPack does not know
        return values.clone()


def _traced(
    model: nn.Module, given: dict[str, Any], chunk_size: int | None, policy: str, overlap: bool
) -> dict[str, Any]:
    """What a step on the example shows."""
    if gs.engine_of(model) is not None:
        raise gs.GeminiError("the model is managed already: search before that")
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        twin = _twin(model)
        trained = [p for p in twin.parameters() if p.requires_grad]
        engine = gs.manage(
            twin,
            torch.optim.AdamW(trained, lr=0.0),
            precision=PRECISION_OF[given["unified_dtype"]],
            placement_policy=policy,
            chunk_size=chunk_size,
            device_budget=given["device_budget"],
            initial_scale=1.0,
            report=False,
        )
        with engine:
            if engine.ranks.size != given["group_size"]:
                raise ValueError(
                    f"the search is for {given['group_size']} ranks, and {engine.ranks.size} are there to trace a "
                    "step: start as many (torchrun), or give the number that there is"
                )
            _run(engine, given, overlap)
            found = _figures(engine)
            # Nobody wants the twin's weights, which close() would bring together on every rank.
            engine.zero_grad()
            engine.ranks.gather("the end of a search")
            for slot in engine._runtime.slots:
                slot.shown = None
            _C.uninterrupted(give_back, engine._runtime, {}, {})
    return found


def _run(engine: gs.Engine, given: dict[str, Any], overlap: bool) -> None:
    runtime = engine._runtime

    def here(value: Any) -> Any:
        return value.to(engine.device) if isinstance(value, torch.Tensor) else value

    example = tree_map(here, given["inp"])
    ending = engine.ends_step() if overlap else contextlib.nullcontext()
    with runtime.ranks.explaining(), runtime.accept_scaled(), ending:
        given["step_fn"](engine.model, example)
    if not any(runtime.core.has_grad(slot.id) for slot in runtime.slots):
        raise ValueError(NO_GRADIENT)
    engine.step()
    if engine.stats()["skipped_steps"]:
        raise ValueError("step_fn leaves gradients that are not finite in float16: another example")


def _figures(engine: gs.Engine) -> dict[str, Any]:
    stats, plan = engine.stats(), plan_of(engine._runtime)
    budget = int(stats["device_budget_bytes"])
    predicted = None
    if plan is not None:
        peaks = {f"{w}_peak_bytes": stats[f"predicted_{w}_peak_bytes"] for w in ("device", "host")}
        predicted = MappingProxyType({**plan, **peaks})
    return {
        "chunk_size": engine._runtime.chunk_bytes,
        "device_budget": None if budget < 0 else budget,
        "predicted": predicted,
        "table": plan_table(engine._runtime),
    }
