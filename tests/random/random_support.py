"""What a random program is written in: the same few verbs managed and unmanaged, parts of models, and comparing bits.

A script that reproduces a failure begins with the whole text of this file, so it needs nothing but the package, and on
the chaos device the folder `tests` on its path.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from gemini_strategy.parameters.low import note_seen, settled_low

DTYPES = {"bf16-true": torch.bfloat16, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
IN, OUT, ROWS = 11, 5, 4


class Differs(AssertionError):
    """The managed run and the unmanaged one left other bits."""


# ---- parts of models -----------------------------------------------------------------------------


class Residual(nn.Module):
    """Norm, up, down: nested units of other sizes."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, wide)
        self.drop, self.down = nn.Dropout(0.1), nn.Linear(wide, width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.drop(F.gelu(self.up(self.norm(h)))))


class Hanging(nn.Module):
    """Parameters of its own around a child."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / 6)
        self.gain = nn.Parameter(torch.ones(width))
        self.inner = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(F.linear(h, self.weight))) * self.gain + h


class Saved(torch.autograd.Function):
    """A product that keeps the weight for its backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return h @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        h, w = ctx.saved_tensors
        return g @ w, g.reshape(-1, g.shape[-1]).t() @ h.reshape(-1, h.shape[-1])


class Peeks(nn.Module):
    """A parent that owns a parameter and uses its child's weight itself, in one of several ways."""

    def __init__(self, width: int, way: str) -> None:
        super().__init__()
        self.way, self.shift = way, nn.Parameter(torch.zeros(width))
        self.child = nn.Linear(width, width)

    def forward(self, h: Tensor) -> Tensor:
        w = self.child.weight
        if self.way == "function":
            return self.child(h) + Saved.apply(h, w.to(h.dtype)) + self.shift
        if self.way == "reentrant":
            return self.child(h) + checkpoint(F.linear, h, w, use_reentrant=True) + self.shift
        if self.way == "data":
            return self.child(h) + F.linear(h, w.data) + self.shift
        return F.linear(h, w, self.child.bias) + self.shift


class Bare(nn.Module):
    """Odd and empty parameters in a list."""

    def __init__(self, width: int, *sizes: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(width, n) / 5 for n in sizes])

    def forward(self, h: Tensor) -> Tensor:
        for part in self.parts:
            h = h + torch.tanh(h @ part.to(h.dtype)) @ part.to(h.dtype).t()
        return h


class Counts(nn.Module):
    """Writes a parameter without a gradient in its forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width))
        self.average = nn.Parameter(torch.zeros(width), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.5).add_(h.detach().float().mean(0).to(self.average.dtype))
        return h @ self.weight.to(h.dtype) + self.average.to(h.dtype)


class Keeps(nn.Module):
    """Keeps what it has seen of its weight in its first forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.views = nn.Parameter(torch.randn(width, width) / 6), []

    def forward(self, h: Tensor) -> Tensor:
        if not self.views:
            self.views = [self.weight.detach(), self.weight.data[1:].t()]
        return F.linear(h, self.weight.to(h.dtype)) + h


# ---- the verbs -----------------------------------------------------------------------------------


def _low_of(p: Tensor, state: dict[str, Any]) -> Tensor | None:
    return state.get("remainder", state.get("master", getattr(p, "_gm_low", None)))


class Plain:
    """The unmanaged run: `gs.cast_model_`, `gs.HybridAdam` alone."""

    engine = None

    def __init__(self, model: nn.Module, precision: str, lr: float) -> None:
        self.model, self.precision = model, precision
        self.make_optimizer(lr)
        gs.cast_model_(model, precision)
        self.scaler = (
            gs.LossScaler(initial_scale=256.0, growth_interval=4)
            if precision == "16-mixed"
            else None
        )
        self.kept: dict[str, Any] = {}
        self.seen: list[Any] = []

    def make_optimizer(self, lr: float) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = gs.HybridAdam(trained, lr=lr, weight_decay=0.01)

    def p(self, name: str) -> nn.Parameter:
        """A parameter."""
        return self.model.get_parameter(name)

    def ps(self) -> list[nn.Parameter]:
        """All."""
        return list(self.model.parameters())

    def see(self, *values: Any) -> None:
        """What is compared."""
        for v in values:
            self.seen.append(
                v.detach().cpu().clone() if isinstance(v, Tensor) else copy.deepcopy(v)
            )

    def x(self, seed: int) -> Tensor:
        """An input."""
        return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(seed))

    def call(self, x: Tensor, n: int = 0) -> Tensor:
        """The model, cast as its precision says."""
        dtype = DTYPES.get(self.precision)
        if self.precision.endswith("-mixed"):
            with torch.autocast("cpu", dtype=dtype):
                return self.model(x, n)
        return self.model(x if dtype is None else x.to(dtype), n)

    def loss(self, seed: int, n: int = 0) -> Tensor:
        """A loss."""
        torch.manual_seed(seed)
        return self.call(self.x(seed), n).float().square().mean()

    def backward(self, loss: Tensor, step: bool = False, **how: Any) -> None:
        """Backward, scaled."""
        (loss if self.scaler is None else loss * self.scaler.scale).backward(**how)

    def _grads(self) -> list[Tensor]:
        return [
            p.grad for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None
        ]

    def clip(self, norm: float) -> float:
        """The norm; -1 if it is not finite."""
        scale = self.scaler.scale if self.scaler else 1.0
        if not all(torch.isfinite(g).all() for g in self._grads()):
            return -1.0
        return float(self.optimizer.clip_grad_norm_(norm, grad_divisor=scale))

    def step(self) -> None:
        """A step; an overflow skips it."""
        grads = self._grads()
        if not grads:
            return
        is_over = self.scaler is not None and not all(torch.isfinite(g).all() for g in grads)
        if not is_over:
            self.optimizer.step(grad_divisor=self.scaler.scale if self.scaler else 1.0)
        else:
            self.optimizer._gm_clip.set(1.0, ())
        if self.scaler is not None:
            self.scaler.update(is_over)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients."""
        self.model.zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none)

    def settle(self) -> None:
        """What was loaded is of the weights that are there."""
        for p in self.model.parameters():
            note_seen(p)

    @contextlib.contextmanager
    def full(self, p: nn.Parameter) -> Iterator[Tensor]:
        """The fp32 master; changes count."""
        values = self.master(p)
        before = values.clone()
        yield values
        if torch.equal(values.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8)):
            return
        self._become(p, values)

    def _become(self, p: nn.Parameter, values: Tensor) -> None:
        low = _low_of(p, self.optimizer.state.get(p, {}))
        if p.dtype == torch.bfloat16 and low is not None:
            wide = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
            high = (wide + 0x8000) >> 16
            p.data.copy_((high << 16).to(torch.int32).view(torch.float32))
            low.copy_((wide - (high << 16)).to(torch.int16))
        else:
            p.data.copy_(values)
            if low is not None:
                low.copy_(values)
        self.optimizer._note_lows()
        note_seen(p)

    def master(self, p: nn.Parameter) -> Tensor:
        """A copy of the master."""
        low = _low_of(p, self.optimizer.state.get(p, {}))
        if low is None:
            return p.detach().clone()
        low = settled_low(p, low.reshape(p.shape))
        if low.dtype == torch.float32:
            return low.clone()
        high = p.detach().view(torch.int16).to(torch.int32) * 65536
        return (high + low.reshape(p.shape).to(torch.int32)).view(torch.float32)

    def save(self) -> Any:
        """All that an exact resume needs."""
        scaler = copy.deepcopy(self.scaler)
        masters = {n: self.master(p) for n, p in self.model.named_parameters()}
        return masters, copy.deepcopy(self.optimizer.state_dict()), scaler

    def load(self, saved: Any) -> None:
        """Takes it back."""
        masters, state, scaler = saved
        self.optimizer.load_state_dict(copy.deepcopy(state))
        with (
            torch.no_grad()
        ):  # also where nothing has changed: what a weight lacked may be an older one's
            for n, p in self.model.named_parameters():
                self._become(p, masters[n])
        self.settle()
        if scaler is not None:
            self.scaler = copy.deepcopy(scaler)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """The others have no masters, or those of when they were."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def finish(self) -> dict[str, Any]:
        """All that is compared in the end."""
        state = self.optimizer.state_dict()["state"]
        masters = {n: self.master(p).float() for n, p in self._trained()}
        return self._all(masters, dict(self.model.state_dict()), state)

    def _all(self, masters: dict, weights: dict, state: dict) -> dict[str, Any]:
        moments = {}
        for i, s in sorted(state.items()):
            if int(s.get("step", 0)):
                moments[i] = [s["exp_avg"].clone(), s["exp_avg_sq"].clone(), int(s["step"])]
        weights = {n: w.detach().cpu().clone() for n, w in weights.items()}
        return {"seen": self.seen, "weights": weights, "masters": masters, "moments": moments}

    def keep(self, folder: str) -> None:
        """A checkpoint in a folder."""
        self.kept[folder] = self.save()

    def resume(self, folder: str) -> None:
        """That of `keep`."""
        self.load(self.kept[folder])

    def again(self, dtype: torch.dtype | None = None) -> None:
        """Under another engine, or in fp32 and back; what was kept of the model's memory is let go."""
        for key in [k for k in self.kept if k.startswith("live")]:
            del self.kept[key]
        if dtype is None or self.precision == "32-true":
            return
        for p in self.model.parameters():
            master = self.master(p)
            for key in ("remainder", "master"):
                self.optimizer.state.get(p, {}).pop(key, None)
            p.data = master
        gs.cast_model_(self.model, self.precision)

    def close(self) -> None:
        """Nothing to do."""


class Managed(Plain):
    """The same under an engine."""

    def __init__(self, model: nn.Module, precision: str, lr: float, **how: Any) -> None:
        self.model, self.precision, self.kept, self.seen = model, precision, {}, []
        self.make_optimizer(lr)
        gs.cast_model_(
            model, precision
        )  # what came in fp32 would leave in fp32; the other does not
        self.folders, self.how = tempfile.TemporaryDirectory(), how
        self.manage()

    def manage(self) -> None:
        """Makes the engine."""
        self.engine = gs.manage(
            self.model,
            self.optimizer,
            device="cpu",
            precision=self.precision,
            initial_scale=256.0,
            growth_interval=4,
            **self.how,
        )

    def call(self, x: Tensor, n: int = 0) -> Tensor:
        return self.model(x, n)

    def backward(self, loss: Tensor, step: bool = False, **how: Any) -> None:
        self.engine.backward(loss, step=step, **how)

    def clip(self, norm: float) -> float:
        value = float(self.engine.clip_grad_norm_(norm))
        return value if np.isfinite(value) else -1.0

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def settle(self) -> None:
        pass

    def full(self, p: nn.Parameter) -> Any:
        return self.engine.full_parameter(p)

    def save(self) -> Any:
        return copy.deepcopy(self.engine.state_dict())

    def load(self, saved: Any) -> None:
        self.engine.load_state_dict(saved)

    def finish(self) -> dict[str, Any]:
        masters = self.engine.model_state_dict(masters=True)
        masters = {n: masters[n].float() for n, _ in self._trained()}
        weights = self.engine.model_state_dict(masters=False)
        return self._all(masters, weights, self.engine.optimizer_state_dict()["state"])

    def keep(self, folder: str) -> None:
        self.engine.save(f"{self.folders.name}/{folder}")
        self.kept[folder] = None

    def resume(self, folder: str) -> None:
        self.engine.load(f"{self.folders.name}/{folder}")

    def again(self, dtype: torch.dtype | None = None) -> None:
        for key in [k for k in self.kept if k.startswith("live")]:
            del self.kept[key]
        self.engine.close(dtype=dtype)
        if dtype is not None and self.precision != "32-true":
            gs.cast_model_(self.model, self.precision)  # as at first
        self.manage()

    def close(self) -> None:
        self.engine.close()


# ---- both, and comparing -------------------------------------------------------------------------


def difference(got: Any, want: Any, where: str = "") -> str | None:
    """The first place that differs, in words."""
    if isinstance(want, Tensor) and isinstance(got, Tensor):
        if got.dtype != want.dtype or got.shape != want.shape:
            return f"{where}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
        a, b = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
        if torch.equal(a, b):
            return None
        gap = (got.detach().double() - want.detach().double()).abs().max().item()
        return f"{where}: {int((got != want).sum())} of {want.numel()} elements differ, at most by {gap:g}"
    if isinstance(want, dict) and isinstance(got, dict):
        if list(got) != list(want):
            return f"{where}: keys {list(got)} instead of {list(want)}"
        parts: Any = ((f"{where}[{k}]", got[k], want[k]) for k in want)
    elif isinstance(want, list | tuple) and isinstance(got, list | tuple):
        if len(got) != len(want):
            return f"{where}: {len(got)} values instead of {len(want)}"
        parts = ((f"{where}[{i}]", *ab) for i, ab in enumerate(zip(got, want, strict=True)))
    else:
        is_same = np.array_equal(got, want) if isinstance(want, np.ndarray) else got == want
        return None if is_same else f"{where}: {got!r:.80} instead of {want!r:.80}"
    return next((text for at, a, b in parts if (text := difference(a, b, at))), None)


def run_unmanaged(net: Callable[[], nn.Module], play: Callable[[Any], None], how: dict) -> dict:
    """What the unmanaged run leaves."""
    torch.manual_seed(how["model_seed"])
    run = Plain(net(), how["precision"], how["lr"])
    play(run)
    return run.finish()


def _chaos() -> Any:
    from helpers import chaos

    return chaos


def run_managed(net: Callable[[], nn.Module], play: Callable[[Any], None], how: dict) -> dict:
    """What the managed run leaves; the budget grows until it is accepted, and further if `may_grow`."""
    share = how["share"]
    while True:
        torch.manual_seed(how["model_seed"])
        model = net()
        budget = int(sum(p.numel() * 12 for p in model.parameters()) * share) + 4096
        try:
            run = Managed(
                model,
                how["precision"],
                how["lr"],
                device_budget=budget,
                chunk_size=how["chunk_size"],
                placement_policy=how["policy"],
            )
        except gs.GeminiMemoryError:
            if share > 60:
                raise
            share *= 1.25 if how["ranks"] == 1 else 1.8
            continue
        try:
            play(run)
            left = run.finish()
            faults = (0, "") if how["chaos"] is None else _chaos().faults()
            if faults[0]:
                raise Differs(f"the device found {faults[0]} unordered accesses: {faults[1]}")
        except gs.GeminiMemoryError:
            if share > 60 or not how["may_grow"]:
                raise
            run.kept.clear()
            run.close()
            share *= 1.5
            continue
        run.kept.clear()
        run.close()
        return left


def both(net: Callable[[], nn.Module], play: Callable[[Any], None], how: dict) -> None:
    """Raises Differs where the two runs differ."""
    want = run_unmanaged(net, play, how)
    if how["chaos"] is not None:
        _chaos().use(how["chaos"])
    os.environ["GEMINI_RATES"] = how["rates"]
    got = run_managed(net, play, how)
    for part in ("seen", "weights", "masters", "moments"):
        if text := difference(got[part], want[part], part):
            raise Differs(text)


def main(net: Callable[[], nn.Module], play: Callable[[Any], None], how: dict) -> None:
    """Of a script: on as many ranks as the program has."""
    import subprocess

    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks, rank = how["ranks"], os.environ.get("PROGRAM_RANK")
    if ranks > 1 and rank is None:
        with tempfile.TemporaryDirectory() as folder:
            env = dict(os.environ, PROGRAM_STORE=f"{folder}/store")
            begun = [
                subprocess.Popen([sys.executable, sys.argv[0]], env=env | {"PROGRAM_RANK": str(r)})
                for r in range(ranks)
            ]
            sys.exit(max(abs(p.wait(120)) for p in begun))
    if ranks > 1:
        store = dist.FileStore(os.environ["PROGRAM_STORE"], ranks)
        dist.init_process_group("gloo", store=store, rank=int(rank), world_size=ranks)
    both(net, play, how)
    print("the same bits")
