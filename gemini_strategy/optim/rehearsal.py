"""Any optimizer that treats each parameter by itself: how it is stepped on some of them, and what a rehearsal shows.

Whether it does is decided by equality, not by its name. A copy of it steps a few small tensors, together and in parts,
and every bit of weights and states has to come out equal.

Invariants
    1. A rehearsal leaves nothing behind: it steps copies, on tensors of its own, and puts random numbers, attributes of
       classes and torch's default dtype back as they were.
    2. A part has all groups of the optimizer, in their order; a group that has none of the part's parameters is empty.
    3. Where step() writes to the optimizer itself (a count in a group), each part begins with the values of the step's
       beginning, and all parts have to end with the same ones.
    4. What torch.compile makes of a step is not rehearsed: a rehearsal runs the program as it is written.
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
import types
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque

Group = dict[str, Any]
States = Mapping[torch.Tensor, Any]

_ANEW = ("state", "param_groups", "step")  # "step": an LR scheduler's around the class's own
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
_CUTS = (1, 3, 130, 4111)
_BLOCKS = (64, 128, 256, 2048, 4096)
# Elements of a tensor that an optimizer has as an attribute; copies share larger ones.
_MOST_COPIED = 1 << 16
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


# ---- stepping some parameters ----


def stand_in(
    optimizer: Optimizer, groups: list[Group], state: States, kind: type | None = None
) -> Optimizer:
    """An optimizer of these groups and states that shares all else with another, and has no hooks.

    `kind`: the plain class, where that of the object has been swapped.
    """
    kind = kind or type(optimizer)
    made: Any = object.__new__(kind)
    for name, value in vars(optimizer).items():
        if _is_hooks(name):
            value = OrderedDict()
        elif isinstance(value, types.MethodType) and value.__self__ is optimizer:
            value = types.MethodType(value.__func__, made)
        if name not in _ANEW and not name.startswith("_gm_"):
            made.__dict__[name] = value
    if "is_paged" in made.__dict__:
        made.is_paged = (
            False  # bitsandbytes: memory of its own for states, which the manager moves instead
        )
    made.__dict__.update(param_groups=groups, state=state)
    return made


def run(stepped: Optimizer) -> None:
    """Its own step, without a closure. No hooks run, nor those on all optimizers under a super().step()."""
    step = type(stepped).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    tables = [_torch.optimizers_pre_hooks, _torch.optimizers_post_hooks]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        with torch.no_grad():
            step(stepped)
    finally:
        for table, hooks in zip(tables, kept, strict=True):
            table.update(hooks)


def _is_hooks(name: str) -> bool:
    return name.startswith("_optimizer_") and name.endswith("_hooks")


@dataclass
class Own:
    """What an optimizer has besides parameters and states: its attributes and its groups' options."""

    attributes: dict[str, Any]
    options: list[Group]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Own:
        """Shared with it."""
        attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in (*_ANEW, "_opt_called", "_zero_grad_profile_name")
            and not name.startswith("_gm_")
            and not _is_hooks(name)
            and not (isinstance(value, types.MethodType) and value.__self__ is optimizer)
        }
        skipped = ("params", "param_names")
        options = [
            {key: value for key, value in group.items() if key not in skipped}
            for group in optimizer.param_groups
        ]
        return cls(attributes, options)

    def copied(self, owner: Optimizer, target: Optimizer) -> Own:
        """For `target`, which stands where they had `owner`. What cannot be copied, and large tensors, are shared."""
        memo: dict[int, Any] = {id(owner): target}
        for value in _reach([self.attributes, self.options], owner):
            if isinstance(value, torch.Tensor) and value.numel() > _MOST_COPIED:
                memo[id(value)] = value
        made = Own({}, [{} for _ in self.options])
        for one, other in zip(
            [self.attributes, *self.options], [made.attributes, *made.options], strict=True
        ):
            for key, value in one.items():
                try:
                    other[key] = copy.deepcopy(value, memo)
                except Exception:  # locks, process groups: classes say so in many ways
                    other[key] = value
        return made

    def put(self, optimizer: Optimizer) -> None:
        """The optimizer has these values from now on."""
        vars(optimizer).update(self.attributes)
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            group.update(options)

    def difference(self, other: Own) -> tuple[str, float] | None:
        """Where they differ first, and the largest difference there."""
        found = _difference(self.attributes, other.attributes, "attribute")
        return found or _difference(self.options, other.options, "param_groups")


def _reach(value: Any, owner: Optimizer) -> Iterator[Any]:
    """Everything that values lead to: through containers, and through the attributes of objects."""
    seen: dict[int, Any] = {id(owner): owner}
    left = [value]
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, type | types.ModuleType | types.FunctionType):
            continue
        seen[id(value)] = value  # keeps ids apart
        yield value
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            left += value
        elif isinstance(value, types.MethodType):
            left.append(value.__self__)
        elif not isinstance(value, torch.Tensor):
            left += getattr(value, "__dict__", {}).values()


# ---- equality ----


def _difference(one: Any, other: Any, where: str, depth: int = 0) -> tuple[str, float] | None:
    """Where two values differ first, and the largest difference there; bits count, and NaN equals NaN."""
    if one is other:
        return None
    if type(one) is not type(other):
        return where, math.inf
    if isinstance(one, torch.Tensor):
        return _tensor_difference(one, other, where, depth)
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(one, dict):
        if one.keys() != other.keys():
            keys = sorted(_key(key) for key in one.keys() ^ other.keys())
            return f"{where}.{keys[0]}", math.inf
        pairs = [(f"{where}.{_key(key)}", one[key], other[key]) for key in one]
    elif isinstance(one, list | tuple | deque):
        if len(one) != len(other):
            return where, math.inf
        pairs = [(f"{where}.{i}", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, int | float | complex):
        is_equal = one == other or (one != one and other != other)
        return None if is_equal else (where, float(abs(one - other)))
    elif isinstance(one, str | bytes | set | frozenset | torch.dtype | torch.device | torch.Size):
        return None if one == other else (where, math.inf)
    elif isinstance(getattr(one, "__dict__", None), dict) and depth < 8:
        return _difference(vars(one), vars(other), where, depth + 1)
    found = (_difference(a, b, path, depth + 1) for path, a, b in pairs)
    return next((each for each in found if each is not None), None)


def _key(key: Any) -> str:
    return "a tensor" if isinstance(key, torch.Tensor) else str(key)


def _tensor_difference(
    one: torch.Tensor, other: torch.Tensor, where: str, depth: int
) -> tuple[str, float] | None:
    if _torch.is_wrapper_subclass(one):
        names, context = one.__tensor_flatten__()
        inner = [{name: getattr(each, name) for name in names} for each in (one, other)]
        found = _difference(context, other.__tensor_flatten__()[1], where, depth)
        return found or _difference(inner[0], inner[1], where, depth)
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return where, math.inf
    one, other = one.detach().contiguous(), other.detach().contiguous()
    same = one.reshape(-1, 1).view(torch.uint8) == other.reshape(-1, 1).view(torch.uint8)
    if bool(same.all()):
        return None
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide).reshape(-1), other.to(wide).reshape(-1)
    unequal = ~same.all(-1) & ~(one.isnan() & other.isnan())
    if not bool(unequal.any()):
        return None
    return where, float((one - other).abs()[unequal].nan_to_num(nan=math.inf).max())


# ---- playing ----


@dataclass(frozen=True)
class _Tensor:
    """A tensor to be stepped: the group that it is in, its first values, and its gradients step by step."""

    group: int
    value: torch.Tensor
    gradients: tuple[torch.Tensor, ...]

    def pieces(self, cuts: Sequence[int], is_flat: bool) -> list[_Tensor]:
        """Cut in front of these elements or rows."""
        value, *gradients = (t.reshape(-1) if is_flat else t for t in (self.value, *self.gradients))
        edges = [0, *(cut for cut in cuts if cut < len(value)), len(value)]
        return [
            _Tensor(self.group, value[a:b], tuple(each[a:b] for each in gradients))
            for a, b in itertools.pairwise(edges)
        ]


@dataclass
class _Played:
    """What came out: weights and entries in the order of the tensors, and what the optimizer had in the end."""

    weights: list[torch.Tensor]
    entries: list[Any]
    own: Own
    is_steady: bool  # the last step changed nothing of `own`

    def difference(self, other: _Played) -> str | None:
        """The same tensors stepped otherwise: what differs first."""
        for i, weight in enumerate(self.weights):
            found = _difference(weight, other.weights[i], "the weight")
            found = found or _difference(self.entries[i], other.entries[i], "state")
            if found is not None:
                what = f"a parameter of shape {tuple(weight.shape)} in {weight.dtype}"
                return f"{_said(found)}, of {what}"
        return None


class _DiffersError(Exception):
    """Parts end with different values of the optimizer's own."""


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
        """A copy whose groups have options alone."""
        own = Own.of(self.optimizer)
        made = stand_in(self.optimizer, [{} for _ in own.options], {})
        own.copied(self.optimizer, made).put(made)
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
        except Exception:  # its step may raise anything
            if not self.optimizer.state or self.is_born_with_states:
                raise
        self.is_born_with_states = True
        return call()

    def play(
        self,
        tensors: Sequence[_Tensor],
        parts: Sequence[Sequence[int]],
        is_restored: bool = True,
        steps: int = _STEPS,
    ) -> _Played:
        """Some steps, each part by part; `is_restored`: as invariant 3 says.

        Raises:
            _DiffersError: parts end with different values.
        """
        whole = self.copied()
        parameters = [nn.Parameter(_clone(t.value)) for t in tensors]
        state = self.born(whole, {p: t.group for p, t in zip(parameters, tensors, strict=True)})
        forms: dict[nn.Parameter, list[opaque.Leaf]] = {}
        is_steady = True
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
                if found is not None:
                    raise _DiffersError(f"{_said(found)} at the end of parts of step {step + 1}")
            if is_restored and end is not None:
                end.put(whole)
            is_steady = before.difference(Own.of(whole)) is None
        weights = [p.detach() for p in parameters]
        entries = [state.get(p, {}) for p in parameters]
        return _Played(weights, entries, Own.of(whole), is_steady)

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


def _kinds(optimizer: Optimizer) -> Iterator[tuple[int, torch.dtype, tuple[int, ...], list[int]]]:
    """Group, dtype, dimensions in the order of memory, and numbers of elements: of parameters that are alike."""
    known: set[Any] = set()
    for number, group in enumerate(optimizer.param_groups):
        alike: dict[Any, list[int]] = {}
        for p in group["params"]:
            order = tuple(range(p.dim()))
            if not p.is_contiguous():
                order = tuple(sorted(order, key=lambda d, p=p: -p.stride(d)))
            alike.setdefault((p.dtype, order), []).append(p.numel())
        sort = {key: _sort(value) for key, value in group.items()}
        sort.pop("param_names", None)
        for (dtype, order), sizes in alike.items():
            sort["params"] = (dtype, order)
            name = repr(sorted(sort.items()))
            if name not in known:
                known.add(name)
                yield number, dtype, order, sizes


def _tensor(
    group: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
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
    return _Tensor(group, placed(value), tuple(placed(gradient) for gradient in gradients))


def _shapes(n: int) -> list[tuple[int, ...]]:
    return _SHAPES.get(n) or [(*shape, *[2] * (n - 4)) for shape in _SHAPES[4]]


def _cut(
    stage: _Stage, writes_itself: bool
) -> tuple[Literal["element", "block", "row", "whole"], int]:
    """Where parameters may be cut, found by cutting."""
    kinds = list(_kinds(stage.optimizer))
    large = [
        _tensor(group, _shapes(len(order))[-1], dtype, stage.device)
        for group, dtype, order, _ in kinds
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
        for group, dtype, order, sizes in kinds:
            rests = {n % block for n in sizes if n >= 2 * block}
            # The least aligned ones come first: they say most.
            for rest in {0, *sorted(rests, key=lambda n: (n & -n) or block)[:2]} if order else ():
                n = least + rest
                columns = next(c for c in range(96, 0, -1) if n % c == 0) if len(order) > 1 else 1
                shape = (n // columns, columns, *[1] * (len(order) - 2))[: len(order)]
                tensors.append(_tensor(group, shape, dtype, stage.device))
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
            is_same = all(_difference(leaf[1], each, "") is None for each in tensors_apart)
            if not is_same and not _is_joined(leaf[1], tensors_apart):
                return False
        first = last
    return True


def _is_joined(tensor: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    if tensor.dim() == 0:
        return False
    joined = torch.cat([part.reshape(-1) for part in parts])
    return _difference(tensor.reshape(-1), joined, "") is None


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
        (_tensor(group, shape, dtype, stage.device, order), shape)
        for group, dtype, order, _ in _kinds(stage.optimizer)
        for shape in _shapes(len(order))
    ]
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
            apart = stage.play(tensors, parts, is_restored, steps)
            differs = together.difference(apart)
            if differs is None and is_restored:
                own = together.own.difference(apart.own)
                differs = None if own is None else _said(own)
            if differs is not None:
                return differs
    except _DiffersError as error:
        return str(error)
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
        for each in _reach(value, optimizer):
            if id(each) in ids or (type(each) is int and each in ids):
                raise GeminiError(
                    f"{name}.{where} holds parameters, or their id(), beside param_groups, and step() would not find "
                    "there what stands for them: use an optimizer without, and groups for parameters with settings of "
                    "their own, or train without manage()"
                )
            if getattr(each, "index2config", None):  # bitsandbytes' GlobalOptimManager
                raise GeminiError(
                    f"{name}.{where} has settings for parameters by their index in groups, which is another when some "
                    "of them are stepped: give these parameters a group of their own, or train without manage()"
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
            if _difference(state, read(), name) is not None:
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
            if _difference(value, vars(kind).get(name), "") is not None:
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
    for each in _reach(list(vars(optimizer).values()), optimizer):
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
                parameter.grad = gradient
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
