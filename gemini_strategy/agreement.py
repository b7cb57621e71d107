"""What the ranks of a run must have in common before they build, after it, and at each step.

Measured numbers that a plan is made of are brought together: the least budget, the lowest rate. Everything else has to
be equal, and a difference is an error on every rank that names it. With one rank nothing here does anything.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gemini_strategy._version import __version__
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.adam import hyperparameters, mode
from gemini_strategy.optim.several import parts_of
from gemini_strategy.precision import LossScaler
from gemini_strategy.ranks.comm import ranks_text
from gemini_strategy.ranks.ranks import Ranks, check_lines, check_same, fingerprint
from gemini_strategy.settings import Settings

if TYPE_CHECKING:
    from gemini_strategy.parameters.slot import Slot
    from gemini_strategy.runtime import Runtime


def common_settings(settings: Settings, scaler: LossScaler, ranks: Ranks) -> Settings:
    """The settings with the least budgets of all ranks; the rest must be equal."""
    if ranks.size == 1:
        return settings
    sizes = settings.sizes
    search = [sizes.searches, sizes.minimum, sizes.range, sizes.n_grids]
    ranks.agree(
        {
            "the version of gemini_strategy": __version__,
            "the version of torch": torch.__version__,
            "device": settings.device.type,
            "precision": settings.precision.name,
            "placement_policy": settings.policy,
            "gradient_dtype": "torch.float32" if settings.is_grad_f32 else None,
            "gpu_margin_mem_ratio": settings.margin,
            "chunk_size": sizes.chunk,
            "block_size": sizes.block,
            "the search for a chunk size": search,
            "convert_inputs": settings.convert_inputs,
            "force_outputs_fp32": settings.force_outputs_fp32,
            "missing": settings.missing,
            "whether weights are given": settings.weights is not None,
            "GEMINI_TUNE": settings.is_tuned,
            "the loss scaler": [*scaler.state_dict().values(), scaler.min_scale, scaler.max_scale],
            "timeout": ranks.timeout,
            "the shape of the mesh": [ranks.replica.size, ranks.shard.size],
        },
        "the arguments of manage()",
    )
    if settings.device.type == "cuda":
        _check_devices(settings.device, ranks)
    names = ("device_budget", "host_budget", "host_limit")
    everyone = ranks.gather("budgets", [getattr(settings, name) for name in names])
    least = {}
    for name, budgets in zip(names, zip(*everyone, strict=True), strict=True):
        least[name] = min((budget for budget in budgets if budget >= 0), default=-1)
    return dataclasses.replace(settings, **least)


def _check_devices(device: torch.device, ranks: Ranks) -> None:
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    owners: dict[str, int] = {}
    for rank, other in enumerate(ranks.gather("devices", uuid)):
        if other in owners:
            raise GeminiError(
                f"ranks {owners[other]} and {rank} have the same GPU ({device} on rank {ranks.rank}): call "
                'torch.cuda.set_device(local_rank) before the model is built, or give device=f"cuda:{local_rank}"'
            )
        owners[other] = rank


# ---- the model ----


def check_model(engine: Runtime, slots: list[Slot], units: tuple[list[int], list[int]]) -> None:
    """The same parameters in the same order, the same buffers, the same optimizer."""
    ranks, optimizer = engine.ranks, engine.optimizer
    if ranks.size == 1:
        return
    groups = [] if optimizer is None else optimizer.param_groups
    lines = [_line(engine, slot) for slot in slots]
    lines += [
        f"buffer {name}: {tuple(b.shape)} {b.dtype}" for name, b in engine.model.named_buffers()
    ]
    ranks.agree(
        {
            "the optimizer": [type(each).__name__ for each in parts_of(optimizer)],
            "the numbers of parameters in its groups": [len(group["params"]) for group in groups],
            "the number of parameters": len(slots),
            "the number of modules with parameters": len(units[1]) - 1,
        },
        "the model",
    )
    names = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    if len(set(ranks.gather("names, shapes and dtypes", names))) > 1:
        everyone = ranks.gather("parameters and buffers", lines)
        check_lines("tensor {} of the model", everyone)
    ranks.agree({"the parameters of each module": [units[0], units[1]]}, "modules")
    _check_groups(engine, slots)


def _check_groups(engine: Runtime, slots: list[Slot]) -> None:
    """Groups made of a set, say, have other members on each rank, and each shard would have its own learning rate."""
    if engine.optimizer is None:
        return
    names = {id(slot.parameter): slot.name for slot in slots}
    groups = [[names[id(p)] for p in g["params"]] for g in engine.optimizer.param_groups]
    digest = hashlib.sha256(repr(groups).encode()).hexdigest()
    if len(set(engine.ranks.gather("members of param groups", digest))) == 1:
        return
    everyone = engine.ranks.gather("names in param groups", groups)
    for number, of_ranks in enumerate(zip(*everyone, strict=True)):
        check_lines(f"parameter {{}} of param group {number} of the optimizer", of_ranks)


def _line(engine: Runtime, slot: Slot) -> str:
    """What must be the same of a parameter."""
    parameter = slot.parameter
    state = {} if engine.optimizer is None else engine.optimizer.state.get(parameter, {})
    traits = [
        str(slot.shape),
        "contiguous" if slot.is_row_major else f"strides {slot.strides}",
        f"{parameter.dtype} kept as {slot.dtype}",
        "on the meta device" if parameter.is_meta else "with values",
        "trained" if slot.has_moments else "with a gradient" if slot.has_grad_home else "frozen",
    ]
    if parameter.grad is not None:  # of close(), or of this rank alone, which may differ in a row
        found = fingerprint(parameter.grad, of_all=True)
        traits.append(f"a gradient already (zero_grad() drops it): {found}")
    if "step" in state:
        traits.append(f"after {int(state['step'])} steps with {', '.join(sorted(state))}")
    return f"{', '.join(slot.names)}: {', '.join(traits)}"


def check_layout(engine: Runtime) -> None:
    """The same chunks; what is built on them has the same numbers then."""
    if engine.ranks.size == 1:
        return
    stats = engine.core.stats()
    engine.ranks.agree(
        {"the number of chunks": stats["chunks"], "the layout": f"{stats['layout_hash']:x}"},
        "the layout",
    )


# ---- a step ----


class Written:
    """What this rank has written to parameters, gradients and states, since the ranks compared it.

    Each rank keeps its part of what it is given: values that differ, or a write that some leave out, would be mixed. It
    is told of what comes by `full_parameter`, `p.grad`, `load_state_dict` and states; not of writes in place
    (`p.data.copy_()`, `p.mul_()` under no_grad).
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._hash = ""  # of all of them, those that are forgotten included
        self._grads: dict[int, list[str]] = {}  # by slot, while it has that gradient

    def note(self, slot: Slot, what: str, values: torch.Tensor) -> None:
        if self._ranks.size > 1:
            self._lines.append(_written(slot, what, values))
            self._hash = _digest(self._hash, self._lines[-1])

    def note_grad(self, slot: Slot, values: torch.Tensor) -> None:
        if self._ranks.size > 1:
            self._grads.setdefault(slot.id, []).append(_written(slot, "gradient", values))

    def forget_grad(self, slot: Slot) -> None:
        self._grads.pop(slot.id, None)

    def digests(self) -> list[str]:
        return [self._hash, _digest(*self._grad_lines()) if self._grads else ""]

    def compare(self, everyone: Sequence[Sequence[str]]) -> None:
        """Each rank's digests.

        Raises:
            GeminiError: on all ranks. For gradients, until they are dropped; else it is the end of these ranks,
                since what they hold now is of no single write.
        """
        if len({own[0] for own in everyone}) > 1:
            told = self._ranks.gather("what was written", list(self._lines))
            raise self._ranks.failed(_difference("what was written since the last step", told))
        if len({own[1] for own in everyone}) > 1:
            told = self._ranks.gather("what was written to gradients", self._grad_lines())
            raise _difference("what was written to gradients", told)
        self._lines.clear()
        self._hash = ""
        self._grads.clear()

    def _grad_lines(self) -> list[str]:
        return [line for lines in self._grads.values() for line in lines]


_LINES = 1 << 14  # that are kept to name the first one that differs


def _written(slot: Slot, what: str, values: torch.Tensor) -> str:
    return f"{what} of {slot.name}: {fingerprint(values)}"


def _difference(what: str, everyone: Sequence[Sequence[str]]) -> GeminiError:
    try:
        check_lines(what + " (number {})", everyone)
    except GeminiError as error:
        return error
    return GeminiError(f"the ranks differ in {what}")


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def check_step(
    engine: Runtime, what: str, present: Iterable[Slot], fields: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """All ranks are at the same step, with gradients of the same parameters; gives every rank's `fields`.

    Raises:
        GeminiError: a parameter has a gradient on some ranks and none on others, or from other backward passes, or the
            ranks have written different values to parameters or states; nothing has been changed. Or the
            collectives so far differ, of which NCCL itself tells nothing: the engine cannot be used any more.
    """
    if engine.ranks.size == 1:
        return [dict(fields)]
    with engine.ranks.explaining():
        engine.core.catch_up()
    mask = f"{sum(1 << slot.id for slot in present):x}"
    sums, written = engine.core.sums(), engine.written
    same = _digest(mask, sums.hex())
    own = [same, engine.ranks.calls(), written.digests(), dict(fields)]
    everyone = engine.ranks.gather(what, own)
    engine.ranks.compare_calls(what, [each[1] for each in everyone])
    written.compare([each[2] for each in everyone])
    if any(each[0] != same for each in everyone):
        _refuse_grads(engine, what, mask, sums)
    return [each[3] for each in everyone]


_ALIKE = (
    "every rank must use the same parameters (multiply a loss that is to count nothing by zero)"
)


def _refuse_grads(engine: Runtime, what: str, mask: str, sums: bytes) -> None:
    """Some rank has no gradient, or one that is not in the sum of every micro-batch: which one, and whose."""
    held = f"{sum(1 << slot.id for slot in engine.slots if engine.core.has_grad(slot.id)):x}"
    mine = [mask, list(memoryview(sums).cast("Q")), held]
    everyone = engine.ranks.gather(f"{what}: who has which gradients", mine)
    masks, has = ([int(own[i], 16) for own in everyone] for i in (0, 2))
    for slot in engine.slots:
        without = [rank for rank, own in enumerate(masks) if not own >> slot.id & 1]
        ungrouped = [rank for rank in without if has[rank] >> slot.id & 1]
        if 0 < len(ungrouped) < len(masks):
            raise GeminiError(
                f"{what}: {slot.name} is in no param group on {ranks_text(ungrouped)}, but in one on the others: the "
                "groups must be the same on all ranks"
            )
        if 0 < len(without) < len(masks):
            raise GeminiError(
                f"{what}: {slot.name} has no gradient on {ranks_text(without)}, but one on the others: {_ALIKE}"
            )
    for slot in engine.slots:
        of_ranks = [own[1][slot.id] for own in everyone]
        others = [rank for rank, own in enumerate(of_ranks) if own != of_ranks[0]]
        if others:
            raise GeminiError(
                f"{what}: {slot.name} got its gradient in other backward passes on {ranks_text(others)} than on "
                f"rank 0: in each micro-batch {_ALIKE}"
            )


_VALUES = "the optimizer's values"


def _hyperparameters(engine: Runtime) -> tuple[dict[str, Any], dict[str, str]]:
    """What a step is made with, as fields that must be the same, and the values that one of them is the digest of."""
    if engine.opaque is None:
        groups = enumerate(engine.optimizer.param_groups)
        name = "the hyperparameters of param group {}"
        return {name.format(i): [*hyperparameters(g), *mode(g)] for i, g in groups}, {}
    values = engine.opaque.values()
    return {_VALUES: _digest(*itertools.chain(*values.items()))}, values


def check_hyperparameters(engine: Runtime, what: str, present: Iterable[Slot]) -> list[Slot]:
    """check_step, and the step would do the same on every rank; gives what a tensor shows on some rank."""
    fields, values = _hyperparameters(engine)
    fields["the limit"] = engine.coming_step.limit
    fields["the loss scale"] = [1.0 if engine.scaler is None else engine.scaler.scale]
    fields["shown"] = sum(1 << number for number in engine.core.leased())
    try:
        everyone = check_step(engine, what, present, fields)
        # The norm has the same bits on all ranks, so equal limits are equal factors, for which nobody has to wait.
        limits = {str(each.pop("the limit")) for each in everyone}
        if len(limits) > 1:
            factors = engine.ranks.gather("clip factors", engine.coming_step.factor)
            for each, factor in zip(everyone, factors, strict=True):
                each["the clip factor"] = [factor]
        shown = functools.reduce(operator.or_, [each.pop("shown") for each in everyone])
        if len({each.get(_VALUES) for each in everyone}) > 1:
            check_same(engine.ranks.gather(_VALUES, values))
        check_same(everyone)
    except GeminiError as error:
        closed = engine.coming_step.give_up(str(error))
        if closed is None:
            raise
        engine.ranks.abort(closed)
        raise type(error)(closed) from error
    return [slot for slot in engine.slots if shown >> slot.id & 1]
