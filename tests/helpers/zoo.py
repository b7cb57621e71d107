"""The model zoo: small models, each with one shape of trouble that a memory manager meets in the wild.

A `Case` says how to build a model, what its batches are (a pure function of the step) and how its loss is
computed; `loss(run, batch)` calls `run(...)` as a user calls the model and reaches the module itself
through `run.model`.  Cases do not know whether they are managed.  Transformers families are in
`transformers_cases()`, which imports transformers only when called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["CASES", "Case", "Mlp", "mlp_case", "transformers_cases"]

WIDTH = 32
ROWS = 8


@dataclass(frozen=True)
class Case:
    """One model and how it is fed."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    precisions: tuple[str, ...] = ("32-true", "bf16-mixed")
    untrained: tuple[str, ...] = ()  # trainable parameters that this training never moves
    floor: float = 0.1  # the share of the training state below which a budget is not tried

    def __repr__(self) -> str:
        return self.name


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(90_000 + step)


def _rows(step: int) -> tuple[Tensor, Tensor]:
    g = _generator(step)
    return torch.randn(ROWS, WIDTH, generator=g), torch.randn(ROWS, WIDTH, generator=g)


def _tokens(step: int) -> tuple[Tensor, Tensor]:
    g = _generator(step)
    return torch.randint(0, 50, (4, 12), generator=g), torch.randint(0, 50, (4, 12), generator=g)


def _images(step: int) -> tuple[Tensor, Tensor]:
    g = _generator(step)
    return torch.randn(4, 3, 12, 12, generator=g), torch.randint(0, 10, (4,), generator=g)


def _sequences(step: int) -> tuple[Tensor, Tensor]:
    g = _generator(step)
    return torch.randn(4, 6, WIDTH, generator=g), torch.randn(4, 6, WIDTH, generator=g)


def _mse(run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(run(x).float(), y)


def _classify(run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    out = run(x).float()
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


CASES: list[Case] = []


def _case(
    name: str,
    batch: Callable[[int], Any] = _rows,
    loss: Callable[[Any, Any], Tensor] = _mse,
    **more: Any,
) -> Callable[[type], type]:
    def add(kind: type) -> type:
        CASES.append(Case(name, kind, batch, loss, **more))
        return kind

    return add


class Mlp(nn.Module):
    """A stem, residual blocks with dropout, a head: the plain model of the exactness tests."""

    def __init__(self, width: int = WIDTH, depth: int = 4, p: float = 0.1):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 2 * width),
                nn.GELU(),
                nn.Dropout(p),
                nn.Linear(2 * width, width),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def mlp_case(width: int = WIDTH, depth: int = 4, p: float = 0.1) -> Case:
    """An `Mlp` of the given size on random rows."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        g = _generator(step)
        return torch.randn(ROWS, width, generator=g), torch.randn(ROWS, width, generator=g)

    return Case(f"mlp{width}x{depth}", lambda: Mlp(width, depth, p), batch, _mse)


_case("mlp", precisions=("32-true", "bf16-true", "bf16-mixed", "16-mixed"))(Mlp)


@_case("norm_on_the_input", precisions=("32-true", "bf16-true", "bf16-mixed", "16-mixed"))
class NormFirst(nn.Module):
    """A norm that meets the user's fp32 input: in *-mixed its weights and input must agree."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.last = nn.RMSNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.last(x + self.lin(self.norm(x))))


# ---- sharing -------------------------------------------------------------------------------------


@_case("tied_weights", _tokens, _classify, precisions=("32-true", "bf16-true", "16-mixed"))
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.out(self.norm(x + torch.tanh(self.mid(x))))


@_case("tied_three_ways")
class TiedThreeWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.filler = Mlp(depth=2)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight
        self.c.weight = self.a.weight
        self.c.bias = self.b.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.filler(self.b(torch.tanh(self.a(x)))))


@_case("shared_module_under_two_names")
class SharedModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.middle(torch.tanh(self.first(x)))))


@_case("module_called_twice", precisions=("32-true", "bf16-true", "bf16-mixed"))
class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        x = torch.tanh(self.b(x))
        return self.b(self.a(x)) + self.a(x)


@_case("recursive_call")
class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        x = torch.tanh(self.inner(x * self.scale))
        return x if depth == 0 else x + self(x, depth - 1) * self.scale


# ---- what is trained -----------------------------------------------------------------------------


@_case("frozen_parameters", precisions=("32-true", "bf16-true"))
class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = Mlp(depth=2)
        self.head = nn.Linear(WIDTH, WIDTH)
        for p in self.base.blocks[0].parameters():
            p.requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


class _LoraLinear(nn.Module):
    def __init__(self, width: int, rank: int = 4):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.drop(x)))


@_case("lora", precisions=("32-true", "bf16-true", "bf16-mixed", "16-mixed"))
class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_LoraLinear(WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


@_case("unused_parameters", untrained=("unused.weight", "unused.bias", "spare"))
class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = Mlp(depth=2)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.randn(17))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@_case("unused_output", untrained=("side.weight", "side.bias"))
class UnusedOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.body = Mlp(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        self.side(x)
        return self.body(x)


@_case("no_bias_no_parameters_between")
class ParameterFree(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Identity(),
            nn.Linear(WIDTH, WIDTH, bias=False),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Sequential(nn.ReLU(), nn.Identity()),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# ---- where a weight is used ----------------------------------------------------------------------


@_case("parameter_on_non_leaf", precisions=("32-true", "bf16-true", "bf16-mixed"))
class HangingParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp(depth=2)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.gain = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight) * self.gain
        x = self.inner(x)
        return self.last(torch.tanh(F.linear(x, self.weight))) * self.gain


@_case("child_weight_in_parent", precisions=("32-true", "bf16-true", "16-mixed"))
class ChildWeightInParent(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.body = Mlp(depth=3)
        self.never_called = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.child.weight, self.child.bias)
        x = self.body(torch.tanh(x))
        x = torch.tanh(self.child(x))
        return x @ self.never_called.weight + self.never_called.bias


@_case("weight_lent_to_submodule")
class WeightLent(nn.Module):
    class Borrower(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.own(x)), weight)

    def __init__(self):
        super().__init__()
        self.lender = nn.Linear(WIDTH, WIDTH)
        self.body = Mlp(depth=2)
        self.borrower = WeightLent.Borrower()

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(self.lender(x))
        return self.borrower(x, self.lender.weight)


@_case("transposed_views", precisions=("32-true", "bf16-true"))
class TransposedViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.body = Mlp(depth=3)
        self.second = nn.Parameter(torch.randn(2, WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        view = self.first.t()
        x = self.body(x @ view)
        a, b = self.second.unbind(0)
        return (x @ a.t() + x @ b[:, :WIDTH]) @ view[:, :]


@_case("side_effect_output", loss=lambda run, batch: _mse(run, batch) + 0.1 * run.model.aux.float())
class SideEffect(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.body = Mlp(depth=3)
        self.aux = None

    def forward(self, x: Tensor) -> Tensor:
        self.aux = (self.gate.weight.float() ** 2).mean() + self.gate(x).float().square().mean()
        return self.body(x)


class _Regularised(nn.Module):
    """A leaf unit whose auxiliary loss never passes through its output."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.aux = None

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        self.aux = torch.tanh(F.linear(y, self.weight)).float().square().mean()
        return self.lin(y)


@_case(
    "side_effect_in_units",
    loss=lambda run, batch: _mse(run, batch) + sum(m.aux for m in run.model.units),
)
class SideEffectInUnits(nn.Module):
    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(_Regularised() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x


@_case("nested_forward_call")
class NestedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.mid = Mlp(depth=2)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid.forward(torch.tanh(self.a.forward(x)))
        return self.b.forward(x)


@_case("inner_methods")
class InnerMethods(nn.Module):
    """Methods other than forward use weights (encode/decode), as generation heads and VAEs do."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Linear(WIDTH, 16)
        self.dec = nn.Linear(16, WIDTH)
        self.prior = nn.Parameter(torch.zeros(16))

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.enc(x) + self.prior)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        return self.dec(z) + F.linear(z, self.enc.weight.t())


# ---- outputs and inputs --------------------------------------------------------------------------


@dataclass
class _Record:
    hidden: Tensor
    extra: list[Tensor]


class _Opaque:
    def __init__(self, value: Tensor):
        self.value = value


class _Structured(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Any) -> Any:
        return self.wrap(torch.tanh(self.lin(self.unwrap(x))))


class _Chain(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]):
        super().__init__()
        self.units = nn.ModuleList(_Structured(wrap, unwrap) for _ in range(4))
        self.wrap, self.unwrap = wrap, unwrap

    def forward(self, x: Tensor) -> Tensor:
        value = self.wrap(x)
        for unit in self.units:
            value = unit(value)
        return self.unwrap(value)


for _name, _wrap, _unwrap in (
    ("output_dict", lambda t: {"h": t, "n": 3}, lambda d: d["h"]),
    ("output_tuple", lambda t: (None, (t, [t * 2])), lambda d: d[1][0] + d[1][1][0]),
    ("output_dataclass", lambda t: _Record(t, [t * 0.5]), lambda r: r.hidden + r.extra[0]),
    ("output_custom_object", _Opaque, lambda o: o.value),
):
    _case(_name)(lambda wrap=_wrap, unwrap=_unwrap: _Chain(wrap, unwrap))


@_case("keyword_inputs", loss=lambda run, b: F.mse_loss(run(x=b[0], scale=2.0).float(), b[1]))
class KeywordInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.b(torch.tanh(self.a(input=x) * scale))


@_case("inplace_relu_on_output", precisions=("32-true", "bf16-true"))
class InplaceRelu(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.net[0](x)
        x += 0.5
        return self.net(x.relu_())


@_case("view_and_inplace_output")
class ViewOutput(nn.Module):
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            a, b = self.lin(x).chunk(2, dim=-1)
            return a.contiguous(), b

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(ViewOutput.Unit() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            a, b = unit(x)
            x = torch.tanh(a.add_(1.0)) * torch.sigmoid(b)
        return x


@_case("returns_input_unchanged", untrained=("skip.weight",))
class ReturnsInput(nn.Module):
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.skip = ReturnsInput.Skip()
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.skip(torch.tanh(self.a(x))))


@_case("returns_its_weight")
class ReturnsWeight(nn.Module):
    class Source(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

        def forward(self) -> Tensor:
            return self.weight

    def __init__(self):
        super().__init__()
        self.source = ReturnsWeight.Source()
        self.body = Mlp(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.source()
        return F.linear(torch.tanh(self.body(F.linear(x, weight))), weight)


# ---- several passes ------------------------------------------------------------------------------


def _two_forwards(run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    good, bad = run(x), run(y)
    return F.mse_loss(good.float(), y) + 0.3 * torch.sigmoid(bad.float()).mean()


_case("several_forwards_one_backward", loss=_two_forwards, precisions=("32-true", "bf16-true"))(Mlp)


def _quiet_passes(run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    with torch.no_grad():
        target = run(y)
    run.model.eval()
    with torch.inference_mode():
        bias = run(x).float().mean().item()
    run.model.train()
    return F.mse_loss(run(x).float(), y + 0.1 * target.float()) + bias


_case("eval_between_steps", loss=_quiet_passes, precisions=("32-true", "bf16-mixed", "16-mixed"))(
    Mlp
)


def _forward_never_backpropagated(run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    run(y * 2)
    return F.mse_loss(run(x).float(), y)


_case("forward_never_backpropagated", loss=_forward_never_backpropagated)(Mlp)


class _Gradients(nn.Module):
    """A loss that contains a gradient with respect to the input: double backward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def _penalty(run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    x = batch[0].clone().requires_grad_()
    out = run(x).float()
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()


_case("gradient_penalty", loss=_penalty, precisions=("32-true",), untrained=())(_Gradients)


# ---- control flow --------------------------------------------------------------------------------


def _growing_rows(step: int) -> tuple[Tensor, Tensor]:
    g = _generator(step)
    length = (3, 9, 5, 1, 12)[step % 5]
    return torch.randn(2, length, WIDTH, generator=g), torch.randn(2, length, WIDTH, generator=g)


_case("changing_sequence_length", batch=_growing_rows, precisions=("32-true", "bf16-true"))(Mlp)


@_case("conditional_branch", precisions=("32-true", "bf16-true"))
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Mlp(depth=1) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        self.calls += 1
        order = [(2, 0), (1,), (0, 1, 2)][self.calls % 3]
        for i in order:
            x = self.experts[i](x)
        return x


# ---- buffers, checkpoints ------------------------------------------------------------------------


@_case("batch_norm", _images, _classify, precisions=("32-true", "bf16-true", "bf16-mixed"))
class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)
        self.bn2 = nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.inorm = nn.InstanceNorm2d(4, affine=True)
        self.gn = nn.GroupNorm(2, 4)
        self.fc = nn.Linear(4 * 12 * 12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.gn(self.inorm(self.up(x))).flatten(1))


@_case("rope_buffers", _sequences, precisions=("32-true", "bf16-true", "bf16-mixed"))
class Rope(nn.Module):
    def __init__(self):
        super().__init__()
        inverse = 1.0 / (100.0 ** (torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("inverse", inverse, persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("half_table", torch.randn(WIDTH).half())
        self.q = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        assert self.inverse.dtype == torch.float32 and self.half_table.dtype == torch.float16
        self.calls += 1
        angle = torch.arange(x.shape[1], device=x.device)[:, None].float() * self.inverse
        q = self.q(x)
        a, b = q.chunk(2, dim=-1)
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return self.out(turned + self.half_table.to(q.dtype))


class _Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, nested: bool = False):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = Mlp(depth=4, p=0.2).blocks
        self.head = nn.Linear(WIDTH, WIDTH)
        self.reentrant, self.nested = reentrant, nested

    def _pair(self, i: int, x: Tensor) -> Tensor:
        if self.nested:
            x = x + checkpoint(self.blocks[i], x, use_reentrant=self.reentrant)
        else:
            x = x + self.blocks[i](x)
        return x + self.blocks[i + 1](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in (0, 2):
            x = checkpoint(self._pair, i, x, use_reentrant=self.reentrant)
        return self.head(x)


_ALL = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
_case("checkpoint_reentrant", precisions=_ALL)(lambda: _Checkpointed(True))
_case("checkpoint_not_reentrant", precisions=_ALL)(lambda: _Checkpointed(False))
_case("checkpoint_nested")(lambda: _Checkpointed(False, nested=True))


@_case("checkpoint_block_used_twice")
class CheckpointTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.tail = Mlp(depth=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for reentrant in (True, False, True):
            x = x + checkpoint(self.block, x, use_reentrant=reentrant)
        return self.tail(x)


@_case("checkpoint_frozen_base", precisions=("32-true", "bf16-true"), floor=0.4)
class CheckpointLora(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_LoraLinear(WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return x


# ---- sizes ---------------------------------------------------------------------------------------


@_case("odd_sizes", precisions=_ALL)
class OddSizes(nn.Module):
    """Sizes 0, 1, odd, just around a page, and one larger than any block of these tests."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.empty_matrix = nn.Parameter(torch.empty(0, 5))
        self.scalar = nn.Parameter(torch.tensor(1.25))
        self.one = nn.Parameter(torch.ones(1))
        self.odd = nn.ParameterList(
            nn.Parameter(torch.randn(n)) for n in (3, 15, 17, 127, 1023, 1025)
        )
        self.big = nn.Linear(WIDTH, 1031)
        self.back = nn.Linear(1031, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        extra = sum(p.float().square().mean() for p in self.odd)
        x = self.back(torch.tanh(self.big(x * self.scalar + self.one)))
        return x + (extra + self.empty.sum() + self.empty_matrix.sum()).to(x.dtype)


# ---- layers that keep weights in their own way -----------------------------------------------------


@_case("multihead_attention", _sequences, precisions=("32-true", "bf16-true", "bf16-mixed"))
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.b = nn.MultiheadAttention(
            WIDTH, 2, kdim=WIDTH, vdim=16, add_bias_kv=True, batch_first=True
        )
        self.shrink = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x, x, x, need_weights=False)[0]
        return x + self.b(x, x, self.shrink(x))[0]


@_case("transformer_encoder", _sequences, precisions=("32-true", "bf16-true"))
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@_case("lstm", _sequences, precisions=("32-true",))
class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(
            WIDTH, 24, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True
        )
        self.gru = nn.GRU(48, WIDTH, batch_first=True)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.lstm(x)
        x, _ = self.gru(x)
        h, _ = self.cell(x[:, -1])
        return x + h[:, None]


@_case("embedding_max_norm", _tokens, _classify, precisions=("32-true",))
class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH, max_norm=1.0, padding_idx=3)
        self.plain = nn.Embedding(50, WIDTH, padding_idx=0)
        self.bag = nn.EmbeddingBag(50, WIDTH, mode="sum")
        self.out = nn.Linear(WIDTH, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.plain(ids) + self.bag(ids)[:, None]
        return self.out(x)


@_case("parametrizations", precisions=("32-true",))
class Parametrized(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.c = nn.utils.parametrizations.orthogonal(nn.Linear(8, 8, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return x + self.c(x.reshape(-1, 8)).reshape(x.shape)


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


@_case("custom_function_saves_weight", precisions=("32-true", "bf16-true"))
class CustomFunction(nn.Module):
    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(_Times.apply(x, self.weight))

    def __init__(self):
        super().__init__()
        self.units = nn.Sequential(*(CustomFunction.Unit() for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        return self.units(x)


# weights of a ParameterList are used outside any unit, so their graph keeps them all on the device
@_case("parameter_list_and_dict", precisions=("32-true", "bf16-true", "16-mixed"), floor=0.5)
class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for _ in range(3))
        self.dict = nn.ParameterDict(
            {k: nn.Parameter(torch.randn(WIDTH) / 6) for k in ("b0", "b1", "b2")}
        )
        self.body = Mlp(depth=1)

    def forward(self, x: Tensor) -> Tensor:
        for i, weight in enumerate(self.list):
            x = torch.tanh(F.linear(x, weight, self.dict[f"b{i}"]))
        return self.body(x) + self.dict["b0"]


@_case("bilinear_and_prelu")
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.bi = nn.Bilinear(8, 8, WIDTH)
        self.act = nn.PReLU()
        self.proj = nn.Linear(WIDTH, 16)
        self.rms = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.proj(x).chunk(2, dim=-1)
        return self.rms(self.act(self.bi(a.contiguous(), b.contiguous())))


# ---- transformers ----------------------------------------------------------------------------------


def transformers_cases() -> list[Case]:
    """Tiny configurations of seven families, train mode, dropout where the model has it."""
    import transformers as hf

    def lm(ids_step: int) -> tuple[Tensor]:
        return (torch.randint(4, 60, (2, 10), generator=_generator(ids_step)),)

    def lm_loss(run: Any, batch: tuple[Tensor]) -> Tensor:
        return run(input_ids=batch[0], labels=batch[0]).loss

    def pixels(step: int) -> tuple[Tensor, Tensor]:
        g = _generator(step)
        return torch.randn(2, 3, 16, 16, generator=g), torch.randint(0, 5, (2,), generator=g)

    def labels_loss(run: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return run(pixel_values=batch[0], labels=batch[1]).loss

    def sentences(step: int) -> tuple[Tensor, Tensor, Tensor]:
        g = _generator(step)
        ids = torch.randint(4, 60, (3, 10), generator=g)
        mask = torch.ones_like(ids)
        mask[1, 7:] = 0
        return ids, mask, torch.randint(0, 3, (3,), generator=g)

    def sentence_loss(run: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return run(input_ids=batch[0], attention_mask=batch[1], labels=batch[2]).loss

    gpt2 = hf.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    opt = hf.OPTConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=2,
        max_position_embeddings=16,
        word_embed_proj_dim=24,
    )
    llama = hf.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    bert = hf.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=16,
        num_labels=3,
    )
    t5 = hf.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    vit = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    mixtral = hf.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        max_position_embeddings=16,
        output_router_logits=True,
    )
    both = ("32-true", "bf16-true", "bf16-mixed")

    def checkpointed_llama() -> nn.Module:
        model = hf.LlamaForCausalLM(llama)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    return [
        Case("gpt2", lambda: hf.GPT2LMHeadModel(gpt2), lm, lm_loss, (*both, "16-mixed")),
        Case("opt", lambda: hf.OPTForCausalLM(opt), lm, lm_loss, both),
        Case("llama", lambda: hf.LlamaForCausalLM(llama), lm, lm_loss, (*both, "16-mixed")),
        Case("llama_checkpointed", checkpointed_llama, lm, lm_loss, both),
        Case(
            "bert", lambda: hf.BertForSequenceClassification(bert), sentences, sentence_loss, both
        ),
        Case("t5", lambda: hf.T5ForConditionalGeneration(t5), lm, lm_loss, both),
        Case("vit", lambda: hf.ViTForImageClassification(vit), pixels, labels_loss, both),
        Case("mixtral", lambda: hf.MixtralForCausalLM(mixtral), lm, lm_loss, both),
    ]
