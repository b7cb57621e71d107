"""Programs that are whole training loops, as somebody who fine-tunes would write them."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from programs import Run, Six, door


def _grads(run: Run) -> list[Tensor]:
    return [p.grad for p in run.model.parameters() if p.grad is not None]


@door("loop/clip per layer", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        for layer in run.model.layers:
            out.append(nn.utils.clip_grad_norm_(layer.parameters(), 0.01))
        run.finish()
    return out


@door("loop/clip after clip", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        out.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.05))
        out.append(nn.utils.clip_grad_norm_(run.model.parameters(), 0.02))
        out.append(run.w.grad.clone())
        run.finish()
    return out


def _clip_at_once(run: Run, max_norm: float) -> Any:
    """Where more follows before the step: HybridAdam's clip, which is of the step, refuses that."""
    if run.engine:
        return run.clip(max_norm)
    return nn.utils.clip_grad_norm_(run.model.parameters(), max_norm)


@door("loop/engine clip, then value clip", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        out.append(_clip_at_once(run, 0.05))
        nn.utils.clip_grad_value_(run.model.parameters(), 0.002)
        out.append(run.w.grad.clone())
        run.finish()
    return out


@door("loop/engine clip, clip of torch, engine clip", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        out.append(run.clip(0.05))
        out.append(nn.utils.clip_grad_norm_(run.model.layers.parameters(), 0.02))
        out.append(run.clip(0.01))
        run.finish()
    return out


@door("loop/grad read after step of a clip that fired", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        run.backward(i)
        out.append(run.clip(0.02))
        run.optimizer.step()
        out.append([g.clone() for g in _grads(run)])
        run.optimizer.zero_grad()
    return out


@door("loop/accumulation after a clip and a step without zero_grad", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        out.append(run.clip(0.02))
        run.optimizer.step()
        if i % 2:
            run.optimizer.zero_grad()
    return out


@door("loop/a clip between micro-batches", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        out.append(_clip_at_once(run, 0.02))
        out.append(run.backward(10 + i))
        out.append(run.w.grad.clone())
        run.finish()
    return out


@door("loop/get_total_norm and clip_grads_with_norm_", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        run.backward(i)
        norm = nn.utils.get_total_norm(_grads(run))
        nn.utils.clip_grads_with_norm_(run.model.parameters(), 0.05, norm)
        out.append(norm)
        run.finish()
    return out


@door("loop/PCGrad", needs_all=True)
def _(run: Run) -> Any:
    params = list(run.model.parameters())
    for i in range(4):
        out = run.call(run.x(i))
        a = torch.autograd.grad(out[:, :4].square().mean(), params, retain_graph=True)
        b = torch.autograd.grad((out[:, 4:] - 1).square().mean(), params)
        dot = sum((x * y).sum() for x, y in zip(a, b, strict=True))
        square = sum((y * y).sum() for y in b)
        for p, x, y in zip(params, a, b, strict=True):
            p.grad = x + y - (dot / square * y if dot < 0 else 0 * y)
        run.finish(0.5)
    return dot


@door("loop/two losses with retain_graph", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        y = run.call(run.x(i))
        y.square().mean().backward(retain_graph=True)
        first = run.w.grad.clone()
        y.abs().mean().backward()
        out += [first, run.w.grad - first]
        run.finish()
    return out


@door("loop/freeze and unfreeze by step", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(6):
        run.model.layers[i % 6].requires_grad_(False)
        out.append(run.backward(i))
        out.append([p.grad is None for p in run.model.parameters()])
        run.finish(0.1)
        run.model.layers[i % 6].requires_grad_(True)
    return out


@door("loop/SAM with clip and first gradients kept", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        out.append(run.backward(i))
        norm = torch.stack([g.norm() for g in _grads(run)]).norm()
        with torch.no_grad():
            old = [p.clone() for p in run.model.parameters()]
            for p in run.model.parameters():
                p.add_(p.grad * (0.05 / norm))
        run.optimizer.zero_grad()
        out.append(run.backward(i))
        with torch.no_grad():
            for p, o in zip(run.model.parameters(), old, strict=True):
                p.copy_(o)
        run.finish(0.05)
    return out


@door("loop/SAM by e_w in a foreach", needs_all=True)
def _(run: Run) -> Any:
    out = []
    params = list(run.model.parameters())
    for i in range(4):
        run.backward(i)
        e = torch._foreach_mul([p.grad for p in params], 0.05)
        with torch.no_grad():
            torch._foreach_add_(params, e)
        run.model.zero_grad(set_to_none=False)
        out.append(run.backward(i))
        with torch.no_grad():
            torch._foreach_sub_(params, e)
        run.finish(0.05)
    return out


@door("loop/set_to_none=False with a branch unused", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        h = torch.tanh(run.model.stem(run.x(i)))
        if i % 2 == 0:
            h = run.model.layers[3](h)
        run.model.head(h).square().mean().backward()
        run.clip(0.1)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        out.append([None if p.grad is None else p.grad.clone() for p in run.model.parameters()])
    return out


@door("loop/skip at NaN", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(5):
        loss = run.loss(i) * (float("nan") if i == 2 else 1.0)
        loss.backward()
        norm = run.clip(0.1)
        out.append(bool(torch.isfinite(norm)))
        if torch.isfinite(norm):
            run.optimizer.step()
        run.optimizer.zero_grad()
    return out


@door("loop/NaN found by a look at gradients", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(5):
        (run.loss(i) * (float("inf") if i == 2 else 1.0)).backward()
        bad = [n for n, p in run.model.named_parameters() if not p.grad.isfinite().all()]
        out.append(bad)
        for p in run.model.parameters():
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
        run.finish(0.1)
    return out


@door("loop/uneven micro-batches")
def _(run: Run) -> Any:
    out = []
    for i, n in enumerate((3, 1, 2, 4)):
        for j in range(n):
            x = run.randn(1 + 2 * j, 24, seed=10 * i + j)
            loss = run.call(x).square().sum() / (8 * n)
            loss.backward()
            out.append(loss.detach())
        run.finish(0.1)
    return out


@door("loop/warm restarts and OneCycle", setups=("auto", "tight"))
def _(run: Run) -> Any:
    a = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(run.optimizer, 2, 2)
    out = []
    for i in range(5):
        out.append(run.step(1, 0.1))
        a.step(i + 0.5)
        out.append(a.get_last_lr())
    b = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.01, total_steps=5)
    for _ in range(4):
        out.append(run.step())
        b.step()
    return [out, run.optimizer.param_groups[0]["betas"]]


@door("loop/rollback by state dicts in the middle", needs_all=True)
def _(run: Run) -> Any:
    run.step(2)
    kept = copy.deepcopy(run.model.state_dict())
    state = copy.deepcopy(run.optimizer.state_dict())
    out = run.step(2, 0.1)
    run.model.load_state_dict(kept)
    run.optimizer.load_state_dict(state)
    return [out, run.step(2, 0.1)]


@door("loop/rollback through a file, between clip and step", needs_all=True)
def _(run: Run) -> Any:
    file = io.BytesIO()
    torch.save({"m": run.model.state_dict(), "o": run.optimizer.state_dict()}, file)
    out = run.step(2)
    run.backward(5)
    run.clip(0.05)
    file.seek(0)
    kept = torch.load(file)
    run.model.load_state_dict(kept["m"])
    run.optimizer.load_state_dict(kept["o"])
    run.optimizer.step()
    run.optimizer.zero_grad()
    return [out, run.step(2)]


@door("loop/pickle of the optimizer", needs_all=True, whole=True)
def _(run: Run) -> Any:
    run.step(2)
    other = pickle.loads(pickle.dumps(run.optimizer))
    return [p.detach().clone() for g in other.param_groups for p in g["params"]]


@door("loop/a teacher by deepcopy, distillation", needs_all=True, whole=True)
def _(run: Run) -> Any:
    teacher = copy.deepcopy(run.model).to(run.device).eval().requires_grad_(False)
    out = []
    for i in range(4):
        with torch.no_grad():
            want = teacher(run.x(i))
        loss = F.kl_div(run.call(run.x(i)).log_softmax(-1), want.softmax(-1)) + run.loss(i)
        loss.backward()
        out.append(loss.detach())
        run.finish(0.1)
    return out


@door("loop/distillation of two managed models", needs_all=True)
def _(run: Run) -> Any:
    if run.device != "cpu":
        return None
    torch.manual_seed(5)
    teacher = Six()
    other = gs.HybridAdam(teacher.parameters(), lr=1e-2)
    engine = None
    if run.is_managed:
        engine = gs.manage(teacher, other, device_budget=80_000, chunk_size=4096, device="cpu")
    out = []
    for i in range(4):
        a, b = run.model(run.x(i)), teacher(run.x(i))
        loss = (a - b.detach()).square().mean() + (b - a.detach()).abs().mean() + b.square().mean()
        loss.backward()
        out += [loss.detach(), (engine or other).clip_grad_norm_(0.1)]
        run.finish(0.1)
        other.step()
        other.zero_grad()
    out.append({k: v.clone() for k, v in teacher.state_dict().items()})
    if engine is not None:
        engine.close()
    return out


@door("loop/weight noise and its removal around backward", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        noise = [0.01 * torch.randn_like(p) for p in run.model.parameters()]
        with torch.no_grad():
            for p, n in zip(run.model.parameters(), noise, strict=True):
                p.add_(n)
        out.append(run.backward(i))
        with torch.no_grad():
            for p, n in zip(run.model.parameters(), noise, strict=True):
                p.sub_(n)
                p.grad.add_(n, alpha=0.1)
        run.finish(0.1)
    return out


@door("loop/functional_call with perturbed weights", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        moved = {n: p * 1.01 for n, p in run.model.named_parameters()}
        loss = torch.func.functional_call(run.model, moved, (run.x(i),)).square().mean()
        loss.backward()
        out.append(loss.detach())
        run.finish(0.1)
    return out


@door("loop/MAML inner step", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        named = dict(run.model.named_parameters())
        loss = torch.func.functional_call(run.model, named, (run.x(i),)).square().mean()
        grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(named.items(), grads, strict=True)}
        outer = torch.func.functional_call(run.model, fast, (run.x(50 + i),)).square().mean()
        outer.backward()
        out += [loss.detach(), outer.detach()]
        run.finish(0.1)
    return out


class Checkpointed(Six):
    """Six with checkpoints and DropPath."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        if self.reentrant and not x.requires_grad:
            x.requires_grad_()
        for layer in self.layers:
            if torch.rand(()) < 0.3:
                continue
            run = lambda h, layer=layer: F.dropout(torch.tanh(layer(h)), 0.2)  # noqa: E731
            x = x + checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class Reentrant(Checkpointed):
    """With the other kind of checkpoint."""

    reentrant = True


def _droppath(run: Run) -> Any:
    out = []
    for i in range(6):
        torch.manual_seed(i)
        out.append(run.backward(i))
        out.append([p.grad is None for p in run.model.parameters()])
        run.finish(0.1)
    return out


door("loop/DropPath and checkpoints", model=Checkpointed)(_droppath)
door("loop/DropPath and reentrant checkpoints", model=Reentrant)(_droppath)


@door("loop/hooks that change gradients", needs_all=True)
def _(run: Run) -> Any:
    handles = [p.register_hook(lambda g: g.clamp(-1e-3, 1e-3) * 2) for p in run.model.parameters()]
    out = run.step(3, 0.01)
    for h in handles:
        h.remove()
    h = run.model.layers[2].register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    out += run.step(2, 0.01)
    h.remove()
    return [out, run.step(1)]


def _halve(p: Tensor) -> None:
    p.grad.mul_(0.5)


@door("loop/post accumulate hook that scales")
def _(run: Run) -> Any:
    h = run.w.register_post_accumulate_grad_hook(_halve)
    out = run.step(4, 0.01)
    h.remove()
    return [out, run.step(1, 0.01)]


@door("loop/logging of norms and statistics", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        run.backward(i)
        for n, p in run.model.named_parameters():
            g = p.grad
            out.append({n: [p.norm(), g.norm(), g.std(), g.histc(8), g.quantile(0.9), p.std()]})
            out.append([g.flatten().topk(3)[0], F.cosine_similarity(p.flatten(), g.flatten(), 0)])
        out.append(run.finish(0.02))
        out.append({n: p.detach().float().norm().item() for n, p in run.model.named_parameters()})
    return out


@door("loop/update to weight ratios", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        old = {n: p.detach().clone() for n, p in run.model.named_parameters()}
        run.backward(i)
        run.clip(0.02)
        run.optimizer.step()
        for n, p in run.model.named_parameters():
            s = run.optimizer.state[p]
            out += [
                (p.detach() - old[n]).norm() / old[n].norm(),
                s["exp_avg"].norm(),
                p.grad.norm(),
            ]
        run.optimizer.zero_grad()
    return out


@door("loop/parameters_to_vector of gradients and back", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        run.backward(i)
        vector = nn.utils.parameters_to_vector(_grads(run))
        vector = vector * (vector.abs() > vector.abs().median())
        nn.utils.vector_to_parameters(vector, _grads(run))
        out.append([vector.clone(), run.w.grad.clone()])
        run.finish(0.02)
    return out


@door("loop/gradients assigned as slices of a flat buffer", needs_all=True)
def _(run: Run) -> Any:
    params = list(run.model.parameters())
    flat = torch.zeros(sum(p.numel() for p in params), device=run.device)
    out = []
    for i in range(4):
        at = 0
        flat.zero_()
        for p in params:
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()
        out.append(run.backward(i))
        run.clip(0.02)
        run.optimizer.step()
        out.append(flat.clone())
    return out


@door("loop/gradients swapped between clip and step", needs_all=True)
def _(run: Run) -> Any:
    for i in range(4):
        run.backward(i)
        run.clip(0.02)
        a, b = run.model.layers[1].weight, run.model.layers[4].weight
        a.grad, b.grad = b.grad, a.grad
        run.finish()
    return [a.detach().clone(), b.detach().clone()]


@door("loop/gradients kept over two tasks and summed", needs_all=True)
def _(run: Run) -> Any:
    out = []
    for i in range(4):
        run.backward(i)
        run.clip(0.02)
        first = {n: p.grad for n, p in run.model.named_parameters()}
        run.optimizer.zero_grad(set_to_none=True)
        out.append(run.backward(20 + i))
        for n, p in run.model.named_parameters():
            p.grad = p.grad + first[n]
        out.append(run.clip(0.03))
        run.finish()
    return out


@door("loop/param group per depth, clipped by group", model=None, trains=False, needs_all=True)
def _(run: Run) -> Any:
    torch.manual_seed(3)
    model = Six()
    groups = [{"params": model.stem.parameters(), "lr": 1e-4}]
    groups += [{"params": m.parameters(), "lr": 1e-3 * 0.8**i} for i, m in enumerate(model.layers)]
    groups += [
        {"params": [*model.norm.parameters(), *model.head.parameters()], "weight_decay": 0.1}
    ]
    optimizer = gs.HybridAdam(groups, lr=1e-2)
    run.manage(model, optimizer)
    out = []
    for i in range(6):
        run.backward(i)
        out += [nn.utils.clip_grad_norm_(g["params"], 0.02) for g in optimizer.param_groups]
        run.finish()
    return [out, dict(model.state_dict())]


@door("loop/gradual unfreezing by add_param_group", model=None, trains=False, needs_all=True)
def _(run: Run) -> Any:
    torch.manual_seed(3)
    model = Six().requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = gs.HybridAdam(model.head.parameters(), lr=1e-2)
    run.manage(model, optimizer)
    out = run.step(2, 0.1)
    model.layers[5].requires_grad_(True)
    optimizer.add_param_group({"params": list(model.layers[5].parameters()), "lr": 1e-3})
    return [out, run.step(3, 0.1), dict(model.state_dict())]


@door("loop/stochastic weight averaging swapped in for evaluation", needs_all=True)
def _(run: Run) -> Any:
    ema = torch.optim.swa_utils.AveragedModel(
        run.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    out = []
    for _ in range(4):
        out.append(run.step(1, 0.05))
        ema.update_parameters(run.model)
        mine = {k: v.clone() for k, v in run.model.state_dict().items()}
        run.model.load_state_dict(ema.module.state_dict())
        run.model.eval()
        with torch.no_grad():
            out.append(run.call(run.x(9)))
        run.model.load_state_dict(mine)
        run.model.train()
    return out


@door("loop/step closure that clips")
def _(run: Run) -> Any:
    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = run.loss(3)
        loss.backward()
        run.clip(0.05)
        return loss

    return [run.optimizer.step(closure).detach() for _ in range(4)]
