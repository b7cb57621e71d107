"""`manage()`: from a model, an optimizer and one number to an engine."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import nn

from gemini_strategy import _C
from gemini_strategy.agreement import common_settings
from gemini_strategy.arguments import taking
from gemini_strategy.engine import Engine
from gemini_strategy.errors import GeminiError
from gemini_strategy.inherited import note
from gemini_strategy.machine.device import find_device
from gemini_strategy.machine.host import pci_bus_id, place, share_of_host
from gemini_strategy.machine.rates import are_tuned, machine_rates
from gemini_strategy.optim.several import Several, parts_of
from gemini_strategy.parameters import absent, doors, patches, quantized
from gemini_strategy.parameters.hooks import RootForward, keep_nets_on_top
from gemini_strategy.parameters.original import Original
from gemini_strategy.precision import LOSS_SCALING, LossScaler, Precision
from gemini_strategy.ranks.ranks import Ranks
from gemini_strategy.roots import joined
from gemini_strategy.runtime import Runtime
from gemini_strategy.settings import Managed, Settings, check
from gemini_strategy.sizes import (
    SIZES,
    ChunkSizes,
    host_limit,
    parse_bytes,
    parse_device_budget,
    physical_memory,
    size_text,
)


def engine_of(model: nn.Module) -> Engine | None:
    """The open engine that manages `model` or any parameter of it, or None."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"engine_of: model must be a torch.nn.Module, got {type(model).__name__}")
    forward = vars(model).get("forward")  # is there also when all parameters were replaced
    if isinstance(forward, RootForward) and forward.model is model and not forward.engine.closed:
        return forward.engine.engine
    for parameter in model.parameters():
        for each in (parameter, *(part for _, part in quantized.parts(parameter))):
            slot = getattr(each, "_gm_slot", None)
            if slot is not None and not slot.engine.closed:
                return slot.engine.engine
    return None


@taking(Managed)
def manage(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    **given: Unpack[Managed],
) -> Engine:
    """Puts a built model's parameters into chunks, in place, and takes its optimizer over.

    The model keeps its class, its modules and its Parameter objects; the optimizer object stays the
    one that LR schedulers know. Train as before: forward, `loss.backward()` (`engine.backward(loss)`
    with "16-mixed"), `optimizer.step()`, `optimizer.zero_grad()`; clip with `engine.clip_grad_norm_`. Where
    nothing needs the gradients between a backward and its step, `engine.backward(loss, step=True)` lets
    updates overlap with that backward.

    The first step is served on demand and traced; the plan that is made at its end is followed from then on.

    With several ranks (torchrun and torch.distributed.init_process_group, or mesh=) all of them call this, with the
    same model. Each keeps a part of every parameter and of its states, and gradients are averaged over the ranks. They
    begin with rank 0's parameters and buffers, where these have values; initial values are made with rank 0's random
    numbers. Arguments have to be the same on all ranks, but for device, report and the budgets, of which the least
    counts; of measured rates the lowest.

    Args:
        model: a built model; its parameters may be on the CPU, on `device` or on the meta device. Those on
            the meta device keep their identity, so that the optimizer may be made before, and get their
            values straight in their chunks: from `weights`, else from their modules' own initial values
            (reset_parameters, or transformers' _init_weights), module after module on the CPU. Or a list of models
            that one optimizer trains: they stay apart, are called in any order, and have one budget and one plan;
            `engine.model` is an nn.ModuleList of them, and "1.layer.weight" a parameter of the second.
        optimizer: over parameters of the model. torch.optim.AdamW and Adam, HybridAdam and CPUAdam are computed by the
            engine; any other that treats each parameter by itself is stepped by its own step(), on the device. Or a
            list of them, of disjoint parameters. None for inference, or for torch's own steps: parameters then keep
            torch's own `.grad`, of several ranks the mean.
        given: Managed, in settings.py. Of several models `weights` may be paths by the names "0", "1".

    Returns:
        The engine.

    Raises:
        ValueError: an argument is out of its range.
        GeminiError: the model or optimizer cannot be managed; the text names the parameter. Or the ranks differ: the
            text names in what.
        GeminiDeviceError: another rank did not come, or has raised.
        GeminiMemoryError: the budgets do not suffice; the text has the bytes wanted and available.

    Whatever it raises, the model and the optimizer are as they were: the same tensors, hooks and states.
    """
    is_sharded = given["enable_distributed_storage"]
    ranks = Ranks(given["mesh"], given["timeout"], is_sharded=is_sharded)
    original = None
    try:
        model = joined(model)
        if isinstance(optimizer, list | tuple):
            optimizer = Several(optimizer) if len(optimizer) > 1 else next(iter(optimizer), None)
        check("manage", given, Managed)
        if absent.nets:
            gc.collect()  # a model that nobody has any more is a cycle with its engine, and keeps its homes
        settings = _settings(given, ranks)
        scaler = LossScaler(**{name: given[name] for name in LOSS_SCALING})
        settings = common_settings(settings, scaler, ranks)
        if engine_of(model) is not None:
            raise GeminiError(
                "this model is managed already: call close() on its engine "
                "(gemini_strategy.engine_of(model)) before managing it again"
            )
        doors.install()
        keep_nets_on_top()
        original = Original(model, parts_of(optimizer))
        # Whatever device the caller builds on, and whether or not anything will be trained there. torch looks at each
        # call where one is given.
        is_usual = torch.get_default_device().type == "cpu"
        on_host = contextlib.nullcontext() if is_usual else torch.device("cpu")
        with patches.opening(), on_host, torch.inference_mode(False):
            runtime = Runtime(model, optimizer, settings, scaler, ranks, original)
            engine = Engine(runtime)
        asked = settings.device_budget
        budget = "what there is" if asked < 0 else size_text(asked)
        note(type(model).__name__, optimizer is not None, budget, ranks.rank, ranks.size)
    except BaseException as error:  # whatever it was: all of it stands, or nothing has changed
        if original is not None:
            _C.uninterrupted(original.restore, error)
            patches.take_off()
        ranks.give_up("manage()", error)
        raise
    return engine


def _settings(given: Mapping[str, Any], ranks: Ranks) -> Settings:
    """The arguments of manage() as numbers, with the rates of this machine; binds this process to its share of it."""
    device = find_device(given["device"], tells=ranks.local_rank == 0)
    is_cuda = device.type == "cuda"
    _C.isa_name()  # GEMINI_ISA is refused here, and not by the first update
    places = ranks.gather_here("place on the host", place(pci_bus_id(device)))
    share = share_of_host(places, ranks.local_rank, threads=given["threads"], has_gpu=is_cuda)
    share.use()
    rates = machine_rates(device.index if is_cuda else None, share.threads, ranks=ranks)
    memory = physical_memory() if share.memory is None else share.memory
    free = int(_C.host_topology()["memory"]) if share.memory is None else share.memory
    wanted = None
    host_budget = -1 if ranks.local_size == 1 else memory
    if given["host_budget"] is not None:
        asked = parse_bytes(given["host_budget"], memory, "host_budget")
        wanted = host_budget = _within_machine(asked, ranks.local_rank == 0)
    return Settings(
        device=device,
        precision=Precision(given["precision"]),
        policy=given["placement_policy"],
        device_budget=parse_device_budget(
            given["device_budget"], is_cuda, torch.cuda.mem_get_info(device)[1] if is_cuda else None
        ),
        host_budget=host_budget,
        host_limit=host_limit(wanted, free),
        sizes=ChunkSizes(*(given[name] for name in SIZES)),
        is_grad_f32=given["gradient_dtype"] is not None,
        margin=given["gpu_margin_mem_ratio"],
        convert_inputs=given["convert_inputs"],
        force_outputs_fp32=given["force_outputs_fp32"],
        threads=share.threads,
        rates=tuple(rates[name] for name in _C.RATES),
        is_tuned=are_tuned(is_cuda),
        report=given["report"],
        weights=given["weights"],
        missing=given["missing"],
    )


def _within_machine(host_budget: int, tells: bool) -> int:
    """A budget that is given is believed up to what the machine has."""
    there = physical_memory()
    if host_budget <= there:
        return host_budget
    if tells:
        warnings.warn(
            f"host_budget is {size_text(host_budget)}, and this machine, or the control group of this process, has "
            f"{size_text(there)}: that counts",
            RuntimeWarning,
            stacklevel=5,
        )
    return there
