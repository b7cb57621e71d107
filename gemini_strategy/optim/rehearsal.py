"""Whether an optimizer of any class treats each parameter by itself, and how large its states will be.

That is decided by equality, not by names. A copy of it steps a few small tensors, together and in parts,
and every bit of weights and states has to come out equal.

Invariants
    1. A rehearsal leaves nothing behind: it steps copies, on tensors of its own, and puts random numbers, attributes of
       classes and torch's default dtype back as they were.
    2. A part has all groups of the optimizer, in their order; a group that has none of the part's parameters is empty.
    3. What torch.compile makes of a step is not rehearsed: a rehearsal runs the program as it is written.
    4. It shows what a few steps show. What an optimizer first does after more of them it does not see.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque, overrides
from gemini_strategy.optim.parts import Own, difference, reach, run
from gemini_strategy.optim.stage import (
    STEPS,
    WAY_OUT,
    Kind,
    Played,
    Sample,
    Stage,
    form_of,
    kinds_of,
    said,
    sample,
)

_STEPS_OF_SMALL = 6  # RAdam and others begin otherwise
_CUTS = (1, 3, 130, 4111)
_LONG = 1 << 17  # elements: more than one thread steps alone
_BLOCKS = (64, 128, 256, 2048, 4096)
# Bytes of parameters and gradients in a step that only finds out the sizes of states.
_MOST_REAL = 1 << 30


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal shows of an optimizer that treats each parameter by itself.

    Attributes:
        writes_itself: step() changes its groups or its own attributes (`Own`), each time it is called.
        cut: where a parameter may be cut and its pieces stepped as parameters of their own, for the same bits. At any
            "element", flat; at multiples of a "block" of `block` elements, flat, where the last piece takes the rest
            and is no shorter than a block; in front of any "row" of what has two dimensions or more, while other
            parameters stay whole; or nowhere: "whole".
        block: 1 unless cut is "block".
        writes_gradients: step() writes or drops gradients, or sets attributes of parameters.
    """

    writes_itself: bool
    cut: Literal["element", "block", "row", "whole"]
    block: int = 1
    writes_gradients: bool = False

    def has_cuts_of(self, other: Rehearsed) -> bool:
        """Whether pieces that the other allows are allowed here, too."""
        if other.cut == "whole" or (self.cut, self.block) == (other.cut, other.block):
            return True
        is_flat = {self.cut, other.cut} <= {"element", "block"}
        return is_flat and other.block % self.block == 0


# ---- where a parameter may be cut ----


def _cut(
    stage: Stage, writes_itself: bool
) -> tuple[Literal["element", "block", "row", "whole"], int]:
    """Where parameters may be cut, found by cutting."""
    kinds = [
        kind for kind in kinds_of(stage.optimizer, stage.dtypes) if kind.order and kind.most > 1
    ]

    def made(kind: Kind, shape: tuple[int, ...]) -> Sample:
        return sample(kind, shape, stage.device)

    def is_equal(tensors: list[Sample], cuts: Sequence[int], is_flat: bool = True) -> bool:
        return not tensors or _is_cut_equal(stage, writes_itself, tensors, cuts, is_flat)

    small = [made(kind, kind.rehearsed[0]) for kind in kinds]
    large = [made(kind, kind.rehearsed[-1]) for kind in kinds]
    longest = [made(kind, kind.long(min(kind.most, _LONG))) for kind in kinds]
    if all(is_equal(samples, _CUTS) for samples in (small, large, longest)):
        return "element", 1
    most = max((kind.most for kind in kinds), default=0)
    for block in (block for block in _BLOCKS if 2 * block <= most):
        cuts = (block, 2 * block)
        if all(
            is_equal([made(k, k.long(n)) for k in kinds for n in _lengths(k, block, least)], cuts)
            for least in (3 * block, 3 * _BLOCKS[-1], _LONG)
        ):
            return "block", block
        if stage.outgrows:
            break  # a step over longer pieces may take minutes
    rows = [tensor for tensor in large if tensor.value.dim() > 1]
    if rows and is_equal(rows, (1, 3, 20), False):
        return "row", 1
    return "whole", 1


def _lengths(kind: Kind, block: int, least: int) -> set[int]:
    """Of several blocks, with a rest like those of the optimizer's own; none where these have no two blocks."""
    if kind.most < 2 * block:
        return set()
    rests = {n % block for n in map(math.prod, kind.shapes) if n >= 2 * block}
    # The least aligned ones come first: they say most.
    some = sorted(rests, key=lambda n: (n & -n) or block)[:2]
    return {min(least, kind.most // block * block) + rest for rest in (0, *some)}


def _is_cut_equal(
    stage: Stage,
    writes_itself: bool,
    tensors: list[Sample],
    cuts: Sequence[int],
    is_flat: bool,
) -> bool:
    """Whether pieces, stepped as parameters, come out as the whole tensors do."""
    pieces = [tensor.pieces(cuts, is_flat) for tensor in tensors]
    flat = [piece for parts in pieces for piece in parts]
    try:
        whole = stage.play(tensors, [range(len(tensors))], writes_itself)
        apart = stage.play(flat, [range(len(flat))], writes_itself)
    except Exception:  # a step may refuse what pieces are, in any way
        return False
    if whole.own.difference(apart.own) is not None:
        return False
    for piece, each in zip(flat, apart.entries, strict=True):
        n = sum(tensor.numel() for _, tensor in opaque.leaves(each))
        stage.outgrows |= n > 32 * max(256, piece.value.numel())  # not a table's 256
    first = 0
    for weight, entry, parts in zip(whole.weights, whole.entries, pieces, strict=True):
        last = first + len(parts)
        if not _is_joined(weight, apart.weights[first:last]):
            return False
        found = [opaque.leaves(each) for each in (entry, *apart.entries[first:last])]
        paths = [[path for path, _ in each] for each in found]
        if any(path != paths[0] for path in paths):
            return False
        for leaf, *others in zip(*found, strict=True):
            tensors_apart = [tensor for _, tensor in others]
            is_same = all(difference(leaf[1], each, "") is None for each in tensors_apart)
            if not is_same and not _is_joined(leaf[1], tensors_apart):
                return False
        first = last
    return True


def _is_joined(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    if tensor.dim() == 0:
        return False
    joined = torch.cat([part.reshape(-1) for part in parts])
    return difference(tensor.reshape(-1), joined, "") is None


# ---- a rehearsal ----


def rehearse(
    optimizer: Optimizer,
    dtypes: Mapping[nn.Parameter, torch.dtype] | None = None,
    device: torch.device | None = None,
) -> Rehearsed:
    """Steps copies of an optimizer on small tensors, together and in parts.

    Args:
        optimizer: of a plain class.
        dtypes: in which parameters will be stepped; None: their own.
        device: where; None: where parameters are.

    Raises:
        GeminiError: it does not treat each parameter by itself, draws random numbers, needs a closure, or keeps what
            cannot be managed.
    """
    name = type(optimizer).__name__
    _check_closure(type(optimizer))
    _check_held(optimizer)
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    cpu = torch.device("cpu")
    devices = devices if device is None else [device]
    others = [d for d in devices if d.type not in ("cpu", "meta") and _is_here(d)]
    first: Exception | None = None
    for place in [cpu, *others[:1]]:
        try:
            with _untouched(optimizer, [cpu, *dict.fromkeys(others)]) as is_drawn:
                return _rehearsed(Stage(optimizer, place, dtypes), is_drawn)
        except GeminiError:
            raise
        except Exception as error:  # its step may raise anything
            first = first or error
    raise GeminiError(
        f"step() of {name}, without a closure and on small dense tensors, raises {type(first).__name__}: {first}; use "
        "an optimizer whose step() runs so, such as torch.optim.AdamW, or train without manage()"
    ) from first


def _is_here(device: torch.device) -> bool:
    """An estimate may be of another machine."""
    return device.type != "cuda" or torch.cuda.is_available()


def _rehearsed(stage: Stage, is_drawn: Callable[[], str]) -> Rehearsed:
    shapes = [
        (sample(kind, shape, stage.device, kind.order), shape)
        for kind in kinds_of(stage.optimizer, stage.dtypes)
        for shape in kind.rehearsed
    ]
    if not shapes:
        return Rehearsed(False, "whole")
    # Small ones come first: an optimizer that is refused may take long over large ones.
    acts = [
        ([tensor for tensor, shape in shapes if math.prod(shape) < 1000], _STEPS_OF_SMALL),
        ([tensor for tensor, _ in shapes], STEPS),
    ]
    together = []
    for tensors, steps in acts:
        everything = [range(len(tensors))]
        call = functools.partial(stage.play, tensors, everything, steps=steps)
        together.append(stage.first(call))
        drawn = is_drawn()
        if drawn:
            raise GeminiError(
                f"step() of {stage.name} draws random numbers ({drawn}), and its bits depend on the order in which "
                "parameters are stepped: use an optimizer that draws none (without stochastic rounding), or train "
                "without manage()"
            )
        if not all(bool(weight.isfinite().any()) for weight in together[-1].weights):
            raise GeminiError(
                f"step() of {stage.name} makes no finite number of small random tensors, and bits cannot be compared: "
                "lower its learning rate, or train without manage()"
            )
    first = ""
    is_steady = all(each.is_steady for each in together)
    for is_restored in (False, True) if is_steady else (True,):
        differs = None
        for (tensors, steps), played in zip(acts, together, strict=True):
            differs = differs or _apart(stage, tensors, played, is_restored, steps)
        if differs is None:
            writes_gradients = stage.writes_gradients
            return Rehearsed(is_restored, *_cut(stage, is_restored), writes_gradients)
        first = first or differs
    raise GeminiError(
        f"{stage.name} does not treat each parameter by itself: stepped apart from others, {first}; {WAY_OUT}"
    )


def _apart(
    stage: Stage, tensors: list[Sample], together: Played, is_restored: bool, steps: int
) -> str | None:
    """What differs where tensors are stepped one by one, or in two parts, from what they are together."""
    everything = range(len(tensors))
    try:
        for parts in ([[i] for i in everything], [everything[1::2][::-1], everything[::2]]):
            apart = stage.play(tensors, [part for part in parts if part], is_restored, steps)
            differs = together.difference(apart) or apart.unequal
            if differs is None and is_restored:
                own = together.own.difference(apart.own)
                differs = None if own is None else said(own)
            if differs is not None:
                return differs
    except GeminiError:
        raise
    except Exception as error:  # its step may raise anything
        return f"it raises {type(error).__name__}: {error}"
    return None


def _check_closure(kind: type) -> None:
    """Refuses classes whose step() has to be given something."""
    for parameter in list(inspect.signature(kind.step).parameters.values())[1:]:  # type: ignore[attr-defined]
        is_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_many:
            raise GeminiError(
                f"step() of {kind.__name__} needs {parameter.name!r}, and a managed optimizer is stepped without "
                "arguments: use one whose step() needs none, such as torch.optim.AdamW, or train without manage()"
            )


def _check_held(optimizer: Optimizer) -> None:
    """Refuses optimizers that find parameters otherwise than by their groups: stand-ins would not be found there."""
    name = type(optimizer).__name__
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    ids = {id(p) for p in parameters}
    own = Own.of(optimizer)
    for where, value in itertools.chain(own.attributes.items(), *(o.items() for o in own.options)):
        for each in reach(value, optimizer):
            if id(each) in ids or (type(each) is int and each in ids):
                raise GeminiError(
                    f"{name}.{where} holds parameters, or their id(), beside param_groups, and step() would not find "
                    "there what stands for them: use an optimizer without, and groups for parameters with settings of "
                    "their own, or train without manage()"
                )


@contextlib.contextmanager
def _untouched(
    optimizer: Optimizer, devices: Sequence[torch.device]
) -> Iterator[Callable[[], str]]:
    """Leaves nothing behind. What it gives tells whose random numbers were drawn since, or ""."""
    sources = _sources(optimizer, devices)
    before = [read() for _, read, _ in sources]
    dtype = torch.get_default_dtype()
    values = _class_values(type(optimizer))

    def is_drawn() -> str:
        for (name, read, _), state in zip(sources, before, strict=True):
            if difference(state, read(), name) is not None:
                return name
        return ""

    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            yield is_drawn
    finally:
        for (_, _, write), state in zip(sources, before, strict=True):
            write(state)
        torch.set_default_dtype(dtype)
        for (kind, name), value in values.items():
            if difference(value, vars(kind).get(name), "") is not None:
                setattr(kind, name, value)


def _sources(
    optimizer: Optimizer, devices: Sequence[torch.device]
) -> list[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Whose random numbers a step may draw, how their state is read and written."""
    sources: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
        ("torch's, on the CPU", torch.get_rng_state, torch.set_rng_state),
        ("Python's", random.getstate, random.setstate),
    ]
    for device in devices:
        if device.type == "cuda":
            read = functools.partial(torch.cuda.get_rng_state, device)
            write = functools.partial(torch.cuda.set_rng_state, device=device)
            sources.append((f"torch's, on {device}", read, write))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        sources.append(("numpy's", numpy.random.get_state, numpy.random.set_state))
    for each in reach(list(vars(optimizer).values()), optimizer):
        if isinstance(each, torch.Generator):
            sources.append(("a generator of its own", each.get_state, each.set_state))
    return sources


def _class_values(kind: type) -> dict[tuple[type, str], Any]:
    """Copies of what classes have besides methods."""
    values = {}
    for base in kind.__mro__[: kind.__mro__.index(Optimizer)]:
        for name, value in vars(base).items():
            if not name.startswith(("__", "_abc")) and not hasattr(type(value), "__get__"):
                with contextlib.suppress(Exception):  # what cannot be copied says so in many ways
                    values[base, name] = copy.deepcopy(value)
    return values


# ---- the sizes of states ----


def states_like(
    optimizer: Optimizer,
    group_index: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    settings: overrides.Settings | None = None,
) -> tuple[tuple[opaque.Leaf, ...], Any, dict[opaque.Path, torch.device]]:
    """What a chunk will have of a parameter's states after its first step; the entry, its leaves on meta; and where the
    optimizer has each leaf.

    The step has fake tensors, which take no memory. Where it cannot be run with these it has real ones on the device.
    Two parameters are stepped at once: what both have in one storage is no parameter's own.

    Raises:
        GeminiError: the step fails, or cannot be run with fake tensors and the parameter is larger than 256 MiB.
    """
    name = type(optimizer).__name__
    if not _is_here(device):
        device = torch.device("cpu")
    stage = Stage(optimizer, device)

    def stepped(
        mode: Any,
    ) -> tuple[tuple[opaque.Leaf, ...], Any, dict[opaque.Path, torch.device]]:
        whole = stage.copied()
        with mode:
            made = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device) for _ in range(4)
            ]
            for tensor in made:
                tensor.zero_()
            parameters = [nn.Parameter(tensor) for tensor in made[:2]]
            numbers = dict.fromkeys(parameters, group_index)
            for parameter, gradient in zip(parameters, made[2:], strict=True):
                parameter.grad, parameter._gm_settings = gradient, settings or {}  # type: ignore[attr-defined]
            part = stage.part(whole, Own.of(whole), numbers, stage.born(whole, numbers))
            run(part)
            entries = [part.state.get(p, {}) for p in parameters]
            common = opaque.shared(entries)
            form = tuple(
                leaf for leaf in form_of(entries[0], parameters[0]) if leaf.path not in common
            )
            found = opaque.leaves(entries[0])
        metas = {
            path: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for path, t in found
        }
        devices = {path: t.device for path, t in found}
        return form, opaque.with_leaves(entries[0], metas), devices

    real = 4 * math.prod(shape) * dtype.itemsize
    with _untouched(optimizer, [torch.device("cpu"), device]):
        try:
            return stage.first(lambda: stepped(_torch.FakeTensorMode(allow_non_fake_inputs=True)))
        except GeminiError as error:
            raise GeminiError(f"{name} cannot be managed: {error}") from None
        except (
            Exception
        ) as error:  # kernels behind ctypes, classes of tensors: they fail in many ways
            why = f"{type(error).__name__}: {error}"
        if real > _MOST_REAL:
            raise GeminiError(
                f"what states {name} makes for a parameter of shape {tuple(shape)} in {dtype} is not known before its "
                f"first step: that cannot be run without memory ({why}), and with memory it would take {real} bytes, "
                f"more than {_MOST_REAL}: use another optimizer, or train without manage()"
            )
        try:
            stage.is_born_with_states = False
            return stage.first(lambda: stepped(contextlib.nullcontext()))
        except GeminiError as error:
            raise GeminiError(f"{name} cannot be managed: {error}") from None
        except Exception as error:
            raise GeminiError(
                f"step() of {name} on a parameter of shape {tuple(shape)} in {dtype} raises {type(error).__name__}: "
                f"{error}; use an optimizer that steps it, such as torch.optim.AdamW, or train without manage()"
            ) from error
