"""Programs that are ordinary training in bf16 and fp32: what people do to weights and gradients between steps."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gemini_strategy as gs
from programs import Run, Six, door, left

BF16 = ("bf16-true", "bf16-mixed")
ALL = ("32-true", *BF16)


def in_each(
    name: str, precisions: tuple[str, ...] = ALL, **how: Any
) -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:
    """A row for each precision; what it leaves behind counts too, masters and moments included."""

    def add(body: Callable[[Run], Any]) -> Callable[[Run], Any]:
        for precision in precisions:
            cast = None if precision == "32-true" else precision
            door(f"training/{name}, {precision}", precision=cast, needs_all=True, **how)(
                lambda run: [body(run), left(run)]
            )
        return body

    return add


def _params(run: Run) -> list[nn.Parameter]:
    return list(run.model.parameters())


# ---- weights are written between steps -----------------------------------------------------------


@in_each("weights clamped after each step", ("32-true", *BF16))
def _(run: Run) -> Any:
    out = []
    for _ in range(4):
        out.append(run.step(1, 0.5))
        for p in run.model.parameters():
            p.data.clamp_(-0.1, 0.1)
    return out


@in_each("noise added and taken away by the copy", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        kept = [p.detach().clone() for p in run.model.parameters()]
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(torch.randn_like(p) * 0.01)
        out.append(run.backward(i))
        with torch.no_grad():
            for p, k in zip(run.model.parameters(), kept, strict=True):
                p.copy_(k)
        run.finish(0.5)
    return out


@in_each("SAM", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        norm = torch.stack([p.grad.float().norm() for p in run.model.parameters()]).norm()
        moved = {}
        with torch.no_grad():
            for p in run.model.parameters():
                moved[p] = (p.grad * (0.05 / norm)).to(p.dtype)
                p.add_(moved[p])
        run.optimizer.zero_grad()
        out.append(run.backward(i))
        with torch.no_grad():
            for p in run.model.parameters():
                p.sub_(moved[p])
        run.finish(0.5)
    return out


@in_each("SGD by hand for the head, beside Adam", ("32-true", *BF16))
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        for p in run.model.head.parameters():
            p.data.add_(p.grad, alpha=-0.05)
            p.grad = None
        run.finish(0.5)
    return out


@in_each("a layer made anew midway", ("32-true",))
def _(run: Run) -> Any:
    out = run.step(2)
    torch.manual_seed(1)
    nn.init.orthogonal_(run.model.layers[1].weight)
    nn.init.xavier_uniform_(run.model.layers[2].weight)
    nn.init.trunc_normal_(run.model.layers[3].weight, std=0.02)
    nn.init.zeros_(run.model.layers[3].bias)
    run.model.layers[5].reset_parameters()
    for p in run.model.layers[5].parameters():
        run.optimizer.state.pop(p, None)
    return [out, run.step(3)]


@in_each("layers copied into one another", BF16)
def _(run: Run) -> Any:
    out = run.step(2)
    run.model.layers[4].load_state_dict(run.model.layers[1].state_dict())
    with torch.no_grad():
        run.model.layers[5].weight.copy_(run.model.layers[0].weight.t())
        run.model.layers[3].weight.lerp_(run.model.layers[2].weight, 0.3)
    out += run.step(2)
    a, b = run.model.layers[0], run.model.layers[3]
    kept = a.weight.data.clone()
    a.weight.data.copy_(b.weight.data)
    b.weight.data.copy_(kept)
    return [out, run.step(2)]


@in_each("states dropped in every way", served=True)
def _(run: Run) -> Any:
    out, state, layers = run.step(2), run.optimizer.state, run.model.layers
    state.pop(layers[0].weight)
    del state[layers[1].weight]
    state[layers[2].weight].clear()
    state[layers[3].weight] = {}
    moments = {k: state[layers[4].weight][k].clone() for k in ("step", "exp_avg", "exp_avg_sq")}
    state[layers[4].weight] = moments
    with torch.no_grad():
        layers[0].weight.mul_(1.01)
        layers[0].weight[0] /= 1.01
    out += run.step(2)
    run.optimizer.state.clear()
    out += run.step(1)
    run.optimizer.state = collections.defaultdict(dict)
    return [out, run.step(2)]


def _by_copies(run: Run, states: list[dict[str, Tensor]]) -> None:
    for p, state in zip(_params(run), states, strict=True):
        for key, value in state.items():
            run.optimizer.state[p][key].copy_(value)


def _by_assignment(run: Run, states: list[dict[str, Tensor]]) -> None:
    run.optimizer.state = collections.defaultdict(
        dict, zip(_params(run), copy.deepcopy(states), strict=True)
    )


for _first in ("weights", "states"):
    for _by in (_by_copies, _by_assignment):

        @in_each(f"restored by hand{_by.__name__.replace('_', ' ')}, {_first} first", BF16)
        def _(run: Run, first: str = _first, by: Any = _by) -> Any:
            out = run.step(2)
            weights = [p.detach().clone() for p in _params(run)]
            states = [
                {k: v.clone() for k, v in run.optimizer.state[p].items()} for p in _params(run)
            ]
            out += run.step(1)
            for what in ("weights", "states") if first == "weights" else ("states", "weights"):
                if what == "states":
                    by(run, states)
                    continue
                with torch.no_grad():
                    for p, w in zip(_params(run), weights, strict=True):
                        p.copy_(w)
            return [out, run.step(2)]


@in_each("weights copied back after load_state_dict of the optimizer", BF16)
def _(run: Run) -> Any:
    out = run.step(2)
    weights = [p.detach().clone() for p in _params(run)]
    state = copy.deepcopy(run.optimizer.state_dict())
    out += run.step(1)
    run.optimizer.load_state_dict(state)
    with torch.no_grad():
        for p, w in zip(_params(run), weights, strict=True):
            p.copy_(w)
    return [out, run.step(2)]


@in_each("masks after each step and rewinding", ("32-true", "bf16-true"))
def _(run: Run) -> Any:
    first = copy.deepcopy(run.model.state_dict())
    out = run.step(2)
    masks = {n: (p.abs() > p.abs().mean()).to(p.dtype) for n, p in run.model.named_parameters()}
    for n, p in run.model.named_parameters():
        p.data = first[n].to(p.device) * masks[n]
    for i in range(3):
        out.append(run.backward(i))
        for n, p in run.model.named_parameters():
            p.grad.data.mul_(masks[n])
        run.finish(0.5)
        for n, p in run.model.named_parameters():
            p.data.mul_(masks[n])
    return out


@in_each("line search over a vector of all weights", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(2):
        run.backward(i)
        start = parameters_to_vector(run.model.parameters()).detach().clone()
        slope = parameters_to_vector([p.grad for p in run.model.parameters()])
        for rate in (1.0, 0.1, 0.01):
            vector_to_parameters(start - rate * slope, run.model.parameters())
            with torch.no_grad():
                out.append(run.loss(i))
        vector_to_parameters(start, run.model.parameters())
        run.finish(0.5)
    return out


@in_each("EMA in fp32 by foreach, swapped in", BF16)
def _(run: Run) -> Any:
    ema = [p.detach().float().clone() for p in run.model.parameters()]
    out = []
    for i in range(4):
        run.step(1, 0.5)
        torch._foreach_lerp_(ema, [p.detach().float() for p in run.model.parameters()], 0.2)
        kept = [p.detach().clone() for p in run.model.parameters()]
        with torch.no_grad():
            torch._foreach_copy_(_params(run), ema)
            out.append(run.loss(i))
            torch._foreach_copy_(_params(run), kept)
    return out


@in_each("Lookahead", BF16)
def _(run: Run) -> Any:
    slow = [p.detach().clone() for p in run.model.parameters()]
    out = []
    for i in range(6):
        out.append(run.step(1, 0.5))
        if i % 2:
            with torch.no_grad():
                for s, p in zip(slow, run.model.parameters(), strict=True):
                    s += 0.5 * (p - s)
                    p.copy_(s)
    return out


@in_each("decay by hand through data", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        for p in run.model.parameters():
            p.data.mul_(1 - 1e-2)
        run.finish()
    return out


@in_each("Langevin noise after each step", BF16)
def _(run: Run) -> Any:
    out = []
    for _ in range(4):
        out.append(run.step(1))
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(torch.randn(p.shape).to(run.device, p.dtype), alpha=1e-3)
    return out


@in_each("norms of rows kept", BF16)
def _(run: Run) -> Any:
    out = []
    for _ in range(4):
        out.append(run.step(1))
        with torch.no_grad():
            for layer in run.model.layers:
                layer.weight.div_(layer.weight.norm(dim=1, keepdim=True))
                layer.weight[0] = 0
                layer.weight.data[:, 1] *= 0.5
    return out


@in_each("weights quantized and back for evaluation", ("bf16-true",))
def _(run: Run) -> Any:
    out = []
    for i in range(3):
        run.step(1)
        kept = {n: p.data for n, p in run.model.named_parameters()}
        for p in run.model.parameters():
            p.data = (p.data * 16).round() / 16
        with torch.no_grad():
            out.append(run.loss(i))
        for n, p in run.model.named_parameters():
            p.data = kept[n]
    return out


# ---- gradients -----------------------------------------------------------------------------------


@in_each("gradient noise, centralization, clamping", BF16)
def _(run: Run) -> Any:
    def central(g: Tensor) -> Tensor:
        return g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True) if g.dim() > 1 else g

    handles = [p.register_hook(central) for p in run.model.parameters()]
    out = []
    for i in range(4):
        out.append(run.backward(i))
        for p in run.model.parameters():
            p.grad.data.clamp_(-0.01, 0.01)
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-4)
        run.finish(0.1)
    for handle in handles:
        handle.remove()
    return out


@in_each("micro-batches through autograd.grad", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(3):
        total = [torch.zeros_like(p) for p in run.model.parameters()]
        for j in range(3):
            loss = run.loss(10 * i + j) / 3
            torch._foreach_add_(total, torch.autograd.grad(loss, _params(run)))
            out.append(loss.detach())
        for p, g in zip(run.model.parameters(), total, strict=True):
            p.grad = g
        run.finish(0.1)
    return out


@in_each("accumulation with an evaluation in its middle and a rest", BF16)
def _(run: Run) -> Any:
    out, seen = [], 0
    for i in range(7):
        (run.loss(i) / 3).backward()
        seen += 1
        if i % 3 == 1:
            run.model.eval()
            with torch.no_grad():
                out.append(run.call(run.x(50)))
            with torch.inference_mode():
                out.append(run.call(run.x(51)).clone())
            run.model.train()
        if seen == 3:
            run.finish(0.5)
            seen = 0
    run.finish(0.5)
    return out


@in_each("zeroed gradients stay there", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        run.optimizer.zero_grad(set_to_none=False)
        h = torch.tanh(run.model.layers[i](run.h(i).to(run.w.dtype)))
        h.float().square().mean().backward()
        out.append([p.grad is not None and p.grad.abs().sum() for p in run.model.parameters()])
        run.clip(0.1)
        run.optimizer.step()
    return out


@in_each("gradients gathered by accumulate hooks", BF16)
def _(run: Run) -> Any:
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[[Tensor], None]:
        def see(p: Tensor) -> None:
            seen[name] = p.grad.float().norm()
            p.grad.mul_(0.5)

        return see

    named = run.model.named_parameters()
    handles = [p.register_post_accumulate_grad_hook(watch(n)) for n, p in named]
    out = []
    for i in range(3):
        run.backward(i)
        run.backward(20 + i)
        out.append(dict(sorted(seen.items())))
        run.finish(0.1)
    for handle in handles:
        handle.remove()
    return out


@in_each("GradNorm over a shared layer", BF16)
def _(run: Run) -> Any:
    out, factors = [], torch.ones(2, device=run.device)
    for i in range(3):
        y = run.call(run.x(i)).float()
        losses = [y[:, :4].square().mean(), (y[:, 4:] - 1).square().mean()]
        norms = [
            torch.autograd.grad(part, run.w, retain_graph=True)[0].float().norm() for part in losses
        ]
        factors = factors * (sum(norms) / (2 * torch.stack(norms))).clamp(0.5, 2)
        (factors[0] * losses[0] + factors[1] * losses[1]).backward()
        out.append([norms, factors.clone()])
        run.finish(0.5)
    return out


@in_each("gradient penalty", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(3):
        x = run.x(i).requires_grad_()
        y = run.call(x).float()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.square().mean() + 0.1 * (g.float().norm(dim=1) - 1).square().mean()
        loss.backward()
        out.append(loss.detach())
        run.finish(0.5)
    return out


@in_each("gradients per sample by vmap", ("32-true", "bf16-true"))
def _(run: Run) -> Any:
    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out = torch.func.functional_call(run.model, params, (x.unsqueeze(0),))
        return out.float().square().mean()

    out = []
    for i in range(3):
        params = {n: p.detach() for n, p in run.model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(
            params, run.x(i).to(run.w.dtype)
        )
        norms = torch.stack([g.float().flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        share = (0.1 / norms).clamp(max=1)
        for n, p in run.model.named_parameters():
            p.grad = torch.einsum("b,b...->...", share, grads[n].float()).to(p.dtype)
        out.append(norms)
        run.finish(0.5)
    return out


@in_each("elastic weight consolidation", BF16)
def _(run: Run) -> Any:
    fisher = {n: torch.zeros_like(p) for n, p in run.model.named_parameters()}
    for i in range(3):
        run.backward(i)
        for n, p in run.model.named_parameters():
            fisher[n] += p.grad.detach() ** 2 / 3
        run.optimizer.zero_grad()
    old = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    out = []
    for i in range(3):
        named = run.model.named_parameters()
        apart = sum((fisher[n] * (p - old[n]) ** 2).sum() for n, p in named)
        loss = run.loss(30 + i) + 10 * apart
        loss.backward()
        out.append(loss.detach())
        run.finish(0.5)
    return out


# ---- state, copies, restoring --------------------------------------------------------------------


@in_each("early stopping with the best weights restored", BF16)
def _(run: Run) -> Any:
    best, kept, out = float("inf"), None, []
    for _ in range(5):
        run.step(1, 0.5)
        with torch.no_grad():
            loss = run.loss(99).item()
        out.append(loss)
        if loss < best:
            best, kept = loss, copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(kept)
    return [out, run.step(2)]


@in_each("learning rate finder: all kept in memory and put back", ALL)
def _(run: Run) -> Any:
    run.step(1)
    file = io.BytesIO()
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], file)
    out = []
    for i in range(4):
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-5 * 10**i
        out.append(run.step(1))
    file.seek(0)
    model, optimizer = torch.load(file)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optimizer)
    return [out, run.optimizer.param_groups[0]["lr"], run.step(2)]


@in_each("the optimizer's state alone put back", BF16)
def _(run: Run) -> Any:
    run.step(2)
    kept = copy.deepcopy(run.optimizer.state_dict())
    out = run.step(2)
    run.optimizer.load_state_dict(kept)
    return [out, run.step(2)]


@in_each("the weights alone put back", BF16)
def _(run: Run) -> Any:
    run.step(2)
    kept = {k: v.clone() for k, v in run.model.state_dict().items()}
    out = run.step(2)
    run.model.load_state_dict(kept)
    return [out, run.step(2)]


@in_each("a soup of two checkpoints", BF16)
def _(run: Run) -> Any:
    a = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.step(3)
    b = run.model.state_dict()
    run.model.load_state_dict({k: (a[k] + b[k]) / 2 for k in a})
    return run.step(2)


@in_each("load_state_dict with assign", ("32-true", "bf16-true"))
def _(run: Run) -> Any:
    kept = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.step(1)
    run.model.load_state_dict(kept, assign=True)
    return run.step(1)


@in_each("a teacher by deepcopy midway that follows", BF16)
def _(run: Run) -> Any:
    teacher = copy.deepcopy(run.model).to(run.device).requires_grad_(False)
    out = []
    for i in range(3):
        x = run.x(i)
        with torch.no_grad(), torch.autocast(run.device, enabled="mixed" in run.door.precision):
            want = teacher(x if "mixed" in run.door.precision else x.bfloat16()).float()
        loss = F.mse_loss(run.call(x).float(), want * 0.9)
        loss.backward()
        out.append(loss.detach())
        run.finish(0.5)
        for t, p in zip(teacher.parameters(), run.model.parameters(), strict=True):
            t.data.mul_(0.9).add_(p.data, alpha=0.1)
    return [out, list(teacher.parameters())]


@in_each("AveragedModel", BF16)
def _(run: Run) -> Any:
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain = AveragedModel(run.model)
    out = []
    for _ in range(3):
        out.append(run.step(1, 0.5))
        average.update_parameters(run.model)
        plain.update_parameters(run.model)
    return [out, dict(average.module.state_dict()), dict(plain.module.state_dict())]


@in_each("the whole model saved and loaded", BF16)
def _(run: Run) -> Any:
    run.step(1)
    file = io.BytesIO()
    torch.save(run.model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    run.step(1)
    return {k: v.clone() for k, v in other.state_dict().items()}


@in_each("histograms and arrays for a log", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(3):
        run.backward(i)
        for p in run.model.parameters():
            w, g = p.detach().float().cpu().numpy(), p.grad.float().cpu().numpy()
            out += [np.histogram(w, 5)[0], np.linalg.norm(g), float(w.std())]
            out.append(p.data.float().view(-1).tolist()[:3])
        run.finish(0.5)
    return out


# ---- trouble -------------------------------------------------------------------------------------


@in_each("interrupts in forward, caught", BF16)
def _(run: Run) -> Any:
    out = []
    for i, kind in enumerate((KeyboardInterrupt, ValueError, RuntimeError)):

        def fail(*_: Any, kind: type[BaseException] = kind) -> None:
            raise kind("stop")

        out.append(run.backward(i))
        handle = run.model.layers[3].register_forward_pre_hook(fail)
        try:
            run.backward(10 + i)
        except kind:
            out.append(kind.__name__)
        handle.remove()
        out.append(run.backward(20 + i))
        run.finish(0.5)
    return out


@in_each("an error in backward, caught, and all dropped", BF16)
def _(run: Run) -> Any:
    out = []
    for i in range(3):

        def fail(g: Tensor) -> None:
            raise ValueError("stop")

        h = torch.tanh(run.model.stem(run.x(i).to(run.w.dtype)))
        h = run.model.layers[2](h)
        h.register_hook(fail)
        try:
            run.model.head(torch.tanh(h)).float().sum().backward()
        except ValueError:
            out.append([p.grad is None for p in run.model.parameters()])
        run.optimizer.zero_grad()
        out.append(run.step(1, 0.5))
    return out


@in_each("NaN, then the last good weights", BF16)
def _(run: Run) -> Any:
    run.step(1)
    good = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
    (run.loss(1) * float("nan")).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    out = [bool(torch.isnan(run.w).all())]
    run.model.load_state_dict(good[0])
    run.optimizer.load_state_dict(good[1])
    return [out, run.step(2, 0.5)]


# ---- folds and a second training -----------------------------------------------------------------


def _again(run: Run, model: nn.Module, lr: float) -> None:
    if run.engine is not None and not run.engine.closed:
        run.engine.close()
    run.manage(model, gs.HybridAdam(model.parameters(), lr=lr), precision=run.door.precision)


@in_each("folds: closed and managed again", ALL, trains=False)
def _(run: Run) -> Any:
    out = []
    for fold in range(3):
        torch.manual_seed(fold)
        _again(run, Six(), 1e-2)
        out.append([run.step(2, 0.5), run.call(run.x(fold)).detach()])
    return out


@in_each("a second optimizer after close", ("32-true", "bf16-true"), trains=False)
def _(run: Run) -> Any:
    out = run.step(2, 0.5)
    _again(run, run.model, 1e-4)
    out += run.step(2, 0.5)
    run.model.layers[1] = nn.Linear(32, 32).to(run.w.dtype)
    _again(run, run.model, 1e-3)
    return [out, run.step(2)]


@in_each("loaded into a fresh model midway", ALL, trains=False)
def _(run: Run) -> Any:
    out = run.step(2, 0.5)
    kept = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
    torch.manual_seed(99)
    _again(run, Six(), 0.5)
    run.model.load_state_dict(kept[0])
    run.optimizer.load_state_dict(kept[1])
    return [out, run.step(3, 0.5)]
