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
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque, overrides
from gemini_strategy.optim.parts import Group, Own, States, difference, reach, run, stand_in

_WAY_OUT = "use an optimizer that does, such as torch.optim.AdamW, or train without manage()"
_STEPS = 3
_STEPS_OF_SMALL = 6  # RAdam and others begin otherwise
# What a tensor of so many dimensions is rehearsed with: small ones, and some that are quantized and factored.
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(7,), (6144,)],
    2: [(5, 3), (128, 192)],
    3: [(4, 3, 2), (64, 32, 3)],
    4: [(4, 3, 3, 3), (32, 32, 3, 2)],
}
_LEAST_LR = 0.01
_CUTS = (1, 3, 130, 4111)
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
    """

    writes_itself: bool
    cut: Literal["element", "block", "row", "whole"]
    block: int = 1


# ---- playing ----


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be stepped: the group that it is in, its first values, its gradients step by step, its settings."""

    group: int
    value: torch.Tensor
    gradients: tuple[torch.Tensor, ...]
    settings: overrides.Settings

    def pieces(self, cuts: Sequence[int], is_flat: bool) -> list[_Tensor]:
        """Cut in front of these elements or rows."""
        value, *gradients = (t.reshape(-1) if is_flat else t for t in (self.value, *self.gradients))
        edges = [0, *(cut for cut in cuts if cut < len(value)), len(value)]
        return [
            _Tensor(self.group, value[a:b], tuple(each[a:b] for each in gradients), self.settings)
            for a, b in itertools.pairwise(edges)
        ]


@dataclass
class _Played:
    """What came out: weights and entries in the order of the tensors, and what the optimizer had in the end."""

    weights: list[torch.Tensor]
    entries: list[Any]
    own: Own
    is_steady: bool  # the last step changed nothing of `own`
    unequal: str | None  # how parts of one step ended with different values of `own`

    def difference(self, other: _Played) -> str | None:
        """The same tensors stepped otherwise: what differs first."""
        for i, weight in enumerate(self.weights):
            found = difference(weight, other.weights[i], "the weight")
            found = found or difference(self.entries[i], other.entries[i], "state")
            if found is not None:
                what = f"a parameter of shape {tuple(weight.shape)} in {weight.dtype}"
                return f"{_said(found)}, of {what}"
        return None


def _said(found: tuple[str, float]) -> str:
    where, most = found
    return f"{where.replace('.', ' ', 1)} differs by {'its form' if most == math.inf else f'{most:.3g}'}"


class _Stage:
    """Steps tensors with copies of an optimizer, on one device. The optimizer itself stays as it is."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self.device = device
        self.name = type(optimizer).__name__
        self.is_born_with_states = False

    def copied(self) -> Optimizer:
        """A copy whose groups have options alone, and learning rates that show in weights; a warm-up's do not."""
        own = Own.of(self.optimizer)
        made = stand_in(self.optimizer, [{"params": []} for _ in own.options], {})
        own.copied(self.optimizer, made).put(made)
        if callable(getattr(made, "train", None)):  # schedule-free ones step in that mode alone
            made.train()
        for group in made.param_groups:
            lr = group.get("lr")
            is_number = isinstance(lr, int | float | torch.Tensor)
            if is_number and 0 <= float(lr) < _LEAST_LR:
                is_tensor = isinstance(lr, torch.Tensor)
                group["lr"] = torch.full_like(lr, _LEAST_LR) if is_tensor else _LEAST_LR
        return made

    def part(
        self, whole: Optimizer, own: Own, numbers: Mapping[nn.Parameter, int], state: States
    ) -> Optimizer:
        """A stand-in for some parameters; the numbers are their groups'."""
        groups: list[Group] = [
            {"params": [p for p, number in numbers.items() if number == i]}
            for i in range(len(own.options))
        ]
        made = stand_in(
            whole, groups, defaultdict(dict, {p: state[p] for p in numbers if p in state})
        )
        own.put(made)
        return made

    def born(self, whole: Optimizer, numbers: Mapping[nn.Parameter, int]) -> dict[Any, Any]:
        """The states that parameters have from the optimizer's constructor, where its step needs them (Adagrad)."""
        if not self.is_born_with_states:
            return {}
        kind = type(whole)
        groups = self.part(whole, Own.of(whole).copied(whole, whole), numbers, {}).param_groups
        known = inspect.signature(kind).parameters
        given = {key: value for key, value in whole.defaults.items() if key in known}
        return dict(kind([g for g in groups if g["params"]], **given).state)

    def first(self, call: Callable[[], Any]) -> Any:
        """A first step on parameters without states; where that fails, on those that the constructor gives."""
        try:
            return call()
        except GeminiError:
            raise
        except Exception as error:  # its step may raise anything
            if not self.optimizer.state or self.is_born_with_states:
                raise
            self.is_born_with_states = True
            try:
                return call()
            except GeminiError:
                raise
            except Exception:
                raise error from None

    def play(
        self,
        tensors: Sequence[_Tensor],
        parts: Sequence[Sequence[int]],
        is_restored: bool = True,
        steps: int = _STEPS,
    ) -> _Played:
        """Some steps, each part by part; `is_restored`: as invariant 2 of parts.py says."""
        whole = self.copied()
        parameters = [nn.Parameter(_clone(t.value)) for t in tensors]
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter._gm_settings = tensor.settings  # type: ignore[attr-defined]
        state = self.born(whole, {p: t.group for p, t in zip(parameters, tensors, strict=True)})
        forms: dict[nn.Parameter, list[opaque.Leaf]] = {}
        is_steady, unequal = True, None
        for step in range(steps):
            start = Own.of(whole)
            before, end = start.copied(whole, whole), None
            for part in parts:
                for i in part:
                    parameters[i].grad = _clone(tensors[i].gradients[step % _STEPS])
                inside = {parameters[i]: tensors[i].group for i in part}
                own = start.copied(whole, whole) if is_restored else start
                stepped = self.part(whole, own, inside, state)
                self.step(stepped, list(inside), forms)
                state.update(stepped.state)
                if end is None:
                    end = Own.of(stepped)
                found = end.difference(Own.of(stepped)) if is_restored else None
                if found is not None and unequal is None:
                    unequal = f"{_said(found)} at the end of parts of step {step + 1}"
            if is_restored and end is not None:
                end.put(whole)
            is_steady = before.difference(Own.of(whole)) is None
        weights = [p.detach() for p in parameters]
        entries = [state.get(p, {}) for p in parameters]
        return _Played(weights, entries, Own.of(whole), is_steady, unequal)

    def step(
        self,
        stepped: Optimizer,
        parameters: list[nn.Parameter],
        forms: dict[nn.Parameter, list[opaque.Leaf]],
    ) -> None:
        """One step; then parameters and states have to be what can be managed."""
        memory = [(p.data_ptr(), p.stride()) for p in parameters]
        run(stepped)
        if memory != [(p.data_ptr(), p.stride()) for p in parameters]:
            raise GeminiError(
                f"step() of {self.name} gives a parameter other memory, and a managed one has its place: use an "
                "optimizer that writes in place, and parameters that are contiguous, or train without manage()"
            )
        for key in stepped.state:
            if key not in set(parameters):
                what = "another tensor" if isinstance(key, torch.Tensor) else repr(key)
                raise GeminiError(
                    f"step() of {self.name} keeps a state for {what}, which is none of the parameters that it steps: "
                    f"{_WAY_OUT}"
                )
        for p in parameters:
            try:
                form = _form(stepped.state.get(p, {}), p)
            except GeminiError as error:
                raise GeminiError(f"{self.name} cannot be managed: {error}") from None
            if form != forms.setdefault(p, form):
                changed = [leaf for leaf in form if leaf not in forms[p]] or forms[p]
                raise GeminiError(
                    f"state {opaque.text(changed[0].path)} of {self.name} changes its form after the first step, to "
                    f"{changed[0].shape} in {changed[0].dtype}, and has a place for what it was: use an optimizer "
                    "whose states stay as large as they are, or train without manage()"
                )


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    """With its strides, where these have no holes."""
    return tensor.clone(memory_format=torch.preserve_format)


def _form(entry: Any, parameter: torch.Tensor) -> list[opaque.Leaf]:
    """What a chunk would have of an entry."""
    own = _torch.storage_id(parameter.untyped_storage())
    found = []
    for path, tensor in opaque.leaves(entry):
        if opaque.is_kept_in_chunk(tensor, parameter):
            found.append(opaque.Leaf.of(path, tensor))
        if tensor.numel() and _torch.storage_id(tensor.untyped_storage()) == own:
            raise GeminiError(
                f"state {opaque.text(path)} is a view of the parameter itself, and they would be kept apart: clone it "
                "in the optimizer's step"
            )
    return found


# ---- what is rehearsed ----


def _sort(value: Any) -> Any:
    """Options of one sort take the same way through a step."""
    if isinstance(value, float):
        return value == 0
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(_sort(item) for item in value)
    return value if isinstance(value, bool | int | str | None) else id(value)


def _kinds(
    optimizer: Optimizer,
) -> Iterator[tuple[int, torch.dtype, tuple[int, ...], list[int], overrides.Settings]]:
    """Group, dtype, dimensions in the order of memory, numbers of elements, settings: of parameters that are alike."""
    known: set[Any] = set()
    settings = overrides.settings_of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        alike: dict[Any, tuple[list[int], overrides.Settings]] = {}
        for p in group["params"]:
            order = tuple(range(p.dim()))
            if not p.is_contiguous():
                order = tuple(sorted(order, key=lambda d, p=p: -p.stride(d)))
            own = settings.get(id(p), {})
            key = p.dtype, order, repr(sorted(own.items()))
            alike.setdefault(key, ([], own))[0].append(p.numel())
        sort = {key: _sort(value) for key, value in group.items()}
        sort.pop("param_names", None)
        for (dtype, order, of_settings), (sizes, own) in alike.items():
            sort["params"] = (dtype, order, of_settings)
            name = repr(sorted(sort.items()))
            if name not in known:
                known.add(name)
                yield number, dtype, order, sizes, own


def _tensor(
    group: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    settings: overrides.Settings,
    order: Sequence[int] = (),
) -> _Tensor:
    """Random, always the same, from a generator of its own. `order`: its dimensions in the order of memory."""
    order = order or range(len(shape))
    source = torch.Generator().manual_seed(math.prod(shape) + group)
    kind = dtype if dtype.is_complex else torch.float32

    def made(scale: float) -> torch.Tensor:
        drawn = torch.randn([shape[d] for d in order], generator=source, dtype=kind, device="cpu")
        return drawn * scale

    def placed(drawn: torch.Tensor) -> torch.Tensor:
        return drawn.to(dtype).permute([list(order).index(d) for d in range(len(order))]).to(device)

    value, *gradients = (made(scale) for scale in (0.5, 1.0, 0.03, 4.0))
    if not dtype.is_complex:
        # Some project only what is across the weight.
        gradients[0] -= value * (value * gradients[0]).sum() / (value * value).sum()
    placed_gradients = tuple(placed(gradient) for gradient in gradients)
    return _Tensor(group, placed(value), placed_gradients, settings)


def _shapes(n: int) -> list[tuple[int, ...]]:
    return _SHAPES.get(n) or [(*shape, *[2] * (n - 4)) for shape in _SHAPES[4]]


def _cut(
    stage: _Stage, writes_itself: bool
) -> tuple[Literal["element", "block", "row", "whole"], int]:
    """Where parameters may be cut, found by cutting."""
    kinds = list(_kinds(stage.optimizer))
    large = [
        _tensor(group, _shapes(len(order))[-1], dtype, stage.device, own)
        for group, dtype, order, _, own in kinds
        if order
    ]
    if _is_cut_equal(stage, writes_itself, large, _CUTS, True):
        return "element", 1
    for block in _BLOCKS:
        if all(
            _is_cut_equal(stage, writes_itself, tensors, (block, 2 * block), True)
            for tensors in _blocked(stage, kinds, block)
        ):
            return "block", block
    rows = [tensor for tensor in large if tensor.value.dim() > 1]
    if rows and _is_cut_equal(stage, writes_itself, rows, (1, 3, 20), False):
        return "row", 1
    return "whole", 1


def _blocked(stage: _Stage, kinds: list[Any], block: int) -> Iterator[list[_Tensor]]:
    """Tensors of several blocks, with a rest like those of the optimizer's own.

    They are as short as can be; longer than what any would not quantize; and longer than what one thread steps.
    """
    for least in (3 * block, 3 * _BLOCKS[-1], 1 << 17):
        tensors = []
        for group, dtype, order, sizes, own in kinds:
            rests = {n % block for n in sizes if n >= 2 * block}
            # The least aligned ones come first: they say most.
            for rest in {0, *sorted(rests, key=lambda n: (n & -n) or block)[:2]} if order else ():
                n = least + rest
                columns = next(c for c in range(96, 0, -1) if n % c == 0) if len(order) > 1 else 1
                shape = (n // columns, columns, *[1] * (len(order) - 2))[: len(order)]
                tensors.append(_tensor(group, shape, dtype, stage.device, own))
        yield tensors


def _is_cut_equal(
    stage: _Stage,
    writes_itself: bool,
    tensors: list[_Tensor],
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


def rehearse(optimizer: Optimizer) -> Rehearsed:
    """Steps copies of an optimizer on small tensors, together and in parts.

    Raises:
        GeminiError: it does not treat each parameter by itself, draws random numbers, needs a closure, or keeps what
            cannot be managed.
    """
    name = type(optimizer).__name__
    _check_closure(type(optimizer))
    _check_held(optimizer)
    devices = [p.device for group in optimizer.param_groups for p in group["params"]]
    cpu = torch.device("cpu")
    others = [d for d in devices if d.type not in ("cpu", "meta")]
    first: Exception | None = None
    for device in [cpu, *others[:1]]:
        try:
            with _untouched(optimizer, [cpu, *dict.fromkeys(others)]) as is_drawn:
                return _rehearsed(_Stage(optimizer, device), is_drawn)
        except GeminiError:
            raise
        except Exception as error:  # its step may raise anything
            first = first or error
    raise GeminiError(
        f"step() of {name}, without a closure and on small dense tensors, raises {type(first).__name__}: {first}; use "
        "an optimizer whose step() runs so, such as torch.optim.AdamW, or train without manage()"
    ) from first


def _rehearsed(stage: _Stage, is_drawn: Callable[[], str]) -> Rehearsed:
    shapes = [
        (_tensor(group, shape, dtype, stage.device, own, order), shape)
        for group, dtype, order, _, own in _kinds(stage.optimizer)
        for shape in _shapes(len(order))
    ]
    if not shapes:
        return Rehearsed(False, "whole")
    # Small ones come first: an optimizer that is refused may take long over large ones.
    acts = [
        ([tensor for tensor, shape in shapes if math.prod(shape) < 1000], _STEPS_OF_SMALL),
        ([tensor for tensor, _ in shapes], _STEPS),
    ]
    together = []
    for tensors, steps in acts:
        everything = [range(len(tensors))]
        together.append(stage.first(lambda: stage.play(tensors, everything, steps=steps)))  # noqa: B023
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
            return Rehearsed(is_restored, *_cut(stage, is_restored))
        first = first or differs
    raise GeminiError(
        f"{stage.name} does not treat each parameter by itself: stepped apart from others, {first}; {_WAY_OUT}"
    )


def _apart(
    stage: _Stage, tensors: list[_Tensor], together: _Played, is_restored: bool, steps: int
) -> str | None:
    """What differs where tensors are stepped one by one, or in two parts, from what they are together."""
    everything = range(len(tensors))
    try:
        for parts in ([[i] for i in everything], [everything[1::2][::-1], everything[::2]]):
            apart = stage.play(tensors, [part for part in parts if part], is_restored, steps)
            differs = together.difference(apart) or apart.unequal
            if differs is None and is_restored:
                own = together.own.difference(apart.own)
                differs = None if own is None else _said(own)
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
    settings: overrides.Settings,
) -> tuple[tuple[opaque.Leaf, ...], Any]:
    """What a chunk will have of a parameter's states after its first step, and the entry, its leaves on meta.

    The step has fake tensors, which take no memory. Where it cannot be run with these it has real ones on the device.
    Two parameters are stepped at once: what both have in one storage is no parameter's own.

    Raises:
        GeminiError: the step fails, or cannot be run with fake tensors and the parameter is larger than 256 MiB.
    """
    name = type(optimizer).__name__
    stage = _Stage(optimizer, device)

    def stepped(mode: Any) -> tuple[tuple[opaque.Leaf, ...], Any]:
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
                parameter.grad, parameter._gm_settings = gradient, settings  # type: ignore[attr-defined]
            part = stage.part(whole, Own.of(whole), numbers, stage.born(whole, numbers))
            run(part)
            entries = [part.state.get(p, {}) for p in parameters]
            common = opaque.shared(entries)
            form = tuple(
                leaf for leaf in _form(entries[0], parameters[0]) if leaf.path not in common
            )
            found = opaque.leaves(entries[0])
        metas = {
            path: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for path, t in found
        }
        return form, opaque.with_leaves(entries[0], metas)

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
