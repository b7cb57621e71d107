"""Programs that keep what they got or gave, and go on with it: in torch several names share one memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemini_strategy as gs
from programs import Run, door, left, rows

# ---- what was assigned ---------------------------------------------------------------------------


@door("kept/gradient, then another is assigned", "19")
def _(run: Run) -> Any:
    run.backward()
    kept = run.w.grad
    run.w.grad = kept * 0.5
    return [kept.clone(), run.w.grad.clone()]


@door("kept/assigned gradient is written", "19")
def _(run: Run) -> Any:
    run.backward()
    buffer = torch.ones(32, 32, device=run.device)
    run.w.grad = buffer
    buffer.mul_(0.5)
    first = run.w.grad.clone()
    run.w.grad.add_(1.0)
    run.backward(1)
    return [first, buffer.clone(), run.w.grad.clone()]


@door("kept/gradients in one buffer", "19")
def _(run: Run) -> Any:
    flat = torch.zeros(sum(p.numel() for p in run.model.parameters()), device=run.device)
    run.backward()
    offset = 0
    for p in run.model.parameters():
        part = flat[offset : offset + p.numel()].view_as(p)
        part.copy_(p.grad)
        p.grad = part
        offset += p.numel()
    run.backward(1)
    flat.mul_(0.5)
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.optimizer.step()
    return [norm, flat]


@door("kept/assigned data is written", "19")
def _(run: Run) -> Any:
    values = run.randn(32, 32) * 0.1
    run.w.data = values
    first = run.backward()
    values.mul_(0.5)
    second = run.loss().detach()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return [first, second, values.clone(), run.w.detach().clone()]


@door("kept/assigned data is written and let go", "19")
def _(run: Run) -> Any:
    values = run.randn(32, 32) * 0.1
    run.w.data = values
    values.mul_(0.5)
    del values
    other = run.model.layers[1].weight
    other.data = other.data * 2  # what nobody has any more ends here
    first = run.backward()
    values = run.randn(32, 32) * 0.2
    run.w.data = values
    values.mul_(0.5)
    del values
    run.w.grad = None  # or here
    return [first, run.w.detach().clone(), other.grad.clone()]


@door("kept/data swapped with an average", "19", served=True)
def _(run: Run) -> Any:
    average = copy.deepcopy(run.model).to(run.device)
    run.step(2)
    for p, e in zip(run.model.parameters(), average.parameters(), strict=True):
        p.data, e.data = e.data, p.data
    losses = [run.loss(3).detach()]
    for p, e in zip(run.model.parameters(), average.parameters(), strict=True):
        p.data, e.data = e.data, p.data
    return [losses, run.loss(3).detach(), [e.detach().clone() for e in average.parameters()]]


@door("kept/detach, then data is assigned", "19", served=True)
def _(run: Run) -> Any:
    kept = run.w.detach()
    view = run.w.data[3]
    run.w.data = run.w.data * 2
    return [kept.clone(), view.clone(), run.w.detach().clone()]


@door("kept/data is assigned between forward and backward", "19")
def _(run: Run) -> Any:
    loss = run.loss()
    run.w.data = torch.zeros(32, 32, device=run.device)
    loss.backward()
    return None


@door("kept/vector_to_parameters, then the vector changes", "19", needs_all=True)
def _(run: Run) -> Any:
    vector = nn.utils.parameters_to_vector(run.model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, run.model.parameters())
    vector.mul_(0.9)
    loss = run.loss().detach()
    run.step(2)
    return [loss, vector]


@door("kept/state dict after data is assigned", "19", served=True)
def _(run: Run) -> Any:
    state = run.model.state_dict()
    run.w.data = torch.zeros(32, 32, device=run.device)
    return [state["layers.3.weight"].clone(), run.model.state_dict()["layers.3.weight"].clone()]


@door("kept/backup by a state dict around an average", "19", served=True)
def _(run: Run) -> Any:
    average = {n: p.detach() * 0.5 for n, p in run.model.named_parameters()}
    backup = run.model.state_dict()
    for n, p in run.model.named_parameters():
        p.data = average[n]
    with torch.no_grad():
        shown = run.loss()
    run.model.load_state_dict(backup)
    return [shown, run.step(1), backup]


# ---- NumPy ---------------------------------------------------------------------------------------


@door("kept/array of a state dict", "19")
def _(run: Run) -> Any:
    if run.device != "cpu":
        return None
    array = run.model.state_dict()["layers.3.weight"].numpy()
    first = array.copy()
    run.step(1)
    second = array.copy()
    array *= 0.5
    return [first, second, run.loss().detach(), run.step(1), array]


@door("kept/array of a gradient over an accumulation", "19")
def _(run: Run) -> Any:
    if run.device != "cpu":
        return None
    run.backward()
    array = run.w.grad.numpy()
    array[:3] = 1.0
    run.backward(1)
    second = array.copy()
    array *= 2.0
    norm = run.clip(1.0)
    run.optimizer.step()
    third = array.copy()
    run.optimizer.zero_grad(set_to_none=False)
    fourth = array.copy()
    run.optimizer.zero_grad()
    run.backward(2)
    return [second, norm, third, fourth, array]


@door("kept/array of a moment", "5")
def _(run: Run) -> Any:
    if run.device != "cpu":
        return None
    run.step(1)
    array = run.optimizer.state[run.w]["exp_avg"].numpy()
    array *= 0.5
    run.step(1)
    second = array.copy()
    run.optimizer.state[run.w]["exp_avg"].zero_()
    return [second, array, run.step(1)]


@door("kept/state dict of the optimizer", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    state = run.optimizer.state_dict()
    entry = state["state"][8]
    run.step(1)
    second = {k: v.clone() for k, v in entry.items()}
    entry["exp_avg_sq"].mul_(4.0)
    entry["step"].fill_(100.0)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    losses = run.step(1)
    return [second, losses, loaded["state"][8], {k: v.clone() for k, v in entry.items()}]


@door("kept/dlpack of a gradient", "19")
def _(run: Run) -> Any:
    run.backward()
    other = torch.from_dlpack(run.w.grad)
    other.mul_(0.5)
    return [
        run.w.grad.clone(),
        run.clip(0.1),
        run.optimizer.step(),
    ]


@door("kept/addresses of gradients", "19")
def _(run: Run) -> Any:
    import ctypes

    run.backward()
    if run.device != "cpu":
        return None
    grad = run.w.grad
    numbers = (ctypes.c_float * 1024).from_address(grad.data_ptr())
    numbers[5] = 3.0
    first = grad.clone()
    run.backward(1)
    return [first, numbers[5], run.w.grad.clone()]


# ---- derivatives ---------------------------------------------------------------------------------


@door("kept/gradient penalty", "1", served=True)
def _(run: Run) -> Any:
    losses = []
    for seed in range(2):
        x = run.x(seed).requires_grad_()
        out = run.model(x).square().sum()
        (g,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out + 10 * (g.norm(2, dim=1) - 1).square().mean()
        loss.backward()
        run.finish(1.0)
        losses.append(loss.detach())
    return losses


@door("kept/hessian-vector product of all weights", "1", needs_all=True, served=True)
def _(run: Run) -> Any:
    params = list(run.model.parameters())
    grads = torch.autograd.grad(run.loss(), params, create_graph=True)
    vector = [torch.ones_like(p) for p in params]
    dot = sum((g * v).sum() for g, v in zip(grads, vector, strict=True))
    return [h.clone() for h in torch.autograd.grad(dot, params)]


@door("kept/maml", "8", needs_all=True, served=True)
def _(run: Run) -> Any:
    params = dict(run.model.named_parameters())
    inner = torch.func.functional_call(run.model, params, (run.x(),)).square().mean()
    grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
    fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
    outer = torch.func.functional_call(run.model, fast, (run.x(1),)).square().mean()
    outer.backward()
    run.finish()
    return outer.detach()


@door("kept/first-order maml with a copy", "8", needs_all=True, served=True)
def _(run: Run) -> Any:
    backup = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    grads = torch.autograd.grad(run.loss(), list(run.model.parameters()))
    with torch.no_grad():
        torch._foreach_add_(list(run.model.parameters()), list(grads), alpha=-0.1)
    inner = run.backward(1)
    with torch.no_grad():
        for n, p in run.model.named_parameters():
            p.copy_(backup[n])
    run.finish()
    return inner


@door("kept/reptile by data", "8", served=True)
def _(run: Run) -> Any:
    backup = {n: p.data.clone() for n, p in run.model.named_parameters()}
    run.step(2)
    for n, p in run.model.named_parameters():
        p.data = backup[n] + 0.3 * (p.data - backup[n])
    return run.loss().detach()


@door("kept/ema that shares by assignment", "19", served=True)
def _(run: Run) -> Any:
    shadow = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.step(1)
    for n, p in run.model.named_parameters():
        shadow[n] = 0.9 * shadow[n] + 0.1 * p.data
    backup = {}
    for n, p in run.model.named_parameters():
        backup[n] = p.data
        p.data = shadow[n]
    with torch.no_grad():
        shown = run.loss(5)
    for n, p in run.model.named_parameters():
        p.data = backup[n]
    backup = {}
    return [shown, run.step(1), shadow]


@door("kept/double backward of a layer's weight norm", "1", served=True)
def _(run: Run) -> Any:
    x = run.h().requires_grad_()
    out = run.model.layers[3](x).tanh().sum()
    (g,) = torch.autograd.grad(out, x, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), run.w)
    return [g.detach(), h]


# ---- optimizers ----------------------------------------------------------------------------------


@door("kept/sgd beside, on gradients", "19", served=True)
def _(run: Run) -> Any:
    """Another optimizer on the same parameters."""
    other = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        run.backward(seed)
        other.step()
        other.zero_grad()
    return [run.loss(9).detach(), [other.state[p]["momentum_buffer"].clone() for p in other.state]]


@door("kept/fused adam beside", "19", served=True)
def _(run: Run) -> Any:
    other = torch.optim.AdamW(run.model.layers.parameters(), lr=0.01, fused=True)
    for seed in range(2):
        run.backward(seed)
        other.step()
        run.model.zero_grad()
    return run.loss(9).detach()


@door("kept/lbfgs over two layers", "19", served=True)
def _(run: Run) -> Any:
    other = torch.optim.LBFGS(
        run.model.layers[2:4].parameters(), max_iter=4, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        run.model.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    loss = other.step(closure)
    run.model.zero_grad()
    return loss.detach()


@door("kept/swa with bn and swap", "19", served=True)
def _(run: Run) -> Any:
    from torch.optim import swa_utils

    average = swa_utils.AveragedModel(
        run.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    for _ in range(2):
        run.step(1)
        average.update_parameters(run.model)
    run.model.load_state_dict(average.module.state_dict())
    return [run.loss().detach(), [p.detach().clone() for p in average.parameters()]]


@door("kept/sam", "19", served=True)
def _(run: Run) -> Any:
    """Sharpness-aware minimization: ascend, backward again, descend."""
    run.backward()
    old = {}
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in run.model.parameters()]).norm()
        for p in run.model.parameters():
            old[p] = p.data.clone()
            p.add_(p.grad * 0.05 / (norm + 1e-12))
    run.model.zero_grad()
    second = run.backward()
    with torch.no_grad():
        for p in run.model.parameters():
            p.data = old[p]
    run.finish()
    return [norm, second]


@door("kept/lookahead", "19", served=True)
def _(run: Run) -> Any:
    slow = [p.detach().clone() for p in run.model.parameters()]
    for _ in range(2):
        run.step(2)
        with torch.no_grad():
            for s, p in zip(slow, run.model.parameters(), strict=True):
                s.add_(p.data - s, alpha=0.5)
                p.data.copy_(s)
    return slow


# ---- the rest ------------------------------------------------------------------------------------


class _Returns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        ctx.mark_non_differentiable(x)
        return w, x

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return None, g * w + x


@door("kept/function that returns p", "10", served=True)
def _(run: Run) -> Any:
    out, _ = _Returns.apply(run.randn(32, 32), run.w)
    out.square().sum().backward()
    return [out.detach().clone(), run.w.grad.clone()]


@door("kept/parameters as running statistics", "13", served=True)
def _(run: Run) -> Any:
    F.batch_norm(run.h(), run.b.detach(), run.param("norm.weight").detach(), training=True)
    return [run.b.detach().clone(), run.param("norm.weight").detach().clone()]


@door("kept/inner product by vmap of grad", "8", needs_all=True, served=True)
def _(run: Run) -> Any:
    params = {n: p.detach() for n, p in run.model.named_parameters()}

    def loss(params: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(run.model, params, (x[None],)).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, run.x())
    return {n: g.clone() for n, g in grads.items()}


@door("kept/jvp over weights", "8", needs_all=True, served=True)
def _(run: Run) -> Any:
    w = run.w.detach()
    return list(torch.func.jvp(lambda w: F.linear(run.h(), w).tanh(), (w,), (torch.ones_like(w),)))


@door("kept/nn.Parameter of data, trained aside", "19", served=True)
def _(run: Run) -> Any:
    mine = nn.Parameter(run.w.data)
    other = torch.optim.SGD([mine], lr=0.1)
    (run.h() @ mine).square().sum().backward()
    other.step()
    return [mine.detach().clone(), run.w.detach().clone(), run.loss().detach()]


@door("kept/foreach over weights and gradients", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    params = list(run.model.parameters())
    grads = [p.grad for p in params]
    torch._foreach_mul_(grads, 0.5)
    norms = torch._foreach_norm(grads)
    with torch.no_grad():
        torch._foreach_lerp_(params, [torch.zeros_like(p) for p in params], 0.1)
        torch._foreach_addcdiv_(params, grads, [g.abs() + 1 for g in grads], -0.1)
    return norms


@door("kept/pickle of the optimizer's entry and p.grad", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    run.backward()
    return pickle.loads(pickle.dumps([run.w.grad, dict(run.optimizer.state[run.w])]))


@door("kept/numpy of many gradients", "19")
def _(run: Run) -> Any:
    if run.device != "cpu":
        return None
    run.backward()
    arrays = [p.grad.numpy() for p in run.model.parameters()]
    norm = np.sqrt(sum(float(np.square(a).sum()) for a in arrays))
    for a in arrays:
        a *= min(1.0, 0.1 / norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return [norm, [a.copy() for a in arrays]]


@door("kept/weights by numpy", "19", needs_all=True)
def _(run: Run) -> Any:
    if run.device != "cpu":
        return None
    arrays = {n: p.detach().numpy() for n, p in run.model.named_parameters()}
    for a in arrays.values():
        a *= np.float32(0.5)
    first = run.loss().detach()
    run.step(1)
    return [first, arrays]


@door("kept/moments of 16-bit weights", "2", precision="bf16-mixed", served=True)
def _(run: Run) -> Any:
    run.step(2)
    state = run.optimizer.state_dict()
    copied = copy.deepcopy(state)
    state["state"][8]["exp_avg"].zero_()
    losses = run.step(1)
    run.optimizer.load_state_dict(copied)
    return [losses, run.step(1)]


@door("kept/load of the own state dicts", "5", served=True)
def _(run: Run) -> Any:
    run.step(1)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.model.load_state_dict(run.model.state_dict())
    return run.step(1)


@door("kept/hook that rewrites p.grad", "10", served=True)
def _(run: Run) -> Any:
    def clip(p: Tensor) -> None:
        p.grad = p.grad.clamp(-1e-3, 1e-3)

    handles = [p.register_post_accumulate_grad_hook(clip) for p in run.model.parameters()]
    losses = run.step(2)
    for handle in handles:
        handle.remove()
    return losses


@door("kept/two heads share a slice", "13", served=True)
def _(run: Run) -> Any:
    head = run.w[:8]
    loss = F.linear(run.h(), head).square().mean() + F.linear(run.h(1), run.w[8:]).abs().mean()
    loss.backward()
    return [loss.detach(), run.w.grad.clone()]


@door("kept/legacy storage and sort of calls", "8", served=True)
def _(run: Run) -> Any:
    kept = run.w.detach().clone()
    return [
        torch.FloatTensor(run.b.tolist()),
        run.w.new(3, 4).shape == (3, 4),
        run.w.detach().cpu().storage().tolist()[:4],
        kept.equal(run.w),
    ]


# ---- other ways of the same ----------------------------------------------------------------------


@door("kept/p tied into an unmanaged Linear", "8", served=True)
def _(run: Run) -> Any:
    other = nn.Linear(32, 32).to(run.device)
    other.weight = run.w
    losses = []
    for seed in range(2):
        loss = other(run.h(seed)).square().mean() + run.loss(seed)
        loss.backward()
        run.finish()
        losses.append(loss.detach())
    return losses


@door("kept/functional hvp", "1", needs_all=True, served=True)
def _(run: Run) -> Any:
    h = run.h()

    def f(w: Tensor) -> Tensor:
        return F.linear(h, w).tanh().square().sum()

    w = run.w.detach()
    return [
        torch.autograd.functional.hvp(f, w, torch.ones_like(w))[1],
        torch.autograd.functional.vhp(f, w, torch.ones_like(w))[1],
        torch.autograd.functional.vjp(f, run.w)[1].detach(),
    ]


@door("kept/grad_outputs p", "1", served=True)
def _(run: Run) -> Any:
    y = run.w * 2
    (g,) = torch.autograd.grad(y, run.w, grad_outputs=run.w)
    z = run.w * 3
    torch.autograd.backward([z], [run.w.detach()])
    return [g, run.w.grad.clone()]


@door("kept/accumulate node hook", "10", served=True)
def _(run: Run) -> Any:
    seen = []
    node = run.w.expand_as(run.w).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda gi, go: seen.append(go[0].clone()))
    pre = node.register_prehook(lambda go: (go[0] * 2,))
    run.backward()
    handle.remove()
    pre.remove()
    return [seen, run.w.grad.clone()]


@door("kept/apply init", "9", served=True)
def _(run: Run) -> Any:
    torch.manual_seed(3)

    def init(m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight)
            m.bias.data.fill_(0.1)

    run.model.apply(init)
    return run.step(2)


class Renormed(nn.Module):
    """Its forward writes a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 32, max_norm=0.5)
        self.head = nn.Linear(32, 8)

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.words(index))


@door("kept/array of an embedding with max_norm", "8", model=None, trains=False)
def _(run: Run) -> Any:
    torch.manual_seed(1)
    model = Renormed()
    run.manage(model, gs.HybridAdam(model.parameters(), lr=1e-2))
    array = model.state_dict()["words.weight"].cpu().numpy()
    out = [model(torch.tensor([1, 2, 3], device=run.device)).detach(), array.copy()]
    if run.device == "cpu":
        array[5] = 0.1
    return [*out, model(torch.tensor([5, 6], device=run.device)).detach()]


@door("kept/ensemble of layers", "8", needs_all=True, served=True)
def _(run: Run) -> Any:
    models = [run.model.layers[1], run.model.layers[2]]
    params, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    out = torch.vmap(
        lambda p, b, x: torch.func.functional_call(base, (p, b), (x,)), in_dims=(0, 0, None)
    )(params, buffers, run.h())
    return out.detach()


@door("kept/ema by foreach with dict state", "19", served=True)
def _(run: Run) -> Any:
    ema = {k: v.clone() for k, v in run.model.state_dict().items()}
    for _ in range(2):
        run.step(1)
        torch._foreach_lerp_(list(ema.values()), list(run.model.state_dict().values()), 0.1)
    old = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.model.load_state_dict(ema)
    a = run.loss().detach()
    run.model.load_state_dict(old)
    return [a, ema, run.step(1)]


@door("kept/torch.save of gradients and load to p.grad", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    f = io.BytesIO()
    torch.save({n: p.grad for n, p in run.model.named_parameters()}, f)
    run.model.zero_grad()
    f.seek(0)
    for n, g in torch.load(f).items():
        run.param(n).grad = g
    return [run.clip(0.1), run.optimizer.step()]


@door("kept/inplace leaf views", "8", served=True)
def _(run: Run) -> Any:
    with torch.no_grad():
        for row in run.w[:3]:
            row.div_(row.norm())
        run.w.view(4, -1).t_().add_(0.01)
        run.w.t()[2:4].zero_()
    return run.step(1)


@door("kept/numbers in loops", "8", served=True)
def _(run: Run) -> Any:
    b = run.b
    return [
        [p.abs().max().item() for p in run.model.parameters()],
        max(float(v) for v in b.detach()),
        f"{b[1].item():.4f}",
        b[0].item() == b.tolist()[0],
        [i for i, v in enumerate(b) if v > 0],
    ]


# ---- several tensors on one weight ---------------------------------------------------------------


def _from_inside(run: Run) -> Tensor:
    """The memory of w, as its module has it."""
    kept: list[Tensor] = []
    handle = run.model.layers[3].register_forward_pre_hook(lambda m, _: kept.append(m.weight.data))
    with torch.no_grad():
        run.loss()
    handle.remove()
    return kept[0]


def _both(run: Run) -> None:
    kept = _from_inside(run)
    kept[:16] = 0.125
    with torch.no_grad():
        run.w[8:24] = -0.5


def _undone(run: Run) -> None:
    kept = _from_inside(run)
    was = kept.clone()
    with torch.no_grad():
        run.w.add_(0.5)
        run.w.sum()  # the tensor that was written is gone by now
    kept.copy_(was)


def _undone_after_the_unit(run: Run) -> None:
    kept = _from_inside(run)
    was = kept.clone()
    handle = run.model.layers[3].register_forward_pre_hook(lambda m, _: m.weight.data.add_(0.5))
    with torch.no_grad():
        run.loss()
    handle.remove()
    kept.copy_(was)


def _two_tensors(write: Callable[[Run], None]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        run.step()
        write(run)
        return left(run)

    return program


for _precision in (None, "bf16-true"):
    rows(
        f"kept/two tensors on one weight, {_precision}",
        "19",
        {write.__name__: _two_tensors(write) for write in (_both, _undone, _undone_after_the_unit)},
        precision=_precision,
        needs_all=True,
    )
