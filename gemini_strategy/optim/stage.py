"""Where optimizers are rehearsed: copies of one step small tensors, and leave the optimizer itself as it is."""

from __future__ import annotations

import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim import opaque, overrides
from gemini_strategy.optim.parts import Group, Own, States, difference, run, stand_in

WAY_OUT = "use an optimizer that does, such as torch.optim.AdamW, or train without manage()"
STEPS = 3
_LEAST_LR = 0.01
# What a tensor of so many dimensions is rehearsed with: small ones, and some that are quantized and factored.
_SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(7,), (6144,)],
    2: [(5, 3), (128, 192)],
    3: [(4, 3, 2), (64, 32, 3)],
    4: [(4, 3, 3, 3), (32, 32, 3, 2)],
}


@dataclass(frozen=True)
class Sample:
    """A tensor to be stepped: its group, its first values, its gradients step by step, its settings."""

    group: int
    value: torch.Tensor
    gradients: tuple[torch.Tensor, ...]
    settings: overrides.Settings

    def pieces(self, cuts: Sequence[int], is_flat: bool) -> list[Sample]:
        """Cut in front of these elements or rows."""
        value, *gradients = (t.reshape(-1) if is_flat else t for t in (self.value, *self.gradients))
        edges = [0, *(cut for cut in cuts if cut < len(value)), len(value)]
        return [
            Sample(self.group, value[a:b], tuple(each[a:b] for each in gradients), self.settings)
            for a, b in itertools.pairwise(edges)
        ]


@dataclass
class Played:
    """What came out: weights and entries in the order of the tensors, and what the optimizer had in the end."""

    weights: list[torch.Tensor]
    entries: list[Any]
    own: Own
    is_steady: bool  # the last step changed nothing of `own`
    unequal: str | None  # how parts of one step ended with different values of `own`

    def difference(self, other: Played) -> str | None:
        """The same tensors stepped otherwise: what differs first."""
        for i, weight in enumerate(self.weights):
            found = difference(weight, other.weights[i], "the weight")
            found = found or difference(self.entries[i], other.entries[i], "state")
            if found is not None:
                what = f"a parameter of shape {tuple(weight.shape)} in {weight.dtype}"
                return f"{said(found)}, of {what}"
        return None


def said(found: tuple[str, float]) -> str:
    where, most = found
    return f"{where.replace('.', ' ', 1)} differs by {'its form' if most == math.inf else f'{most:.3g}'}"


class Stage:
    """Steps tensors with copies of an optimizer, on one device. The optimizer itself stays as it is."""

    def __init__(
        self,
        optimizer: Optimizer,
        device: torch.device,
        dtypes: Mapping[nn.Parameter, torch.dtype] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.dtypes = dtypes or {}
        self.device = device
        self.name = type(optimizer).__name__
        self.is_born_with_states = False
        self.writes_gradients = False  # or drops them, or sets attributes of parameters
        self.outgrows = False  # states have been seen that grow faster than their parameter

    def copied(self) -> Optimizer:
        """A copy whose groups have options alone, and learning rates that show in weights; a warm-up's do not."""
        own = Own.of(self.optimizer)
        made = stand_in(self.optimizer, [{"params": []} for _ in own.options], {})
        own.copied(self.optimizer, made).put(made)
        if callable(getattr(made, "train", None)):  # schedule-free ones step in that mode alone
            made.train()
        for group in made.param_groups:
            lr: Any = group.get("lr")
            if isinstance(lr, int | float | torch.Tensor) and 0 <= float(lr) < _LEAST_LR:
                group["lr"] = lr * 0 + _LEAST_LR
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
        tensors: Sequence[Sample],
        parts: Sequence[Sequence[int]],
        is_restored: bool = True,
        steps: int = STEPS,
    ) -> Played:
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
                    parameters[i].grad = _clone(tensors[i].gradients[step % STEPS])
                inside = {parameters[i]: tensors[i].group for i in part}
                own = start.copied(whole, whole) if is_restored else start
                stepped = self.part(whole, own, inside, state)
                self.step(stepped, list(inside), forms)
                state.update(stepped.state)
                if end is None:
                    end = Own.of(stepped)
                found = end.difference(Own.of(stepped)) if is_restored else None
                if found is not None and unequal is None:
                    unequal = f"{said(found)} at the end of parts of step {step + 1}"
            if is_restored and end is not None:
                end.put(whole)
            is_steady = before.difference(Own.of(whole)) is None
        weights = [p.detach() for p in parameters]
        entries = [state.get(p, {}) for p in parameters]
        return Played(weights, entries, Own.of(whole), is_steady, unequal)

    def step(
        self,
        stepped: Optimizer,
        parameters: list[nn.Parameter],
        forms: dict[nn.Parameter, list[opaque.Leaf]],
    ) -> None:
        """One step; then parameters and states have to be what can be managed."""
        memory = [(p.data_ptr(), p.stride()) for p in parameters]
        before = [(p.grad, _clone(p.grad), dict(vars(p))) for p in parameters]
        run(stepped)
        self.writes_gradients = self.writes_gradients or any(
            p.grad is not grad or difference([values, own], [grad, dict(vars(p))], "") is not None
            for p, (grad, values, own) in zip(parameters, before, strict=True)
        )
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
                    f"{WAY_OUT}"
                )
        for p in parameters:
            try:
                form = form_of(stepped.state.get(p, {}), p)
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


def form_of(entry: Any, parameter: torch.Tensor) -> list[opaque.Leaf]:
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


def way_of(value: Any) -> Any:
    """Options of one sort take the same way through a step."""
    if isinstance(value, float):
        return value == 0
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    if isinstance(value, list | tuple):
        return tuple(way_of(item) for item in value)
    return value if isinstance(value, bool | int | str | None) else id(value)


@dataclass
class Kind:
    """Parameters that are alike: the first group of theirs, dimensions in the order of memory, and settings."""

    group: int
    dtype: torch.dtype
    order: tuple[int, ...]
    settings: overrides.Settings
    shapes: list[tuple[int, ...]]

    @property
    def most(self) -> int:
        return max(math.prod(shape) for shape in self.shapes)

    @property
    def rehearsed(self) -> list[tuple[int, ...]]:
        """Two of the table, or in place of the larger the largest of its own, if that has fewer elements."""
        n = len(self.order)
        small, *large = _SHAPES.get(n) or [(*shape, *[2] * (n - 4)) for shape in _SHAPES[4]]
        if large and 0 < self.most < math.prod(large[0]):
            large = [max(self.shapes, key=math.prod)]
        return list(dict.fromkeys([small, *large]))

    def long(self, n: int) -> tuple[int, ...]:
        """A shape of n elements."""
        columns = next(c for c in range(96, 0, -1) if n % c == 0) if len(self.order) > 1 else 1
        return (n // columns, columns, *[1] * (len(self.order) - 2))[: len(self.order)]


def kinds_of(
    optimizer: Optimizer, dtypes: Mapping[nn.Parameter, torch.dtype] | None = None
) -> list[Kind]:
    """`dtypes`: in which parameters are stepped, if not in their own."""
    kinds: dict[str, Kind] = {}
    settings = overrides.settings_of(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        sort = {k: way_of(v) for k, v in group.items() if k not in ("params", "param_names")}
        for p in group["params"]:
            order = tuple(range(p.dim()))
            if not p.is_contiguous():
                order = tuple(sorted(order, key=p.stride().__getitem__, reverse=True))
            own, dtype = settings.get(id(p), {}), (dtypes or {}).get(p, p.dtype)
            name = repr((sorted(sort.items()), dtype, order, sorted(own.items())))
            kind = kinds.setdefault(name, Kind(number, dtype, order, own, []))
            kind.shapes.append(tuple(p.shape))
    return list(kinds.values())


def sample(
    kind: Kind, shape: Sequence[int], device: torch.device, order: Sequence[int] = ()
) -> Sample:
    """Random, always the same, from a generator of its own. `order`: its dimensions in the order of memory."""
    order = order or range(len(shape))
    source = torch.Generator().manual_seed(math.prod(shape) + kind.group)
    dtype = kind.dtype
    drawn_dtype = dtype if dtype.is_complex else torch.float32

    def made(scale: float) -> torch.Tensor:
        drawn = torch.randn(
            [shape[d] for d in order], generator=source, dtype=drawn_dtype, device="cpu"
        )
        return drawn * scale

    def placed(drawn: torch.Tensor) -> torch.Tensor:
        return drawn.to(dtype).permute([list(order).index(d) for d in range(len(order))]).to(device)

    value, *gradients = (made(scale) for scale in (0.5, 1.0, 0.03, 4.0))
    if not dtype.is_complex:
        # Some project only what is across the weight.
        gradients[0] -= value * (value * gradients[0]).sum() / (value * value).sum()
    placed_gradients = tuple(placed(gradient) for gradient in gradients)
    return Sample(kind.group, placed(value), placed_gradients, kind.settings)


def sorts_of(optimizer: Any) -> list[str]:
    """Of each group what decides which way a step takes, and how many parameters it has."""
    skipped = ("params", "param_names", "lr")
    return [
        repr([(k, way_of(v)) for k, v in group.items() if k not in skipped])
        + f" {len(group['params'])}"
        for group in optimizer.param_groups
    ]
