"""Programs that write: parameters in every way, state dicts, gradients, the optimizer's state and its groups."""

from __future__ import annotations

import collections
import copy
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from programs import Run, Six, door, rows

# ---- writes into a parameter outside its unit -----------------------------------------------------


def _now(run: Run) -> Any:
    """What is seen after a write, by reading and by computing."""
    return [run.w.detach().clone(), run.b.data.clone(), run.loss(3).detach()]


def _quietly(body: Callable[[Run], Any]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        with torch.no_grad():
            body(run)
        return _now(run)

    return program


def _openly(body: Callable[[Run], Any]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        body(run)
        return _now(run)

    return program


rows(
    "write",
    "2",
    {
        name: _quietly(body)
        for name, body in {
            "mul_": lambda r: r.w.mul_(0.5),
            "copy_": lambda r: r.w.copy_(r.randn(32, 32)),
            "copy_ of a half": lambda r: r.w.copy_(r.randn(32, 32).half()),
            "copy_ of a row": lambda r: r.w.copy_(r.randn(32)),
            "copy_ of another p": lambda r: r.w.copy_(r.param("layers.1.weight")),
            "add_ of another p": lambda r: r.w.add_(r.param("layers.1.weight"), alpha=0.1),
            "item": lambda r: r.w.__setitem__((0, 0), 3.0),
            "rows": lambda r: r.w.__setitem__(slice(2, 5), r.randn(3, 32)),
            "mask": lambda r: r.w.__setitem__(r.w > 0.1, 0.0),
            "view": lambda r: r.w.view(-1)[5:9].fill_(0.5),
            "t": lambda r: r.w.t().mul_(1.25),
            "row": lambda r: r.w[2].zero_(),
            "diagonal": lambda r: r.w.diagonal().fill_(1.0),
            "flatten": lambda r: r.w.flatten().clamp_(-0.1, 0.1),
            "chunks": lambda r: [t.mul_(0.5) for t in r.w.chunk(4)],
            "index_copy_": lambda r: r.w.index_copy_(
                0, torch.tensor([1, 3], device=r.device), r.randn(2, 32)
            ),
            "index_put_": lambda r: r.w.index_put_(
                (torch.tensor([1, 3], device=r.device),), torch.tensor(2.0, device=r.device)
            ),
            "index_fill_": lambda r: r.w.index_fill_(1, torch.tensor([4], device=r.device), 0.25),
            "scatter_": lambda r: r.w.scatter_(
                1, torch.zeros(32, 1, dtype=torch.int64, device=r.device), 0.5
            ),
            "masked_fill_": lambda r: r.w.masked_fill_(r.w < 0, 0.0),
            "where into": lambda r: r.w.copy_(torch.where(r.w > 0, r.w, torch.zeros_like(r.w))),
            "lerp_": lambda r: r.w.lerp_(r.randn(32, 32), 0.1),
            "addmm_": lambda r: r.w.addmm_(r.w.clone(), r.w.clone(), alpha=0.1),
            "addcmul_": lambda r: r.w.addcmul_(r.randn(32, 32), r.randn(32, 32, seed=1)),
            "fill_diagonal_": lambda r: r.w.fill_diagonal_(0.0),
            "normal_": lambda r: r.w.normal_(0, 0.1),
            "uniform_": lambda r: r.w.uniform_(-0.1, 0.1),
            "exponential_": lambda r: r.b.exponential_(10.0),
            "clamp_": lambda r: r.w.clamp_(min=-0.05),
            "renorm_": lambda r: r.w.renorm_(2, 0, 0.1),
            "torch.renorm": lambda r: r.w.copy_(torch.renorm(r.w, 2, 0, 0.1)),
            "round_ and divide": lambda r: r.w.mul_(16).round_().div_(16),
            "requantize": lambda r: r.w.copy_(
                torch.fake_quantize_per_tensor_affine(r.w, 0.01, 0, -128, 127)
            ),
            "sign_sgd": lambda r: [p.sub_(0.01 * p.sign()) for p in r.model.parameters()],
            "out=p": lambda r: torch.mul(r.w, 0.5, out=r.w),
            "out=p of another": lambda r: torch.mm(r.randn(32, 32), r.randn(32, 32), out=r.w),
            "out= a view": lambda r: torch.add(r.w[0], 1.0, out=r.w[1]),
            "out=data": lambda r: torch.add(r.w.data, 1.0, out=r.w.data),
            "out= in a tuple": lambda r: torch.max(
                r.w, 0, out=(r.b, torch.empty(32, dtype=torch.int64, device=r.device))
            ),
            "torch.clamp_": lambda r: torch.clamp_(r.w, -0.1, 0.1),
            "relu_": lambda r: F.relu(r.w, inplace=True),
            "torch.relu_": lambda r: torch.relu_(r.w),
            "dropout_": lambda r: F.dropout(r.w, 0.5, inplace=True),
            "foreach_mul_": lambda r: torch._foreach_mul_([r.w, r.b], 0.5),
            "foreach_copy_": lambda r: torch._foreach_copy_(
                [r.w, r.b], [r.randn(32, 32), r.randn(32)]
            ),
            "foreach_lerp_": lambda r: torch._foreach_lerp_(
                [r.w, r.b], [r.randn(32, 32), r.randn(32)], 0.25
            ),
            "foreach of data": lambda r: torch._foreach_add_([r.w.data, r.b.data], 0.125),
            "vector_to_parameters": lambda r: nn.utils.vector_to_parameters(
                r.randn(1056), [r.w, r.b]
            ),
            "set_": lambda r: r.w.set_(r.randn(32, 32)),
            "aten.copy_": lambda r: torch.ops.aten.copy_.default(r.w, r.randn(32, 32)),
            "aten.add.out": lambda r: torch.ops.aten.add.out(r.w, r.w, out=r.w),
            "without torch functions": lambda r: _without_functions(r),
            "embedding with max_norm": lambda r: F.embedding(
                torch.tensor([1, 2], device=r.device), r.w, max_norm=0.1
            ),
            "put_": lambda r: r.w.put_(
                torch.tensor([3, 70], device=r.device), torch.tensor([1.0, 2.0], device=r.device)
            ),
            "inplace operators": lambda r: _operators(r),
            "squeeze_ of a view": lambda r: r.w[:1].squeeze().fill_(0.75),
            "map over state": lambda r: [
                v.mul_(0.5) for v in r.model.layers[3].state_dict().values()
            ],
        }.items()
    },
)

rows(
    "write",
    "2",
    {
        name: _openly(body)
        for name, body in {
            "data.mul_": lambda r: r.w.data.mul_(0.5),
            "data item": lambda r: r.w.data.__setitem__(0, 0.125),
            "data.copy_ of a numpy array": lambda r: r.w.data.copy_(
                torch.from_numpy(np.full((32, 32), 0.01, np.float32))
            ),
            "data = new": lambda r: setattr(r.w, "data", r.randn(32, 32)),
            "data = data * c": lambda r: setattr(r.w, "data", r.w.data * 0.5),
            "data = another's": lambda r: setattr(r.w, "data", r.param("layers.1.weight").data),
            "data = its own": lambda r: setattr(r.w, "data", r.w.data),
            "data of a view": lambda r: r.w.data.view(-1)[:64].zero_(),
            "detach().mul_": lambda r: r.w.detach().mul_(0.5),
            "detach_ of a clone": lambda r: r.w.clone().detach_().mul_(0.5),
            "init.normal_": lambda r: nn.init.normal_(r.w, std=0.05),
            "init.orthogonal_": lambda r: nn.init.orthogonal_(r.w),
            "init.trunc_normal_": lambda r: nn.init.trunc_normal_(r.w, std=0.05),
            "init.eye_": lambda r: nn.init.eye_(r.w),
            "init.sparse_": lambda r: nn.init.sparse_(r.w, 0.5),
            "init.constant_ of data": lambda r: nn.init.constant_(r.b.data, 0.5),
            "reset_parameters": lambda r: r.model.layers[3].reset_parameters(),
            "apply(init)": lambda r: r.model.apply(
                lambda m: nn.init.zeros_(m.bias) if isinstance(m, nn.Linear) else None
            ),
            "numpy of detach": lambda r: _numpy_write(r.w.detach()),
            "numpy of data": lambda r: _numpy_write(r.w.data),
            "numpy out=": lambda r: np.clip(
                r.w.detach().numpy(), -0.05, 0.05, out=r.w.detach().numpy()
            ),
            "dlpack": lambda r: torch.from_dlpack(r.w.detach()).mul_(0.5),
            "dlpack to numpy": lambda r: np.from_dlpack(r.w.data).__imul__(0.5),
            "ctypes memset": lambda r: _memset(r),
            "storage.copy_": lambda r: r.w.data.untyped_storage().copy_(
                r.randn(32, 32).untyped_storage()
            ),
            "storage.fill_": lambda r: r.w.data.untyped_storage().fill_(0),
            "load_state_dict": lambda r: r.model.load_state_dict(
                {k: v * 0.5 for k, v in r.model.state_dict().items()}
            ),
            "load_state_dict of a layer": lambda r: r.model.layers[3].load_state_dict(
                {"weight": r.randn(32, 32), "bias": r.randn(32)}
            ),
            "load_state_dict assign": lambda r: r.model.load_state_dict(
                {k: v * 0.5 for k, v in r.model.state_dict().items()}, assign=True
            ),
            "load_state_dict of its own": lambda r: r.model.load_state_dict(r.model.state_dict()),
            "swap_tensors": lambda r: torch.utils.swap_tensors(r.w, nn.Parameter(r.randn(32, 32))),
            "new Parameter in its place": lambda r: setattr(
                r.model.layers[3], "weight", nn.Parameter(r.randn(32, 32))
            ),
            "delete and register": lambda r: _register_again(r),
            "ema into the model": lambda r: _ema_and_back(r),
            "to(dtype) of its own": lambda r: r.model.to(torch.float32),
            "model.float()": lambda r: r.model.float(),
            "model.to(device)": lambda r: r.model.to(r.device),
            "inference_mode": lambda r: _in_inference_mode(r),
            "set_grad_enabled": lambda r: _set_grad_enabled(r),
            "decorated": lambda r: torch.no_grad()(lambda: r.w.add_(1.0))(),
            "share_memory_": lambda r: r.w.data.share_memory_(),
            "resize_ of its size": lambda r: r.w.data.resize_(32, 32),
            "at::init through copy": lambda r: r.w.data.set_(r.randn(32, 32)),
            "chained views": lambda r: (
                r.w.detach().reshape(4, 8, 32)[1].transpose(0, 1)[3:7].mul_(0)
            ),
            "swap rows": lambda r: r.w.data.__setitem__([0, 1], r.w.data[[1, 0]]),
            "t_": lambda r: r.w.detach().t_().mul_(0.5),
            "squeeze_ and as_strided_": lambda r: (
                r.w.detach().squeeze_().as_strided_((32, 32), (32, 1)).mul_(0.5)
            ),
            "x.set_(p)": lambda r: torch.empty(0, device=r.device).set_(r.w.detach()).mul_(0.5),
            "as_strided_": lambda r: r.w.detach().as_strided((32,), (33,)).fill_(1.0),
            "requires_grad_ off and on": lambda r: (
                r.w.requires_grad_(False).mul_(0.5).requires_grad_(True)
            ),
            "requires_grad = off and on": lambda r: _frozen_write(r),
        }.items()
    },
)


def _without_functions(run: Run) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        run.w.mul_(0.5)


def _operators(run: Run) -> None:
    w = run.w
    w += 1.0
    w *= 0.5
    w /= 3.0
    w -= run.b


def _numpy_write(tensor: Tensor) -> None:
    array = tensor.numpy() if tensor.device.type == "cpu" else None
    if array is None:
        tensor[0, 0] = 2.0
    else:
        array[0, 0] = 2.0


def _memset(run: Run) -> None:
    kept = run.w.detach()
    ctypes.memset(kept.data_ptr(), 0, 64)


def _register_again(run: Run) -> None:
    layer = run.model.layers[3]
    weight = layer.weight
    del layer.weight
    layer.register_parameter("weight", weight)


def _ema_and_back(run: Run) -> None:
    kept = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    for p in run.model.parameters():
        p.data.mul_(0.9)
    with torch.no_grad():
        run.loss(5)
        for n, p in run.model.named_parameters():
            p.data = kept[n].clone()


def _in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        run.w.mul_(0.5)


def _set_grad_enabled(run: Run) -> None:
    with torch.set_grad_enabled(False):
        run.w.mul_(0.5)


def _frozen_write(run: Run) -> None:
    run.w.requires_grad = False
    run.w.mul_(0.5)
    run.w.requires_grad = True


@door("write/with grad raises as in torch", "2")
def _(run: Run) -> Any:
    try:
        run.w.mul_(0.5)
    except RuntimeError as error:
        return "leaf Variable that requires grad" in str(error)
    return "nothing was raised"


@door("write/version counts", "2")
def _(run: Run) -> Any:
    before = run.w._version
    with torch.no_grad():
        run.w.mul_(0.5)
        run.w.add_(1.0)
    middle = run.w._version
    run.w.data.mul_(0.5)
    return [middle - before, run.w._version - before]


# ---- writes inside a unit ------------------------------------------------------------------------


def _inside(write: Callable[[nn.Module], Any]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        layer = run.model.layers[3]

        def hook(module: nn.Module, args: Any) -> None:  # what it returned would be the input
            write(module)

        handle = layer.register_forward_pre_hook(hook)
        losses = []
        for seed in range(3):
            with torch.no_grad():
                losses.append(run.loss(seed))
        handle.remove()
        return [losses, layer.weight.detach().clone(), run.step(2)]

    return program


def _clip_numpy(m: nn.Module) -> None:
    w = m.weight.detach().numpy()
    np.clip(w, -0.05, 0.05, out=w)


rows(
    "write inside",
    "2",
    {
        name: _inside(write)
        for name, write in {
            "np.clip out=": _clip_numpy,
            "numpy of data": lambda m: m.weight.data.numpy().__imul__(0.9),
            "mul_": lambda m: m.weight.mul_(0.9),
            "data.mul_": lambda m: m.weight.data.mul_(0.9),
            "data = new": lambda m: setattr(m.weight, "data", m.weight.data * 0.9),
            "dlpack": lambda m: torch.from_dlpack(m.weight.detach()).mul_(0.9),
            "memset": lambda m: ctypes.memset(m.weight.data_ptr(), 0, 64),
            "foreach": lambda m: torch._foreach_mul_([m.weight, m.bias], 0.9),
            "view": lambda m: m.weight.view(-1)[:9].zero_(),
            "copy_": lambda m: m.weight.copy_(m.weight.flip(0)),
            "renorm": lambda m: m.weight.data.renorm_(2, 0, 0.2),
        }.items()
    },
)


@door("write inside/spectral normalisation by hand", "2")
def _(run: Run) -> Any:
    def normalise(m: nn.Module, args: Any) -> None:
        with torch.no_grad():
            m.weight.div_(torch.linalg.matrix_norm(m.weight, 2))

    handles = [m.register_forward_pre_hook(normalise) for m in run.model.layers]
    losses = run.step(3)
    for handle in handles:
        handle.remove()
    return losses


@door("write inside/after a forward", "2")
def _(run: Run) -> Any:
    def clamp(m: nn.Module, args: Any, out: Any) -> None:
        m.bias.data.clamp_(-0.05, 0.05)

    handle = run.model.layers[3].register_forward_hook(clamp)
    losses = run.step(3)
    handle.remove()
    return losses


@door("write inside/full_parameters", "2", needs_all=True)
def _(run: Run) -> Any:
    if run.engine is not None:
        with run.engine.full_parameters(run.model.layers[3]):
            run.w.data.mul_(0.5)
            (run.b.detach().numpy() if run.device == "cpu" else run.b.detach())[:] = 0.25
    else:
        run.w.data.mul_(0.5)
        (run.b.detach().numpy() if run.device == "cpu" else run.b.detach())[:] = 0.25
    return _now(run)


@door("write inside/full_parameter", "2", served=True)
def _(run: Run) -> Any:
    if run.engine is not None:
        with run.engine.full_parameter(run.w) as values:
            values.mul_(0.5)
    else:
        run.w.data.mul_(0.5)
    return _now(run)


# ---- kept, then written --------------------------------------------------------------------------

KEPT: dict[str, Callable[[Run], Any]] = {
    "data": lambda r: r.w.data,
    "detach": lambda r: r.w.detach(),
    "view": lambda r: r.w.detach().view(-1)[:500],
    "state dict": lambda r: r.model.state_dict()["layers.3.weight"],
    "state dict of a layer": lambda r: r.model.layers[3].state_dict()["weight"],
    "state dict with variables": lambda r: (
        r.model.state_dict(keep_vars=True)["layers.3.weight"].data
    ),
    "own module around it": lambda r: nn.Parameter(r.w.data, requires_grad=False),
}


def _write_kept(take: Callable[[Run], Tensor]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        kept = take(run)
        with torch.no_grad():
            run.loss(2)
            kept.mul_(0.5)
        return [_now(run), kept.cpu().sum()]

    return program


def _write_kept_after_step(take: Callable[[Run], Tensor]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        kept = take(run)
        run.step(2)
        with torch.no_grad():
            kept.mul_(0.5)
        return _now(run)

    return program


for _name, _take in KEPT.items():
    door(f"write kept/{_name}", "4", needs_all=True)(_write_kept(_take))
    door(f"write kept/{_name} after steps", "4", needs_all=True)(_write_kept_after_step(_take))


@door("state dict/own[k].copy_(v)", "4")
def _(run: Run) -> Any:
    own = run.model.state_dict()
    for k in own:
        own[k].copy_(own[k] * 0.5)
    return _now(run)


@door("state dict/partial loading by hand", "4")
def _(run: Run) -> Any:
    own = run.model.state_dict()
    for name, value in {"layers.3.weight": run.randn(32, 32), "not there": None}.items():
        if name in own:
            own[name].copy_(value)
    own["layers.3.bias"][:4] = 1.0
    return _now(run)


@door("state dict/replacing an entry writes nothing", "4", served=True)
def _(run: Run) -> Any:
    own = run.model.state_dict()
    own["layers.3.weight"] = run.randn(32, 32)
    own["layers.3.bias"] = own["layers.3.bias"] * 2
    return _now(run)


@door("state dict/averaged over time", "4")
def _(run: Run) -> Any:
    average = {k: v.clone() for k, v in run.model.state_dict().items()}
    for n in range(2, 4):
        run.step(1)
        for k, v in run.model.state_dict().items():
            average[k] += (v - average[k]) * (1 / n)  # a division is not the same on all devices
    run.model.load_state_dict(average)
    return [average, _now(run)]


# ---- gradients -----------------------------------------------------------------------------------


def _of_grad(write: Callable[[Run], Any]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        run.backward()
        with torch.no_grad():
            write(run)
        grads = [p.grad.clone() if p.grad is not None else None for p in run.model.parameters()]
        run.optimizer.step()
        run.optimizer.zero_grad()
        return [grads, run.step(1)]

    return program


rows(
    "grad write",
    "19",
    {
        name: _of_grad(write)
        for name, write in {
            "item": lambda r: r.w.grad.__setitem__(0, 0),
            "mul_": lambda r: r.w.grad.mul_(0.5),
            "zero_": lambda r: r.w.grad.zero_(),
            "data": lambda r: r.w.grad.data.mul_(0.5),
            "data item": lambda r: r.w.grad.data.__setitem__(slice(0, 3), 1.0),
            "view": lambda r: r.w.grad.view(-1)[3:9].fill_(1.0),
            "detach": lambda r: r.w.grad.detach().mul_(0.5),
            "assign": lambda r: setattr(r.w, "grad", r.w.grad * 0.5),
            "assign clone": lambda r: setattr(r.w, "grad", r.randn(32, 32)),
            "None": lambda r: setattr(r.w, "grad", None),
            "operator": lambda r: _grad_operator(r),
            "nan_to_num_": lambda r: torch.nan_to_num_(r.w.grad),
            "copy_": lambda r: r.w.grad.copy_(r.randn(32, 32)),
            "add_ of p": lambda r: r.w.grad.add_(r.w, alpha=0.1),
            "foreach": lambda r: torch._foreach_mul_([p.grad for p in r.model.parameters()], 0.5),
            "clip_grad_norm_": lambda r: nn.utils.clip_grad_norm_(r.model.parameters(), 0.01),
            "clip_grad_norm_, not foreach": lambda r: nn.utils.clip_grad_norm_(
                r.model.parameters(), 0.01, foreach=False
            ),
            "clip_grad_norm_ of one": lambda r: nn.utils.clip_grad_norm_(
                [r.w], 0.001, norm_type=float("inf")
            ),
            "clip_grad_value_": lambda r: nn.utils.clip_grad_value_(r.model.parameters(), 1e-3),
            "clip_grads_with_norm_": lambda r: nn.utils.clip_grads_with_norm_(
                r.model.parameters(), 0.01, torch.tensor(1.0, device=r.device)
            ),
            "noise": lambda r: [
                p.grad.add_(r.randn(*p.shape), alpha=0.01) for p in r.model.parameters()
            ],
            "centralised": lambda r: [
                p.grad.sub_(p.grad.mean(1, keepdim=True))
                for p in r.model.parameters()
                if p.dim() > 1
            ],
            "out=": lambda r: torch.mul(r.w.grad, 0.5, out=r.w.grad),
            "kept, then written": lambda r: _kept_grad(r),
        }.items()
    },
    served=True,
)


def _numpy_write_of_grad(run: Run) -> None:
    """Its array is read-only: NumPy refuses."""
    run.w.grad.cpu().numpy().__imul__(0.5)


rows("grad write", "19", {"numpy": _of_grad(_numpy_write_of_grad)})


def _grad_operator(run: Run) -> None:
    run.w.grad *= 0.5
    run.w.grad += 1e-3


def _kept_grad(run: Run) -> None:
    kept = run.w.grad
    run.b.grad.norm()
    kept.mul_(0.5)


@door("grad write/projected between two tasks", "19", served=True)
def _(run: Run) -> Any:
    run.backward(0)
    first = {n: p.grad.clone() for n, p in run.model.named_parameters()}
    run.optimizer.zero_grad()
    run.backward(1)
    for n, p in run.model.named_parameters():
        dot = (p.grad * first[n]).sum()
        if dot < 0:
            p.grad -= dot / first[n].square().sum() * first[n]
    run.optimizer.step()
    run.optimizer.zero_grad()
    return dict(run.model.state_dict())


@door("grad write/zero_grad of a layer and set_to_none", "19", served=True)
def _(run: Run) -> Any:
    run.backward()
    run.model.layers[3].zero_grad()
    run.model.layers[1].zero_grad(set_to_none=False)
    run.w.grad = None
    seen = [None if p.grad is None else p.grad.clone() for p in run.model.parameters()]
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=False)
    return [seen, [p.grad.sum() for p in run.model.parameters() if p.grad is not None]]


@door("grad write/gradients by hand, without backward", "19", served=True)
def _(run: Run) -> Any:
    for i, p in enumerate(run.model.parameters()):
        p.grad = run.randn(*p.shape, seed=i)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return dict(run.model.state_dict())


@door("grad write/evolution strategy", "2", served=True)
def _(run: Run) -> Any:
    scores = []
    for seed in range(3):
        for sign in (1.0, -2.0, 1.0):
            with torch.no_grad():
                for i, p in enumerate(run.model.parameters()):
                    p.add_(run.randn(*p.shape, seed=100 * seed + i), alpha=sign * 0.01)
                scores.append(run.loss(seed))
    return scores


# ---- the optimizer -------------------------------------------------------------------------------


def _after_steps(body: Callable[[Run], Any]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        run.step(2)
        value = body(run)
        return [value, run.step(2)]

    return program


rows(
    "optimizer",
    "5",
    {
        name: _after_steps(body)
        for name, body in {
            "state.clear()": lambda r: r.optimizer.state.clear(),
            "state = defaultdict(dict)": lambda r: setattr(
                r.optimizer, "state", collections.defaultdict(dict)
            ),
            "state.pop(p)": lambda r: r.optimizer.state.pop(r.w) and None,
            "del state[p]": lambda r: r.optimizer.state.__delitem__(r.w),
            "state[p] = {}": lambda r: r.optimizer.state.__setitem__(r.w, {}),
            "exp_avg.zero_()": lambda r: r.optimizer.state[r.w]["exp_avg"].zero_().sum(),
            "exp_avg_sq.mul_()": lambda r: r.optimizer.state[r.w]["exp_avg_sq"].mul_(4.0).sum(),
            "exp_avg item": lambda r: r.optimizer.state[r.w]["exp_avg"].__setitem__(0, 0.5),
            "exp_avg = new": lambda r: r.optimizer.state[r.w].__setitem__(
                "exp_avg", r.randn(32, 32)
            ),
            "step": lambda r: r.optimizer.state[r.w]["step"].fill_(1.0),
            "step = 1": lambda r: r.optimizer.state[r.w].__setitem__("step", torch.tensor(1.0)),
            "keys": lambda r: sorted(r.optimizer.state[r.w]),
            "in": lambda r: [
                r.w in r.optimizer.state,
                len(r.optimizer.state),
                bool(r.optimizer.state),
            ],
            "items": lambda r: [s["exp_avg"].sum() for s in r.optimizer.state.values()],
            "get": lambda r: r.optimizer.state.get(r.w, {}).get("exp_avg").sum(),
            "kept over a step": lambda r: _kept_moment(r),
            "zero all moments": lambda r: [
                s["exp_avg"].zero_().sum() for s in r.optimizer.state.values()
            ],
            "numpy of moments": lambda r: [
                s["exp_avg"].cpu().numpy().sum() for s in r.optimizer.state.values()
            ],
            "state_dict": lambda r: {
                str(k): {n: t.clone() for n, t in s.items()}
                for k, s in r.optimizer.state_dict()["state"].items()
            },
            "load its state_dict": lambda r: r.optimizer.load_state_dict(r.optimizer.state_dict()),
            "load an edited state_dict": lambda r: _edited_state(r),
            "load an empty state": lambda r: r.optimizer.load_state_dict(
                {"state": {}, "param_groups": r.optimizer.state_dict()["param_groups"]}
            ),
            "state_dict written": lambda r: _write_state_dict(r),
            "lr": lambda r: r.optimizer.param_groups[0].__setitem__("lr", 0.1),
            "betas and decay": lambda r: r.optimizer.param_groups[0].update(
                betas=(0.5, 0.9), weight_decay=0.5
            ),
            "lr as a tensor": lambda r: r.optimizer.param_groups[0].__setitem__(
                "lr", torch.tensor(0.05)
            ),
            "scheduler": lambda r: _scheduled(r),
            "freeze": lambda r: r.w.requires_grad_(False).requires_grad,
            "without zero_grad": lambda r: _no_zero_grad(r),
            "step twice": lambda r: _step_twice(r),
            "step without gradients": lambda r: r.optimizer.step(),
            "closure": lambda r: r.optimizer.step(lambda: r.backward(5)),
            "hooks of steps": lambda r: _step_hooks(r),
            "update_bn": lambda r: update_bn([r.x(i) for i in range(3)], r.model),
        }.items()
    },
)


def _kept_moment(run: Run) -> Any:
    kept = run.optimizer.state[run.w]["exp_avg"]
    first = kept.clone()
    run.step(1)
    return [first, kept.clone()]


def _edited_state(run: Run) -> None:
    state = copy.deepcopy(run.optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"] * 0.5
    state["param_groups"][0]["lr"] = 0.01
    run.optimizer.load_state_dict(state)


def _write_state_dict(run: Run) -> Any:
    for entry in run.optimizer.state_dict()["state"].values():
        entry["exp_avg"].zero_()


def _scheduled(run: Run) -> Any:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=9)
    seen = []
    for _ in range(3):
        seen += [run.step(1), scheduler.get_last_lr()]
        scheduler.step()
    return seen


def _no_zero_grad(run: Run) -> Any:
    run.backward(1)
    run.optimizer.step()
    run.backward(2)
    run.optimizer.step()
    return [p.grad.clone() for p in run.model.parameters()]


def _step_twice(run: Run) -> Any:
    run.backward(1)
    run.optimizer.step()
    run.optimizer.step()
    run.optimizer.zero_grad()


def _step_hooks(run: Run) -> Any:
    seen = []
    handles = [
        run.optimizer.register_step_pre_hook(lambda o, a, k: seen.append(run.w.grad.sum())),
        run.optimizer.register_step_post_hook(lambda o, a, k: seen.append(run.w.sum())),
    ]
    run.step(1)
    for handle in handles:
        handle.remove()
    return seen


@door("optimizer/a parameter removed from its group", "9", served=True)
def _(run: Run) -> Any:
    group = run.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not run.w]
    run.backward()
    norm = run.finish(clip=0.1)
    return [norm, run.w.detach().clone(), run.step(2)]


@door("optimizer/parameters removed in place", "9", served=True)
def _(run: Run) -> Any:
    del run.optimizer.param_groups[0]["params"][2:8]
    norms = []
    for seed in range(3):
        run.backward(seed)
        norms.append(run.finish(clip=0.1))
    return norms


@door("optimizer/a parameter of its own group later", "9")
def _(run: Run) -> Any:
    group = run.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not run.w]
    run.optimizer.add_param_group({"params": [run.w], "lr": 0.1})
    return run.step(2)


@door("optimizer/a parameter that is not managed", "9", whole=True)
def _(run: Run) -> Any:
    extra = nn.Parameter(run.randn(32, 32))
    run.optimizer.add_param_group({"params": [extra]})
    loss = run.loss() + extra.square().sum()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return extra.detach()


TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=False),
    "AdamW, fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "AdamW, foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "Adam, fused": lambda ps: torch.optim.Adam(ps, lr=1e-2, fused=True),
    "Adam, amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True, foreach=False),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "SGD, fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "SGD, foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True),
    "Adagrad, fused": lambda ps: torch.optim.Adagrad(ps, lr=0.1, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.dim() == 2], lr=1e-2),
    "Rprop": lambda ps: torch.optim.Rprop(ps, lr=1e-3),
    "HybridAdam": lambda ps: __import__("gemini_strategy").HybridAdam(ps, lr=1e-2),
}


def _own_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Run], Any]:
    """An optimizer that manage() was not told of, over a managed model."""

    def program(run: Run) -> Any:
        optimizer = make(list(run.model.parameters()))
        losses = []
        for seed in range(4):
            losses.append(run.backward(seed))
            optimizer.step()
            optimizer.zero_grad()
        return [losses, dict(run.model.state_dict()), optimizer.state_dict()["state"]]

    return program


for _name, _make in TORCHS.items():
    door(f"own optimizer/{_name}", "2", optimizer="none", needs_all=True)(_own_optimizer(_make))


@door("own optimizer/one layer fused beside the managed one", "2")
def _(run: Run) -> Any:
    head = list(run.model.layers[3].parameters())
    own = torch.optim.AdamW(head, lr=1e-2, fused=True)
    run.backward()
    own.step()
    return run.w.detach().clone()


@door("own optimizer/LBFGS", "2", optimizer="none", needs_all=True)
def _(run: Run) -> Any:
    optimizer = torch.optim.LBFGS(run.model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


@door("own optimizer/by hand", "2", optimizer="none")
def _(run: Run) -> Any:
    losses = []
    for seed in range(4):
        losses.append(run.backward(seed))
        with torch.no_grad():
            for p in run.model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return losses


@door("own optimizer/by hand through data", "2", optimizer="none")
def _(run: Run) -> Any:
    losses = []
    for seed in range(4):
        losses.append(run.backward(seed))
        for p in run.model.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
            p.grad.data.zero_()
    return losses


# ---- averages ------------------------------------------------------------------------------------


def _ema(update: Callable[[Any, Any], None]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        shadow = [p.detach().clone() for p in run.model.parameters()]
        for _ in range(3):
            run.step(1)
            with torch.no_grad():
                update(shadow, list(run.model.parameters()))
        return shadow

    return program


def _ema_numpy(shadow: Any, params: Any) -> None:
    for s, p in zip(shadow, params, strict=True):
        s.copy_(torch.from_numpy(0.9 * s.cpu().numpy() + 0.1 * p.detach().cpu().numpy()))


@torch.jit.script
def _scripted_ema(s: Tensor, p: Tensor) -> None:
    s.mul_(0.9).add_(p, alpha=0.1)


rows(
    "ema",
    "3",
    {
        name: _ema(update)
        for name, update in {
            "lerp_": lambda s, ps: [a.lerp_(p, 0.1) for a, p in zip(s, ps, strict=True)],
            "data": lambda s, ps: [
                a.mul_(0.9).add_(p.data, alpha=0.1) for a, p in zip(s, ps, strict=True)
            ],
            "foreach": lambda s, ps: torch._foreach_lerp_(s, ps, 0.1),
            "foreach of detached": lambda s, ps: torch._foreach_lerp_(
                s, [p.detach() for p in ps], 0.1
            ),
            "numpy": _ema_numpy,
            "scripted": lambda s, ps: [_scripted_ema(a, p) for a, p in zip(s, ps, strict=True)],
            "scripted, of data": lambda s, ps: [
                _scripted_ema(a, p.data) for a, p in zip(s, ps, strict=True)
            ],
            "add_ with alpha": lambda s, ps: [
                a.add_(p - a, alpha=0.1) for a, p in zip(s, ps, strict=True)
            ],
            "copy_": lambda s, ps: [a.copy_(0.9 * a + 0.1 * p) for a, p in zip(s, ps, strict=True)],
        }.items()
    },
    needs_all=True,
)


@door("ema/AveragedModel", "8", needs_all=True)
def _(run: Run) -> Any:
    averaged = AveragedModel(run.model).to(run.device)
    for _ in range(3):
        run.step(1)
        averaged.update_parameters(run.model)
    return [dict(averaged.module.state_dict()), averaged(run.x()).detach()]


@door("ema/AveragedModel with a multi_avg_fn", "8", needs_all=True)
def _(run: Run) -> Any:
    averaged = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        run.step(1)
        averaged.update_parameters(run.model)
    return dict(averaged.module.state_dict())


@door("ema/SWALR", "8", needs_all=True)
def _(run: Run) -> Any:
    averaged = AveragedModel(Six().to(run.device))
    scheduler = SWALR(run.optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in range(3):
        run.step(1)
        averaged.update_parameters(run.model)
        scheduler.step()
    run.model.load_state_dict(averaged.module.state_dict())
    return run.step(2)


@door("ema/a target network", "8", needs_all=True)
def _(run: Run) -> Any:
    target = Six().to(run.device).requires_grad_(False)
    target.load_state_dict(run.model.state_dict())
    losses = []
    for seed in range(3):
        loss = F.mse_loss(run.model(run.x(seed)), target(run.x(seed + 1)))
        loss.backward()
        run.finish()
        losses.append(loss.detach())
        for t, p in zip(target.parameters(), run.model.parameters(), strict=True):
            t.data.mul_(0.5).add_(0.5 * p.data)
    return [losses, dict(target.state_dict())]


@door("ema/lookahead", "8", needs_all=True)
def _(run: Run) -> Any:
    slow = [p.data.clone() for p in run.model.parameters()]
    for _ in range(2):
        run.step(2)
        for s, p in zip(slow, run.model.parameters(), strict=True):
            s.add_(p.data - s, alpha=0.5)
            p.data.copy_(s)
    return slow


@door("ema/SAM", "2", needs_all=True)
def _(run: Run) -> Any:
    losses = []
    for seed in range(3):
        run.backward(seed)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in run.model.parameters()]).norm()
            moves = [p.grad * (0.05 / norm) for p in run.model.parameters()]
            torch._foreach_add_(list(run.model.parameters()), moves)
        run.optimizer.zero_grad()
        losses.append(run.backward(seed))
        with torch.no_grad():
            torch._foreach_sub_(list(run.model.parameters()), moves)
        run.finish()
    return losses
