"""Programs about kinds of layers and precisions: statistics, strides, recurrent cells, attention, reparametrisation."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import gemini_strategy as gs
from programs import Run, Six, door


class Body(nn.Module):
    """One layer between others, that fill the device."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.part = self.make()
        self.head = nn.Linear(32, 8)

    def make(self) -> nn.Module:
        raise NotImplementedError

    def middle(self, h: Tensor) -> Tensor:
        return self.part(h)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        for layer in self.layers[:3]:
            h = torch.tanh(layer(h))
        h = torch.tanh(self.middle(h))
        for layer in self.layers[3:]:
            h = torch.tanh(layer(h))
        return self.head(h)


class _Statistics(nn.Module):
    """Running statistics that are parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.bias = nn.Parameter(torch.zeros(32))
        self.running_mean = nn.Parameter(torch.zeros(32), requires_grad=False)
        self.running_var = nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        return F.batch_norm(
            h, self.running_mean, self.running_var, self.weight, self.bias, self.training
        )


class _InstanceStatistics(_Statistics):
    def forward(self, h: Tensor) -> Tensor:
        return F.instance_norm(
            h.t()[None].reshape(1, 32, -1),
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            True,
        )[0].t()


class _Counter(nn.Module):
    """Counts its calls in a parameter, and keeps an average of its input in another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32))
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.average = nn.Parameter(torch.zeros(32), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.average.lerp_(h.mean(0), 0.1)
        return h @ self.weight + self.average


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(h[None], h[None], h[None], need_weights=False)[0][0]


class _AttentionDims(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, kdim=16, vdim=16, add_bias_kv=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.attention(h, h[:, :16], h[:, 16:])[0]


class _Cell(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.cell = kind(32, 32)

    def forward(self, h: Tensor) -> Tensor:
        state = self.cell(h)
        for _ in range(2):
            state = self.cell(h, state)
        return state[0] if isinstance(state, tuple) else state


class _Recurrent(nn.Module):
    def __init__(self, kind: type, **how: Any) -> None:
        super().__init__()
        self.rnn = kind(32, 32, **how)
        self.wide = how.get("bidirectional", False)

    def forward(self, h: Tensor) -> Tensor:
        out, _ = self.rnn(h[:, None])
        return out[:, 0, :32] + (out[:, 0, 32:] if self.wide else 0)


class _Packed(_Recurrent):
    def forward(self, h: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_sequence([h, h[:3], h[:2]])
        out, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])
        return out.sum(1)


class _Conv(nn.Module):
    def __init__(self, kind: type = nn.Conv2d, **how: Any) -> None:
        super().__init__()
        self.conv = kind(2, 2, 3, padding=1, **how)

    def forward(self, h: Tensor) -> Tensor:
        return self.conv(h.reshape(-1, 2, 4, 4)).reshape(-1, 32)


class _Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 32, mode="mean")
        self.table = nn.Embedding(50, 32, padding_idx=0, max_norm=1.0, scale_grad_by_freq=True)

    def forward(self, h: Tensor) -> Tensor:
        ids = torch.arange(h.shape[0] * 3, device=h.device).reshape(-1, 3)
        return h + self.bag(ids) + self.table(ids[:, 0])


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.1, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h[None])[0]


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(32, 32, 32)

    def forward(self, h: Tensor) -> Tensor:
        return self.form(h, h)


class _List(nn.Module):
    """Lists and dicts of parameters, of odd sizes, some empty."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(32, n) / 8 for n in (1, 7, 31, 0, 13)])
        self.named = nn.ParameterDict(
            {"a": nn.Parameter(torch.zeros(32)), "b": nn.Parameter(torch.tensor(0.5))}
        )

    def forward(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = h + (h @ part) @ part.t()
        return (h + self.named["a"]) * self.named["b"]


class _Tuple(nn.Module):
    """Gives and takes its own weight in structures."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, h: Tensor) -> Tensor:
        parts = {"out": self.inner(h), "weight": (self.inner.weight, [self.inner.bias])}
        return parts["out"] + h @ parts["weight"][0] + parts["weight"][1][0]


class _Generator(nn.Module):
    """A forward that is a generator inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def outputs(self, h: Tensor) -> Any:
        for layer in self.inner:
            h = torch.tanh(layer(h))
            yield h, layer.weight

    def forward(self, h: Tensor) -> Tensor:
        return sum(out + 0.1 * w.mean() for out, w in self.outputs(h))


class _Hyper(nn.Module):
    """A weight that is computed from other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.randn(32, 4) / 4)
        self.v = nn.Parameter(torch.randn(4, 32) / 4)
        self.base = nn.Linear(32, 32)
        self.base.weight.requires_grad_(False)

    def forward(self, h: Tensor) -> Tensor:
        return F.linear(h, self.base.weight + self.u @ self.v, self.base.bias)


class _Recursive(nn.Module):
    """One layer that is called at several depths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, h: Tensor, depth: int = 3) -> Tensor:
        h = torch.tanh(self.layer(h))
        return h if depth == 0 else h + self.forward(h, depth - 1)


class _Dropped(nn.Module):
    """Standardises its weight in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, h: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-5)
        return F.linear(h, w) / 6


def _spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(32, 32))


def _weight_norm() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(32, 32))


def _pruned() -> nn.Module:
    layer = nn.Linear(32, 32)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


PARTS: dict[str, tuple[str, Any]] = {
    "statistics as parameters": ("11", _Statistics),
    "instance statistics as parameters": ("11", _InstanceStatistics),
    "counter in a parameter": ("11", _Counter),
    "BatchNorm": ("11", lambda: nn.BatchNorm1d(32)),
    "BatchNorm without affine": ("11", lambda: nn.BatchNorm1d(32, affine=False)),
    "GroupNorm": ("", lambda: nn.GroupNorm(4, 32)),
    "RMSNorm": ("", lambda: nn.RMSNorm(32)),
    "MultiheadAttention": ("", _Attention),
    "MultiheadAttention of other dims": ("", _AttentionDims),
    "LSTMCell": ("", lambda: _Cell(nn.LSTMCell)),
    "GRUCell": ("", lambda: _Cell(nn.GRUCell)),
    "LSTM": ("", lambda: _Recurrent(nn.LSTM, num_layers=2)),
    "LSTM both ways": ("", lambda: _Recurrent(nn.LSTM, bidirectional=True)),
    "GRU": ("", lambda: _Recurrent(nn.GRU)),
    "RNN packed": ("", lambda: _Packed(nn.RNN)),
    "Conv2d": ("12", _Conv),
    "Conv2d channels_last": ("12", lambda: _Conv().to(memory_format=torch.channels_last)),
    "ConvTranspose2d": ("12", lambda: _Conv(nn.ConvTranspose2d)),
    "embedding bags": ("", _Bags),
    "TransformerEncoderLayer": ("", _Transformer),
    "Bilinear": ("", _Bilinear),
    "lists of parameters": ("", _List),
    "its weight in structures": ("8", _Tuple),
    "generator in a forward": ("8", _Generator),
    "computed weight": ("", _Hyper),
    "recursive": ("", _Recursive),
    "standardised weight": ("14", _Dropped),
    "spectral_norm": ("19", _spectral),
    "weight_norm": ("19", _weight_norm),
    "pruned": ("14", _pruned),
    "old weight_norm": ("19", lambda: nn.utils.weight_norm(nn.Linear(32, 32))),
    "orthogonal": ("19", lambda: parametrizations.orthogonal(nn.Linear(32, 32))),
    "skip_init": (
        "",
        lambda: (
            nn.init.eye_((layer := nn.utils.skip_init(nn.Linear, 32, 32, bias=False)).weight)
            is None
            or layer
        ),
    ),
}


def _train(run: Run) -> Any:
    losses = run.step(3, clip=1.0)
    run.model.eval()
    with torch.no_grad():
        out = run.loss(50)
    with torch.inference_mode():
        again = run.loss(51).clone()
    run.model.train()
    return [losses, out, again]


def _body(make: Any) -> Any:
    return type("Body", (Body,), {"make": lambda self: make()})


for _name, (_item, _make) in PARTS.items():
    door(f"layer/{_name}", _item, model=_body(_make), served=True)(_train)


@door("layer/old spectral_norm", "19", model=None)
def _(run: Run) -> Any:
    """Until its first forward the layer keeps a tensor on the memory of its parameter, which manage() refuses."""
    model = Six()
    nn.utils.spectral_norm(model.layers[3])
    run.manage(model, gs.HybridAdam(model.parameters(), lr=2e-3))
    return run.step(3)


@door("layer/old spectral_norm, after a forward", "19", model=None, served=True)
def _(run: Run) -> Any:
    model = Six()
    nn.utils.spectral_norm(model.layers[3])
    model(run.x().cpu())
    run.manage(model, gs.HybridAdam(model.parameters(), lr=2e-3))
    return run.step(3)


# ---- fast paths ----------------------------------------------------------------------------------


def _attend(run: Run, is_training: bool, **how: Any) -> Any:
    """Outputs of the layer by itself, whatever torch makes of masks, modes and autocast."""
    part = run.model.part.train(is_training)
    x, outputs = run.randn(6, 6, 32), []
    pads = torch.arange(6, device=run.device) >= torch.tensor([[6], [4], [6], [2], [5], [3]]).to(
        x.device
    )
    causal = nn.Transformer.generate_square_subsequent_mask(6, device=run.device)
    for masks in ({}, {"src_key_padding_mask": pads}, {"mask": causal}):
        for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
            torch.manual_seed(3)
            with mode(), torch.autocast(run.device, dtype=torch.bfloat16, **how):
                try:
                    outputs.append(part(x, **masks).detach().clone())
                except RuntimeError as error:  # torch's own, of nested tensors under autocast
                    if isinstance(error, gs.GeminiError):
                        raise
                    outputs.append(str(error))
    run.model.train()
    return outputs


class _Around(nn.Module):
    """An encoder between layers that take no batches."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        options = {"batch_first": True, "nhead": 4} | how
        is_nested = options.pop("is_nested", True)
        layer = nn.TransformerEncoderLayer(32, dim_feedforward=48, dropout=0.1, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), is_nested)

    def forward(self, h: Tensor, **masks: Any) -> Tensor:
        return self.encoder(h, **masks) if h.dim() == 3 else self.encoder(h[None])[0]


_ENCODERS: dict[str, dict[str, Any]] = {
    "nested": {},
    "not nested": {"is_nested": False},
    "norm first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "one head": {"nhead": 1},
    "batch second": {"batch_first": False},
}
for _name, _how in _ENCODERS.items():
    _encoder = _body(functools.partial(_Around, **_how))
    for _is_training in (True, False):
        for _is_cast in (True, False):
            _mode = ("training" if _is_training else "evaluation") + ", autocast" * _is_cast
            door(f"encoder/{_name}, {_mode}", model=_encoder, served=True)(
                functools.partial(_attend, is_training=_is_training, enabled=_is_cast)
            )


@door("encoder/a frozen one", model=None, served=True)
def _(run: Run) -> Any:
    """It takes the fast path while gradients are on."""
    model = _body(_Around)()
    model.part.requires_grad_(False)
    run.manage(model, gs.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=2e-3))
    return [_attend(run, False, enabled=False), _attend(run, False, enabled=True), run.step(2)]


@door("encoder/attention by itself", model=_body(_Attention), served=True)
def _(run: Run) -> Any:
    part, x, outputs = run.model.part.eval().attention, run.randn(4, 6, 32), []
    for mode in (torch.no_grad, torch.inference_mode):
        for is_cast in (True, False):
            for wants in (True, False):
                with mode(), torch.autocast(run.device, dtype=torch.bfloat16, enabled=is_cast):
                    out, weights = part(x, x, x, need_weights=wants)
                outputs += [out.clone(), None if weights is None else weights.clone()]
    run.model.train()
    return outputs


# ---- strides -------------------------------------------------------------------------------------


def _transposed() -> nn.Module:
    layer = nn.Linear(129, 257, bias=False)
    layer.weight = nn.Parameter(torch.randn(129, 257).t() / 12)
    return layer


class Transposed(nn.Module):
    """A weight that is stored transposed, of sizes that choose other kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 129)
        self.wide = _transposed()
        self.head = nn.Linear(257, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wide(torch.tanh(self.stem(x)))))


class LastChannels(nn.Module):
    """Convolutions in channels_last, with their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 3 * 64)
        self.one = nn.Conv2d(3, 12, 3)
        self.two = nn.Conv2d(12, 8, 3, groups=2)
        self.head = nn.Linear(128, 8)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).reshape(-1, 3, 8, 8).to(memory_format=torch.channels_last)
        return self.head(torch.relu(self.two(torch.relu(self.one(h)))).flatten(1))


def _strides(run: Run) -> Any:
    return [
        [(n, list(p.stride()), p.is_contiguous()) for n, p in run.model.named_parameters()],
        run.step(4),
        {k: list(v.stride()) for k, v in run.model.state_dict().items()},
    ]


for _name, _model in {"transposed": Transposed, "channels_last": LastChannels}.items():
    door(f"strides/{_name}", "12", model=_model, served=True)(_strides)
    door(f"strides/{_name}, bf16", "12", model=_model, precision="bf16-mixed", served=True)(
        lambda run: [list(p.stride()) for p in run.model.parameters()]
    )


@door("strides/of gradients and moments", "12", model=Transposed, served=True)
def _(run: Run) -> Any:
    run.step(1)
    run.backward()
    grad = run.param("wide.weight").grad
    return [list(grad.stride()), grad.clone()]


@door("strides/views of a transposed weight", "12", model=Transposed, served=True)
def _(run: Run) -> Any:
    w = run.param("wide.weight")
    with torch.no_grad():
        w.t().view(-1)[:5] = 1.0
    return [w.t().is_contiguous(), w.detach().clone(), w.t().reshape(-1).sum()]


@door("strides/a transposed weight as complex numbers", "12", model=Transposed, served=True)
def _(run: Run) -> Any:
    wide = run.param("wide.weight").detach()  # of an odd number of elements
    numbers = torch.view_as_complex(wide.as_strided((257, 64, 2), (2, 514, 1)))
    with torch.no_grad():
        numbers[3:5] *= 2j
    return [torch.view_as_real(numbers).clone(), wide.clone()]


# ---- reparametrisation after manage() ------------------------------------------------------------


@door("after/weight_norm and its removal", "19")
def _(run: Run) -> Any:
    parametrizations.weight_norm(run.model.layers[3])
    first = run.loss().detach()
    parametrize.remove_parametrizations(run.model.layers[3], "weight")
    return [first, run.loss().detach()]


@door("after/a parametrization of a user", "19")
def _(run: Run) -> Any:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).transpose(-1, -2)

    parametrize.register_parametrization(run.model.layers[3], "weight", Symmetric())
    loss = run.loss()
    loss.backward()
    parametrize.remove_parametrizations(run.model.layers[3], "weight", leave_parametrized=True)
    return loss.detach()


@door("after/spectral_norm", "19")
def _(run: Run) -> Any:
    parametrizations.spectral_norm(run.model.layers[3])
    return run.loss().detach()


@door("after/remove_parametrizations of one from before", "19", model=_body(_weight_norm))
def _(run: Run) -> Any:
    parametrize.remove_parametrizations(run.model.part, "weight")
    return run.loss().detach()


@door("after/parametrize.cached", "19", model=_body(_weight_norm))
def _(run: Run) -> Any:
    with parametrize.cached():
        loss = run.loss(0) + run.loss(1)
    loss.backward()
    return loss.detach()


@door("after/prune.ln_structured", "14")
def _(run: Run) -> Any:
    prune.ln_structured(run.model.layers[3], "weight", amount=0.3, n=2, dim=0)
    first = run.loss().detach()
    prune.remove(run.model.layers[3], "weight")
    return [first, run.loss().detach()]


@door("after/prune.remove of one from before", "14", model=_body(_pruned))
def _(run: Run) -> Any:
    prune.remove(run.model.part, "weight")
    return run.loss().detach()


@door("after/global_unstructured", "14", needs_all=True)
def _(run: Run) -> Any:
    prune.global_unstructured(
        [(m, "weight") for m in run.model.layers], prune.L1Unstructured, amount=0.5
    )
    return run.loss().detach()


@door("after/a new head", "19")
def _(run: Run) -> Any:
    run.model.head = nn.Linear(32, 3).to(run.device)
    return run.loss().detach()


@door("after/a layer appended", "19")
def _(run: Run) -> Any:
    """It is in no optimizer: a gradient, and no step."""
    run.model.layers.append(nn.Linear(32, 32).to(run.device))
    return [run.step(2), run.w.detach().clone()]


@door("after/a larger head in its place", "19")
def _(run: Run) -> Any:
    old = run.model.head
    new = nn.Linear(32, 9).to(run.device)
    new.weight.data[:8] = old.weight.data
    new.bias.data[:8] = old.bias.data
    run.model.head = new
    return run.loss().detach()


@door("after/fused batch norm into linear", "14", needs_all=True)
def _(run: Run) -> Any:
    layer = nn.utils.fusion.fuse_linear_bn_eval(
        run.model.layers[3].eval(), nn.BatchNorm1d(32).to(run.device).eval()
    ).to(run.device)
    run.model.layers[3].train()
    return [layer(run.h()).detach(), layer.weight.detach()]


@door("after/fuse_linear_bn_weights", "14", needs_all=True)
def _(run: Run) -> Any:
    one, zero = torch.ones(32, device=run.device), torch.zeros(32, device=run.device)
    w, b = nn.utils.fusion.fuse_linear_bn_weights(run.w, run.b, zero, one, 1e-5, one, zero)
    return [w.detach(), b.detach()]


@door("after/a layer used alone", "14", served=True)
def _(run: Run) -> Any:
    out = run.model.layers[3](run.h())
    out.square().sum().backward()
    return [out.detach(), run.w.grad.clone()]


@door("after/a head tied by use", "3", served=True)
def _(run: Run) -> Any:
    h = run.model.stem(run.x())
    out = F.linear(torch.tanh(h), run.model.stem.weight.t(), None)
    out.square().sum().backward()
    return [out.detach(), run.param("stem.weight").grad.clone()]


@door("after/get and set attributes", "19", served=True)
def _(run: Run) -> Any:
    run.w.tag = "mine"
    run.w.no_weight_decay = True
    run.step(1)
    return [run.w.tag, run.w.no_weight_decay, hasattr(run.w, "other")]


# ---- precisions ----------------------------------------------------------------------------------

for _precision in ("bf16-true", "bf16-mixed"):

    @door(f"{_precision}/training", "13", precision=_precision, served=True)
    def _(run: Run) -> Any:
        return run.step(4, clip=0.5)

    @door(f"{_precision}/reads", "3", precision=_precision, served=True, trains=False)
    def _(run: Run) -> Any:
        run.step(1)
        return [
            run.w.norm(),
            run.w.data.float(),
            run.w.detach().clone(),
            dict(run.model.state_dict()),
        ]

    @door(f"{_precision}/ema", "3", precision=_precision, served=True, trains=False)
    def _(run: Run) -> Any:
        shadow = [p.detach().clone().float() for p in run.model.parameters()]
        for _ in range(2):
            run.step(1)
            for s, p in zip(shadow, run.model.parameters(), strict=True):
                s.mul_(0.9).add_(p.detach().float(), alpha=0.1)
        return shadow

    @door(f"{_precision}/gradient penalty", "1", precision=_precision, needs_all=True, trains=False)
    def _(run: Run) -> Any:
        x = run.x().requires_grad_()
        (slope,) = torch.autograd.grad(run.call(x).sum(), x, create_graph=True)
        loss = slope.square().sum()
        loss.backward()
        return [loss.detach(), run.w.grad.clone()]

    @door(
        f"{_precision}/moments and remainder",
        "13",
        precision=_precision,
        trains=False,
        setups=("cpu", "auto"),
    )
    def _(run: Run) -> Any:
        run.step(2)
        saved = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        saved = {k: dict(s.items()) for k, s in saved.items()}
        weights = {k: v.clone() for k, v in saved["model"].items()}
        ahead = run.step(2)
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(saved["optimizer"])
        return [ahead[0], run.step(1)]


@door("autocast/around a managed model", "13", served=True)
def _(run: Run) -> Any:
    losses = []
    for seed in range(3):
        with torch.autocast(run.device, dtype=torch.bfloat16):
            loss = run.model(run.x(seed)).float().square().mean()
        loss.backward()
        run.finish()
        losses.append(loss.detach())
    return losses


@door("autocast/of a weight outside its unit", "14", served=True)
def _(run: Run) -> Any:
    with torch.autocast(run.device, dtype=torch.bfloat16):
        one = run.h() @ run.w
        two = F.linear(run.h(), run.w, run.b)
    return [one.float().detach(), two.float().detach()]


@door("autocast/cache over a step", "13", served=True)
def _(run: Run) -> Any:
    losses = []
    with torch.autocast(run.device, dtype=torch.bfloat16):
        loss = run.loss(0) + run.loss(1)
        losses.append(loss.detach())
    loss.backward()
    run.finish()
    return losses


@door("autocast/GradScaler of torch", "13")
def _(run: Run) -> Any:
    scaler = torch.amp.GradScaler(run.device, init_scale=64.0, growth_interval=2)
    losses = []
    for seed in range(3):
        loss = run.loss(seed)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
        losses.append(loss.detach())
    return [losses, scaler.get_scale()]


@door("precision/half of a layer", "12")
def _(run: Run) -> Any:
    other = Six().to(run.device)
    other.load_state_dict({k: v.half() for k, v in run.model.state_dict().items()})
    return other(run.x()).detach()
