"""Programs that use autograd by hand: gradients of gradients, functional calls, Functions, hooks, checkpoints."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from programs import Run, Six, door


def _weights(run: Run) -> list[nn.Parameter]:
    return list(run.model.parameters())


# ---- gradients of gradients ----------------------------------------------------------------------


def _penalised(run: Run, seed: int = 0) -> Tensor:
    x = run.x(seed).requires_grad_()
    (slope,) = torch.autograd.grad(run.model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean() + run.loss(seed)


@door("autograd/gradient penalty", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    losses = []
    for seed in range(6):
        loss = _penalised(run, seed)
        loss.backward()
        run.finish()
        losses.append(loss.detach())
    return losses


@door("autograd/gradient penalty, clipped", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    losses = []
    for seed in range(4):
        loss = _penalised(run, seed)
        loss.backward()
        losses += [loss.detach(), run.finish(clip=0.1)]
    return losses


@door("autograd/penalty on the gradients of the weights", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    grads = torch.autograd.grad(run.loss(), _weights(run), create_graph=True)
    penalty = sum(g.square().sum() for g in grads)
    penalty.backward()
    return [penalty.detach(), [g.detach() for g in grads]]


@door("autograd/Hessian-vector product", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    weights = _weights(run)
    grads = torch.autograd.grad(run.loss(), weights, create_graph=True)
    vector = [torch.ones_like(p) for p in weights]
    return torch.autograd.grad(grads, weights, grad_outputs=vector)


@door("autograd/Hessian-vector product of one layer", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    (grad,) = torch.autograd.grad(run.loss(), run.w, create_graph=True)
    (product,) = torch.autograd.grad((grad * run.randn(32, 32)).sum(), run.w)
    return [grad.detach(), product]


@door("autograd/backward with create_graph", "1", needs_all=True)
def _(run: Run) -> Any:
    run.loss().backward(create_graph=True)
    total = sum(p.grad.square().sum() for p in run.model.parameters())
    values = [p.grad.detach().clone() for p in run.model.parameters()]
    run.model.zero_grad()
    total.backward()
    return [total.detach(), values]


@door("autograd/triple backward", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    x = run.x().requires_grad_()
    (one,) = torch.autograd.grad(run.model(x).sum(), x, create_graph=True)
    (two,) = torch.autograd.grad(one.square().sum(), x, create_graph=True)
    two.square().sum().backward()
    return [one.detach(), two.detach(), x.grad]


@door("autograd/functional.hessian over the input", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    return torch.autograd.functional.hessian(lambda x: run.model(x).square().sum(), run.x()[:1])


@door("autograd/functional.jacobian over the input", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    return torch.autograd.functional.jacobian(run.model, run.x()[:2], create_graph=True).detach()


@door("autograd/functional.jvp", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    return list(torch.autograd.functional.jvp(run.model, run.x(), run.x(5)))


@door("autograd/functional.vjp", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    return list(torch.autograd.functional.vjp(run.model, run.x(), run.randn(5, 8)))


@door("autograd/functional.vhp", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    return list(torch.autograd.functional.vhp(lambda x: run.model(x).sum(), run.x(), run.x(5)))


@door("autograd/functional.hvp", "1", served=True, needs_all=True)
def _(run: Run) -> Any:
    return list(torch.autograd.functional.hvp(lambda x: run.model(x).sum(), run.x(), run.x(5)))


@door("autograd/functional.hessian over a weight", "1", needs_all=True)
def _(run: Run) -> Any:
    x = run.h()[:, :4]

    def loss(w: Tensor) -> Tensor:
        return torch.tanh(x @ w[:4, :2]).sum()

    return torch.autograd.functional.hessian(loss, run.w.detach().clone()).sum()


@door("autograd/functional.jacobian over parameters", "1", needs_all=True)
def _(run: Run) -> Any:
    return list(
        torch.autograd.functional.jacobian(
            lambda w, b: F.linear(run.h()[:1], w, b).sum(), (run.w, run.b)
        )
    )


@door("autograd/MAML's inner step", "1", needs_all=True)
def _(run: Run) -> Any:
    names = [n for n, _ in run.model.named_parameters()]
    grads = torch.autograd.grad(run.loss(1), _weights(run), create_graph=True)
    fast = {n: p - 0.1 * g for n, p, g in zip(names, _weights(run), grads, strict=True)}
    out = torch.func.functional_call(run.model, fast, (run.x(2),))
    loss = out.square().mean()
    loss.backward()
    return loss.detach()


@door("autograd/MAML on one layer by hand", "1", needs_all=True)
def _(run: Run) -> Any:
    loss = run.model.layers[3](run.h()).square().mean()
    (g,) = torch.autograd.grad(loss, run.w, create_graph=True)
    fast = run.w - 0.5 * g
    outer = F.linear(run.h(2), fast, run.b).square().mean()
    outer.backward()
    return outer.detach()


@door("autograd/gradient of a sum of squares by hand", "1")
def _(run: Run) -> Any:
    loss = run.loss() + 0.1 * sum(p.square().sum() for p in (run.w, run.b))
    loss.backward()
    return loss.detach()


@door("autograd/L2 over all parameters", "1", needs_all=True)
def _(run: Run) -> Any:
    loss = run.loss() + 0.1 * sum(p.square().sum() for p in run.model.parameters())
    loss.backward()
    return loss.detach()


# ---- graphs that live on -------------------------------------------------------------------------


@door("graph/retain_graph twice", "17", needs_all=True)
def _(run: Run) -> Any:
    loss = run.loss()
    loss.backward(retain_graph=True)
    first = run.w.grad.clone()
    loss.backward()
    return first


@door("graph/two autograd.grad with retain_graph", "17", served=True, needs_all=True)
def _(run: Run) -> Any:
    loss = run.loss()
    one = torch.autograd.grad(loss, _weights(run), retain_graph=True)
    return [one, torch.autograd.grad(loss, _weights(run))]


class Checkpointed(Six):
    """Six, whose layers are computed again in backward, pair by pair."""

    is_reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.stem(x))
        for i in range(0, 6, 2):
            x = checkpoint(self._pair, x, i, use_reentrant=self.is_reentrant)
        return self.head(self.norm(x))

    def _pair(self, x: Tensor, i: int) -> Tensor:
        return torch.tanh(self.layers[i + 1](torch.tanh(self.layers[i](x))))


class Reentrant(Checkpointed):
    """The same, re-entrant."""

    is_reentrant = True


@door("checkpoint/plain training", "17", model=Checkpointed, served=True)
def _(run: Run) -> Any:
    return run.step(4, clip=1.0)


@door("checkpoint/plain training, reentrant", "17", model=Reentrant, served=True)
def _(run: Run) -> Any:
    return run.step(4)


@door("checkpoint/two autograd.grad with retain_graph", "17", model=Checkpointed, served=True)
def _(run: Run) -> Any:
    loss = run.loss()
    one = torch.autograd.grad(loss, _weights(run), retain_graph=True)
    return [one, torch.autograd.grad(loss, _weights(run))]


@door("checkpoint/gradient penalty", "1", model=Checkpointed, needs_all=True)
def _(run: Run) -> Any:
    loss = _penalised(run)
    loss.backward()
    return loss.detach()


@door("checkpoint/reentrant with a child's weight", "15", served=True)
def _(run: Run) -> Any:
    h = run.h().requires_grad_()
    out = checkpoint(lambda x, w: torch.tanh(x @ w), h, run.w, use_reentrant=True)
    out.square().sum().backward()
    return [out.detach(), h.grad]


@door("checkpoint/not reentrant with a child's weight", "15", served=True)
def _(run: Run) -> Any:
    h = run.h().requires_grad_()
    out = checkpoint(lambda x, w: torch.tanh(x @ w), h, run.w, use_reentrant=False)
    out.square().sum().backward()
    return [out.detach(), h.grad]


class OwnsAndShares(nn.Module):
    """A parent that owns a parameter and uses its child's weight itself, in the way that `use` says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(32) + 0.5)
        self.first = nn.Linear(24, 32)
        self.child = nn.Linear(32, 32)
        self.more = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.head = nn.Linear(32, 8)

    def use(self, h: Tensor) -> Tensor:
        return _SavesWeight.apply(h, self.child.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * self.scale
        h = torch.tanh(self.child(torch.tanh(self.use(h))))
        for layer in self.more:
            h = torch.tanh(layer(h))
        return self.head(h)


class _SavesWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class UsesReentrantCheckpoint(OwnsAndShares):
    """Hands the child's weight to a re-entrant checkpoint."""

    def use(self, h: Tensor) -> Tensor:
        return checkpoint(lambda x, w: x @ w, h, self.child.weight, use_reentrant=True)


class UsesCheckpoint(OwnsAndShares):
    """The same, not re-entrant."""

    def use(self, h: Tensor) -> Tensor:
        return checkpoint(lambda x, w: x @ w, h, self.child.weight, use_reentrant=False)


class UsesData(OwnsAndShares):
    """Reads the child's data without a gradient."""

    def use(self, h: Tensor) -> Tensor:
        return h @ self.child.weight.data + h @ self.child.weight.detach().t()


for _name, _model in {
    "a Function that saves it": OwnsAndShares,
    "a reentrant checkpoint": UsesReentrantCheckpoint,
    "a checkpoint": UsesCheckpoint,
    "its data": UsesData,
}.items():
    door(f"child's weight/{_name}", "15", model=_model, served=True)(lambda run: run.step(4))


# ---- custom Functions ----------------------------------------------------------------------------


class _SavesOnContext(_SavesWeight):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w  # not the way to do it, and done
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g @ ctx.w.t(), ctx.x.t() @ g


class _SavesView(_SavesWeight):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w.t())
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, wt = ctx.saved_tensors
        return g @ wt, x.t() @ g


class _SavesData(_SavesWeight):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.data = w.data
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g @ ctx.data.t(), ctx.saved_tensors[0].t() @ g


class _SetsUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    backward = _SavesWeight.backward


class _OnceDifferentiable(_SavesWeight):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g


class _ReturnsWeight(torch.autograd.Function):
    """Gives its input back as it is."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class _GradIsWeight(torch.autograd.Function):
    """Its gradient is the weight itself."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


FUNCTIONS = {
    "saves": _SavesWeight,
    "saves on the context": _SavesOnContext,
    "saves a view": _SavesView,
    "saves data": _SavesData,
    "setup_context": _SetsUp,
    "once differentiable": _OnceDifferentiable,
}


def _with_function(function: type) -> Any:
    def program(run: Run) -> Any:
        h = run.h().requires_grad_()
        out = function.apply(h, run.w)
        loss = out.square().sum() + run.loss()
        loss.backward()
        return [out.detach(), h.grad]

    return program


for _name, _function in FUNCTIONS.items():
    door(f"Function/{_name}", "15", needs_all=True)(_with_function(_function))


@door("Function/returns the weight", "8")
def _(run: Run) -> Any:
    out = F.linear(run.h(), _ReturnsWeight.apply(run.w))
    out.sum().backward()
    return out.detach()


@door("Function/its gradient is the weight", "8")
def _(run: Run) -> Any:
    _GradIsWeight.apply(run.w).backward()
    return run.w.grad.clone()


@door("Function/kept saved tensors", "8", needs_all=True)
def _(run: Run) -> Any:
    kept: list[Tensor] = []

    class Keeps(_SavesWeight):
        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
            x, w = ctx.saved_tensors
            kept.extend([w.t(), w[3]])
            return g @ w.t(), x.t() @ g

    Keeps.apply(run.h(), run.w).sum().backward()
    run.backward(1)
    return [k.clone() for k in kept]


@door("Function/double backward", "1", needs_all=True)
def _(run: Run) -> Any:
    h = run.h().requires_grad_()
    (g,) = torch.autograd.grad(_SavesWeight.apply(h, run.w).square().sum(), h, create_graph=True)
    g.square().sum().backward()
    return [g.detach(), h.grad]


@door("graph/_saved tensors kept", "8", needs_all=True)
def _(run: Run) -> Any:
    out = run.h().requires_grad_() @ run.w
    kept = out.grad_fn._saved_mat2
    with torch.no_grad():
        run.loss(5)
    return [kept.detach().clone(), kept.detach().sum()]


@door("graph/_saved tensors of a linear in the model", "8", needs_all=True)
def _(run: Run) -> Any:
    kept = []
    layer = run.model.layers[3]
    handle = layer.register_forward_hook(lambda m, a, o: kept.append(o.grad_fn._saved_mat2))
    loss = run.loss()
    handle.remove()
    loss.backward()
    return [k.detach().clone() for k in kept]


@door("graph/saved_tensors_hooks to the host", "8", needs_all=True)
def _(run: Run) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = run.loss()
    loss.backward()
    return loss.detach()


@door("graph/saved_tensors_hooks that clone", "8")
def _(run: Run) -> Any:
    sums = []

    def pack(t: Tensor) -> Tensor:
        sums.append(t.detach().sum())
        return t.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = run.loss() + F.linear(run.h().requires_grad_(), run.w).sum()
    loss.backward()
    return [loss.detach(), sums]


@door("graph/saved_tensors_hooks to numpy", "8")
def _(run: Run) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: t.detach().cpu().numpy().copy(), lambda a: torch.from_numpy(a).to(run.device)
    ):
        loss = run.loss()
    loss.backward()
    return loss.detach()


@door("graph/kept over another pass", needs_all=True)
def _(run: Run) -> Any:
    one, two = run.loss(1), run.loss(2)
    two.backward()
    one.backward()
    return [one.detach(), two.detach()]


@door("graph/kept over a step raises as in torch", needs_all=True)
def _(run: Run) -> Any:
    loss = run.loss(1)
    run.step(1)
    try:
        loss.backward()
    except RuntimeError as error:
        run.model.zero_grad()
        return "modified by an inplace operation" in str(error)
    return "nothing was raised"


@door("graph/write between forward and backward raises as in torch", needs_all=True)
def _(run: Run) -> Any:
    loss = run.loss(1)
    with torch.no_grad():
        run.w.mul_(0.5)
    try:
        loss.backward()
    except RuntimeError as error:
        run.model.zero_grad()
        return "modified by an inplace operation" in str(error)
    return "nothing was raised"


@door("graph/dropped", "17")
def _(run: Run) -> Any:
    for seed in range(3):
        run.loss(seed)  # never backward
    return run.step(2)


# ---- parameters as gradients and the like --------------------------------------------------------


@door("autograd/grad_outputs=p", "8")
def _(run: Run) -> Any:
    y = run.randn(32, 32).requires_grad_()
    return torch.autograd.grad(y * 2, y, grad_outputs=run.w)


@door("autograd/gradient=p", "8")
def _(run: Run) -> Any:
    y = run.randn(32, 32).requires_grad_()
    (y * y).backward(gradient=run.w)
    return y.grad


@door("autograd/gradient=p.data", "8")
def _(run: Run) -> Any:
    y = run.randn(32, 32).requires_grad_()
    (y * y).backward(run.w.data)
    return y.grad


@door("autograd/y.grad = p", "8")
def _(run: Run) -> Any:
    y = run.randn(32, 32).requires_grad_()
    y.grad = run.w.detach()
    return [y.grad.sum(), y.grad.clone()]


@door("autograd/p.grad = p", "19")
def _(run: Run) -> Any:
    run.w.grad = run.w.detach() * 0.5
    return run.w.grad.clone()


@door("autograd/grad of p alone", "1")
def _(run: Run) -> Any:
    return torch.autograd.grad(run.w.pow(3).sum(), run.w)


@door("autograd/grad of p with is_grads_batched", "8")
def _(run: Run) -> Any:
    y = run.w[0] * run.b
    return torch.autograd.grad(
        y, (run.w, run.b), torch.eye(32, device=run.device), is_grads_batched=True
    )


@door("autograd/backward with inputs", "1", served=True)
def _(run: Run) -> Any:
    run.loss().backward(inputs=[run.w, run.b])
    return [p.grad is None for p in run.model.parameters()]


@door("autograd/autograd.backward of several", "1")
def _(run: Run) -> Any:
    torch.autograd.backward([run.loss(0), run.loss(1)], [None, None])
    return run.w.grad.clone()


@door("autograd/detach().requires_grad_()", "9")
def _(run: Run) -> Any:
    q = run.w.detach().requires_grad_()
    F.linear(run.h(), q).sum().backward()
    return [q.grad, q.is_leaf, run.w.grad is None]


@door("autograd/nn.Parameter(p.data)", "9")
def _(run: Run) -> Any:
    run.backward(0)
    q = nn.Parameter(run.w.data)
    first = q.grad is None
    F.linear(run.h(), q).sum().backward()
    return [first, q.grad, run.w.grad.clone()]


@door("autograd/clone().requires_grad_()", "9")
def _(run: Run) -> Any:
    q = run.w.detach().clone().requires_grad_()
    F.linear(run.h(), q).sum().backward()
    return q.grad


@door("autograd/anomaly mode", "1")
def _(run: Run) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        return run.backward()


@door("autograd/gradcheck of a layer", "1", trains=False)
def _(run: Run) -> Any:
    w = run.w.detach().double()[:3, :3]
    x = run.h().double()[:, :3].requires_grad_()
    return torch.autograd.gradcheck(lambda t: t @ w, (x,))


@door("autograd/forward mode", "1", needs_all=True)
def _(run: Run) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(run.h(), run.h(1))
        out = torch.autograd.forward_ad.unpack_dual(F.linear(dual, run.w, run.b))
        return [out.primal.detach(), out.tangent.detach()]


@door("autograd/forward mode of the model", "1", needs_all=True)
def _(run: Run) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(run.x(), run.x(1))
        out = torch.autograd.forward_ad.unpack_dual(run.model(dual))
        return [out.primal.detach(), out.tangent.detach()]


@door("autograd/forward mode over a weight", "1", needs_all=True)
def _(run: Run) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(run.w, run.randn(32, 32))
        out = torch.autograd.forward_ad.unpack_dual(F.linear(run.h(), dual))
        return [out.primal.detach(), out.tangent.detach()]


# ---- torch.func ----------------------------------------------------------------------------------


def _dicts(run: Run) -> dict[str, Tensor]:
    return dict(run.model.named_parameters())


@door("func/functional_call with its own parameters", "8", needs_all=True)
def _(run: Run) -> Any:
    return torch.func.functional_call(run.model, _dicts(run), (run.x(),)).detach()


@door("func/functional_call with clones", "8", needs_all=True)
def _(run: Run) -> Any:
    clones = {n: p.detach().clone().requires_grad_() for n, p in _dicts(run).items()}
    out = torch.func.functional_call(run.model, clones, (run.x(),))
    return torch.autograd.grad(out.sum(), list(clones.values()))


@door("func/functional_call with some scaled", "8", needs_all=True)
def _(run: Run) -> Any:
    out = torch.func.functional_call(run.model, {"layers.3.weight": run.w * 2}, (run.x(),))
    out.sum().backward()
    return out.detach()


@door("func/grad over detached parameters", "8", needs_all=True)
def _(run: Run) -> Any:
    values = {n: p.detach() for n, p in _dicts(run).items()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(run.model, values, (x,)).square().sum()

    return torch.func.grad(loss)(values, run.x())


@door("func/per-sample gradients", "8", needs_all=True)
def _(run: Run) -> Any:
    values = {n: p.detach().clone() for n, p in _dicts(run).items()}

    def loss(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(run.model, values, (x[None],)).square().sum()

    return torch.vmap(torch.func.grad(loss), (None, 0))(values, run.x())


@door("func/grad of a function of one parameter", "8")
def _(run: Run) -> Any:
    return torch.func.grad(lambda w: F.linear(run.h(), w).square().sum())(run.w)


@door("func/grad of detached data", "8")
def _(run: Run) -> Any:
    return torch.func.grad(lambda w: F.linear(run.h(), w).square().sum())(run.w.detach())


@door("func/vjp", "8")
def _(run: Run) -> Any:
    out, back = torch.func.vjp(lambda w: F.linear(run.h(), w), run.w)
    return [out, back(torch.ones_like(out))]


@door("func/jvp", "8")
def _(run: Run) -> Any:
    return list(torch.func.jvp(lambda w: F.linear(run.h(), w), (run.w,), (run.randn(32, 32),)))


@door("func/jacrev", "8")
def _(run: Run) -> Any:
    return torch.func.jacrev(lambda b: F.linear(run.h(), run.w, b).tanh())(run.b).sum(0)


@door("func/jacfwd", "8")
def _(run: Run) -> Any:
    return torch.func.jacfwd(lambda b: (run.w @ b).tanh())(run.b)


@door("func/hessian", "8")
def _(run: Run) -> Any:
    return torch.func.hessian(lambda b: (run.w @ b).square().sum())(run.b)


@door("func/linearize", "8")
def _(run: Run) -> Any:
    h = run.h()
    out, tangent = torch.func.linearize(lambda w: F.linear(h, w), run.w)
    return [out, tangent(run.randn(32, 32))]


@door("func/vmap over the model", "8", needs_all=True)
def _(run: Run) -> Any:
    with torch.no_grad():
        return torch.vmap(run.model)(run.x()[:, None])


@door("func/jacrev of the model", "8", needs_all=True)
def _(run: Run) -> Any:
    return torch.func.jacrev(run.model)(run.x()[:1]).detach()


@door("func/functionalize", "8")
def _(run: Run) -> Any:
    return torch.func.functionalize(lambda w: w.clone().mul_(2).sum())(run.w.detach())


@door("func/stack_module_state", "8", needs_all=True)
def _(run: Run) -> Any:
    stacked, _ = torch.func.stack_module_state(list(run.model.layers))
    return {n: t.detach() for n, t in stacked.items()}


# ---- hooks ---------------------------------------------------------------------------------------


@door("hooks/of AccumulateGrad, apex's idiom", "10", served=True)
def _(run: Run) -> Any:
    seen, kept = [], []
    for name, p in run.model.named_parameters():
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        kept.append(node)

        def note(*_: Any, name: str = name) -> None:
            seen.append(name)

        node.register_hook(note)
    run.backward()
    first = sorted(seen)
    run.finish()
    return [first, run.step(2), len(seen)]


@door("hooks/of AccumulateGrad read the gradient", "10", served=True)
def _(run: Run) -> Any:
    seen = []
    node = run.w.view_as(run.w).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: seen.append(run.w.grad.clone()))
    run.backward()
    return seen


@door("hooks/get_gradient_edge", "10", served=True)
def _(run: Run) -> Any:
    edge = torch.autograd.graph.get_gradient_edge(run.w)
    seen = []
    edge.node.register_hook(lambda *_: seen.append(1))
    loss = run.loss()
    grads = torch.autograd.grad(loss, edge, retain_graph=True)
    loss.backward()
    return [grads, seen]


@door("hooks/multi-grad, all", "10", served=True)
def _(run: Run) -> Any:
    seen = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        [run.w, run.b], lambda grads: seen.append([g.clone() for g in grads]), mode="all"
    )
    run.backward(0)
    run.backward(1)
    handle.remove()
    return seen


@door("hooks/multi-grad, any", "10", served=True)
def _(run: Run) -> Any:
    seen = []
    handle = torch.autograd.graph.register_multi_grad_hook(
        [run.w, run.b], lambda g: seen.append(1), mode="any"
    )
    run.backward(0)
    run.backward(1)
    handle.remove()
    return seen


@door("hooks/tensor hook sees the gradient", "10", served=True)
def _(run: Run) -> Any:
    seen = []
    handle = run.w.register_hook(lambda g: seen.append(g.clone()))
    run.backward()
    handle.remove()
    return seen


@door("hooks/tensor hook changes the gradient", "10", served=True)
def _(run: Run) -> Any:
    handle = run.w.register_hook(lambda g: g * 0.5)
    losses = run.step(2)
    run.backward(5)
    handle.remove()
    return losses


@door("hooks/tensor hook returns p", "8")
def _(run: Run) -> Any:
    handle = run.w.register_hook(lambda g: run.w.detach())
    run.backward()
    handle.remove()
    return run.w.grad.clone()


@door("hooks/tensor hook returns another p", "8")
def _(run: Run) -> Any:
    handle = run.w.register_hook(lambda g: run.param("layers.0.weight").data)
    run.backward()
    handle.remove()
    return run.w.grad.clone()


@door("hooks/tensor pre-hook of a view", "10")
def _(run: Run) -> Any:
    seen = []
    view = run.w.t()
    view.register_hook(lambda g: seen.append(g.clone()))
    (run.h() @ view).sum().backward()
    return seen


@door("hooks/retain_grad of a view", "10")
def _(run: Run) -> Any:
    view = run.w * 1.0
    view.retain_grad()
    (run.h() @ view).sum().backward()
    return view.grad


@door("hooks/post-accumulate reads", "10", served=True)
def _(run: Run) -> Any:
    seen = []
    handles = [
        p.register_post_accumulate_grad_hook(lambda p: seen.append([p.grad.sum(), p.sum()]))
        for p in (run.w, run.b)
    ]
    run.backward()
    for handle in handles:
        handle.remove()
    return sorted(float(v) for pair in seen for v in pair)


@door("hooks/post-accumulate changes and drops", "10")
def _(run: Run) -> Any:
    def halve(p: Tensor) -> None:
        p.grad = p.grad * 0.5

    def drop(p: Tensor) -> None:
        p.grad = None

    handles = [
        run.w.register_post_accumulate_grad_hook(halve),
        run.b.register_post_accumulate_grad_hook(drop),
    ]
    losses = run.step(2)
    for handle in handles:
        handle.remove()
    return losses


@door("hooks/post-accumulate that steps by itself", "10")
def _(run: Run) -> Any:
    """The optimizer in the backward, by hand: p -= lr * grad."""

    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.01)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in run.model.parameters()]
    losses = [run.backward(i) for i in range(3)]
    for handle in handles:
        handle.remove()
    return losses


@door("hooks/of nodes", "10")
def _(run: Run) -> Any:
    seen = []
    loss = run.loss()
    node = loss.grad_fn.next_functions[0][0]
    node.register_hook(lambda i, o: seen.append([g.clone() for g in i if g is not None]))
    node.register_prehook(lambda o: seen.append([g.clone() for g in o]))
    loss.backward()
    return seen


@door("hooks/forward hook that replaces the output", "10")
def _(run: Run) -> Any:
    handle = run.model.layers[3].register_forward_hook(lambda m, a, o: o + F.linear(a[0], m.weight))
    losses = run.step(2)
    handle.remove()
    return losses


@door("hooks/forward hook that returns the weight", "8")
def _(run: Run) -> Any:
    handle = run.model.layers[3].register_forward_hook(lambda m, a, o: o + m.weight[:5])
    losses = run.step(2)
    handle.remove()
    return losses


@door("hooks/output that is the weight", "8", needs_all=True)
def _(run: Run) -> Any:
    kept = []
    handle = run.model.layers[3].register_forward_hook(lambda m, a, o: kept.append(m.weight))
    loss = run.loss() + 0.0
    handle.remove()
    value = kept[0].detach().clone()
    loss.backward()
    return [value, kept[0].detach().clone()]


@door("hooks/state dict hooks", "4")
def _(run: Run) -> Any:
    def scaled(module: Any, state: dict, prefix: str, metadata: Any) -> None:
        state["extra"] = state[prefix + "layers.3.weight"] * 2

    handle = run.model._register_state_dict_hook(scaled)
    state = run.model.state_dict()
    handle.remove()
    return {k: v.clone() for k, v in state.items()}
