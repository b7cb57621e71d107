"""Programs that read: a parameter, its gradient, what a state dict and an optimizer show, in every way there is."""

from __future__ import annotations

import copy
import ctypes
import io
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch import tensor as tensor_by_name  # before the first manage()

from programs import Run, door, rows

# ---- operations on a parameter outside its unit ---------------------------------------------------

rows(
    "read",
    "14",
    {
        "torch.norm": lambda r: torch.norm(r.w),
        "torch.norm of a dim": lambda r: torch.norm(r.w, dim=0, keepdim=True),
        "normalize": lambda r: F.normalize(r.w),
        "normalize of dim 0": lambda r: F.normalize(r.w, dim=0, p=1.0),
        "tensordot": lambda r: torch.tensordot(r.w, r.w),
        "add out=None": lambda r: torch.add(r.w, r.w, out=None),
        "mm out=None": lambda r: torch.mm(r.w, r.w, out=None),
        "norm.out=None of linalg": lambda r: torch.linalg.norm(r.w, out=None),
        "max of a dim out=None": lambda r: list(torch.max(r.w, 1, out=None)),
        "add into a tensor": lambda r: torch.add(
            r.w.detach(), 1, out=torch.empty(32, 32, device=r.device)
        ),
        "chain_matmul": lambda r: torch.linalg.multi_dot([r.w, r.w, r.w]),
        "cdist": lambda r: torch.cdist(r.w, r.param("layers.0.weight")),
        "pdist": lambda r: F.pdist(r.w),
        "cosine_similarity": lambda r: F.cosine_similarity(r.w, r.param("layers.1.weight")),
        "einsum": lambda r: torch.einsum("ij,kj->ik", r.w, r.param("layers.2.weight")),
        "block_diag": lambda r: torch.block_diag(r.w, r.param("head.weight")),
        "cartesian": lambda r: torch.cartesian_prod(r.b, r.param("norm.bias")),
        "meshgrid": lambda r: list(torch.meshgrid(r.b, r.param("norm.weight"), indexing="ij")),
        "broadcast_tensors": lambda r: [t + 0 for t in torch.broadcast_tensors(r.b, r.w)],
        "unique": lambda r: list(torch.unique(r.w.round(decimals=1), return_counts=True)),
        "lu": lambda r: [t + 0 for t in torch.linalg.lu_factor(r.w)],
        "svdvals": lambda r: torch.linalg.svdvals(r.w),
        "stft": lambda r: (
            torch.stft(
                r.w.reshape(-1), 64, return_complex=True, window=torch.ones(64, device=r.device)
            ).real
        ),
        "split": lambda r: [t.sum() for t in r.w.split(7)],
        "chunk": lambda r: [t.sum() for t in r.w.chunk(3, 1)],
        "unbind": lambda r: torch.stack(r.w.unbind(1)),
        "iteration": lambda r: [float(row.sum()) for row in r.w],
        "matrix_norm": lambda r: torch.linalg.matrix_norm(r.w),
        "vector_norm": lambda r: torch.linalg.vector_norm(r.w, 3),
        "histc": lambda r: torch.histc(r.w.detach().cpu(), 10),
        "quantile": lambda r: torch.quantile(r.w, 0.25),
        "topk": lambda r: list(torch.topk(r.w, 3)),
        "sort": lambda r: list(torch.sort(r.b)),
        "searchsorted": lambda r: torch.searchsorted(
            torch.sort(r.b)[0].detach(), r.param("norm.bias").detach()
        ),
        "where": lambda r: torch.where(r.w > 0, r.w, r.param("layers.1.weight")),
        "masked_select": lambda r: torch.masked_select(r.w, r.w > 0.1),
        "gather": lambda r: torch.gather(r.w, 1, torch.arange(32, device=r.device).reshape(32, 1)),
        "embedding": lambda r: F.embedding(torch.tensor([3, 1, 3], device=r.device), r.w),
        "embedding_bag": lambda r: F.embedding_bag(
            torch.tensor([[3, 1], [2, 0]], device=r.device), r.w
        ),
        "conv1d": lambda r: F.conv1d(r.randn(2, 32, 9), r.w.reshape(32, 32, 1)),
        "bilinear": lambda r: F.bilinear(r.h(), r.h(1), r.w.reshape(1, 32, 32)),
        "layer_norm": lambda r: F.layer_norm(r.h(), (32,), r.b, r.param("norm.bias")),
        "prelu": lambda r: F.prelu(r.h(), r.b),
        "scaled_dot_product": lambda r: F.scaled_dot_product_attention(
            r.w[None], r.w[None], r.w[None]
        ),
        "dropout": lambda r: F.dropout(r.w, 0.3),
        "bernoulli": lambda r: torch.bernoulli(torch.sigmoid(r.w)),
        "multinomial": lambda r: torch.multinomial(torch.sigmoid(r.w), 2),
        "normal of a mean": lambda r: torch.normal(r.w, 0.1),
        "frombuffer of bytes": lambda r: torch.frombuffer(
            bytearray(r.w.detach().cpu().numpy().tobytes()), dtype=torch.float32
        ),
    },
    served=True,
)

rows(
    "read",
    "8",
    {
        "x.new(p)": lambda r: torch.ones(1, device=r.device).new(r.w.detach()),
        "p.new(p)": lambda r: r.w.new(r.w),
        "x.new_tensor(p)": lambda r: torch.ones(1, device=r.device).new_tensor(r.w),
        "tensor by name": lambda r: tensor_by_name(r.w),
        "tensor of a list of elements": lambda r: tensor_by_name([r.w[0, 0], r.w[1, 1]]),
        "tensor of a list of single elements": lambda r: tensor_by_name([r.b[:1], r.w[2, 3:4]]),
        "tensor of lists of elements": lambda r: tensor_by_name([list(r.b[:3]), list(r.w[1, :3])]),
        "tensor of complex elements": lambda r: torch.view_as_real(
            tensor_by_name([r.w[0, 0], r.b[0]], dtype=torch.complex64)
        ),
        "as_tensor of elements": lambda r: torch.as_tensor([r.w[0, 0], (r.b[1])]),
        "new_tensor of elements": lambda r: torch.ones(1).new_tensor([r.w[0, 0], r.w[1, 1]]),
        "DoubleTensor of elements": lambda r: torch.DoubleTensor([r.w[0, 0], r.w[1, 1]]),
        "numbers": lambda r: [float(r.w[0, 0]), int(r.w[0, 1]), bool(r.b[0]), complex(r.b[1]).real],
        "as_tensor": lambda r: torch.as_tensor(r.w) + 0,
        "asarray": lambda r: torch.asarray(r.w) + 0,
        "asarray copy": lambda r: torch.asarray(r.w, copy=True),
        "Tensor(p)": lambda r: torch.Tensor(r.w.detach().cpu()).clone(),
        "FloatTensor(p)": lambda r: torch.FloatTensor(r.w.detach().cpu()).clone(),
        "DoubleTensor of the list": lambda r: torch.DoubleTensor(r.w.tolist()),
        "sparse_coo_tensor": lambda r: torch.sparse_coo_tensor(
            torch.arange(32, device=r.device).reshape(1, 32), r.b, (40,)
        ),
        "sparse_coo_tensor of rows": lambda r: torch.sparse_coo_tensor(
            torch.arange(32, device=r.device).reshape(1, 32), r.w, (40, 32)
        ),
        "sparse_csr_tensor": lambda r: torch.sparse_csr_tensor(
            torch.arange(33, device=r.device),
            torch.zeros(32, dtype=torch.int64, device=r.device),
            r.b,
            (32, 4),
        ),
        "to_sparse": lambda r: r.w.to_sparse(),
        "sparse.mm": lambda r: torch.sparse.mm(torch.eye(32, device=r.device).to_sparse(), r.w),
        "to_mkldnn": lambda r: r.w.detach().cpu().to_mkldnn().to_dense(),
        "nested_tensor": lambda r: torch.nested.nested_tensor(
            [r.w.detach(), r.param("head.weight").detach()]
        ),
        "as_nested_tensor": lambda r: torch.nested.as_nested_tensor([r.w, r.param("head.weight")]),
        "nested jagged": lambda r: list(
            torch.nested.as_nested_tensor(
                [r.w, r.param("head.weight")], layout=torch.jagged
            ).unbind()
        ),
        "x.set_(p)": lambda r: torch.empty(0, device=r.device).set_(r.w.detach()).clone(),
        "x.set_(p.data)": lambda r: torch.empty(0, device=r.device).set_(r.w.data).clone(),
        "x.set_(storage)": lambda r: (
            torch.empty(0, device=r.device)
            .set_(r.w.detach().untyped_storage(), r.w.storage_offset(), (32, 32))
            .clone()
        ),
        "as_strided": lambda r: torch.as_strided(r.w, (16, 16), (64, 2)) + 0,
        "as_strided of data": lambda r: r.w.data.as_strided((16, 16), (64, 2)) + 0,
        "view_as": lambda r: r.w.view_as(torch.empty(64, 16, device=r.device)) + 0,
        "view of a dtype": lambda r: r.w.detach().view(torch.int32) + 0,
        "unfold": lambda r: r.w.unfold(0, 4, 4) + 0,
        "diagonal": lambda r: r.w.diagonal() + 0,
        "movedim": lambda r: r.w.movedim(0, 1).contiguous(),
        "T": lambda r: r.w.T @ r.w.mT,
        "real": lambda r: torch.real(r.w) + 0,
        "view_as_complex": lambda r: torch.view_as_complex(r.w.detach().reshape(32, 16, 2)).abs(),
        "quantize": lambda r: torch.quantize_per_tensor(
            r.w.detach().cpu(), 0.01, 0, torch.qint8
        ).dequantize(),
        "fake_quantize": lambda r: torch.fake_quantize_per_tensor_affine(r.w, 0.01, 0, -128, 127),
        "is_same_size": lambda r: [
            r.w.is_same_size(r.w),
            bool(torch.is_nonzero(r.w[0, 0])),
            torch.is_tensor(r.w),
        ],
        "format": lambda r: f"{r.w[0, 0]:.9f} {r.w[0, 0].item():.3e}",
        "str": lambda r: str(r.w.data) + repr(r.w.detach()[0]),
        "str of p": lambda r: [str(r.w), repr(r.b), f"{r.w}"],
        "float": lambda r: [float(r.w[1, 2]), int(r.w[0, 0] * 1000), bool(r.w[0, 0] > 0)],
        "contains": lambda r: r.w[0, 0].item() in r.w.detach(),
        "truth of equal": lambda r: [torch.equal(r.w, r.w.clone()), torch.allclose(r.w, r.w.data)],
        "index": lambda r: np.arange(40)[int(r.w.abs().argmax()) % 40],
        "length and item": lambda r: [len(r.w), r.b[3].item()],
        "array protocol": lambda r: np.asarray(r.w.detach().cpu()).copy(),
        "np.array of data": lambda r: np.array(r.w.data.cpu()),
        "np.abs of detach": lambda r: np.abs(r.w.detach().cpu()).sum(),
        "buffer of numpy": lambda r: bytes(memoryview(r.w.detach().cpu().numpy()).cast("B")),
        "ctypes": lambda r: _through_ctypes(r),
        "untyped_storage": lambda r: r.w.detach().clone().untyped_storage().nbytes(),
        "storage tolist": lambda r: r.w.data.clone().untyped_storage().tolist()[:64],
        "storage of data": lambda r: r.w.data.untyped_storage().tolist()[:64],
        "dlpack": lambda r: torch.from_dlpack(r.w.detach()).clone(),
        "dlpack of data": lambda r: torch.utils.dlpack.from_dlpack(
            torch.utils.dlpack.to_dlpack(r.w.data)
        ).clone(),
        "dlpack to numpy": lambda r: np.from_dlpack(r.w.detach().cpu()).copy(),
        "pickle of p": lambda r: pickle.loads(pickle.dumps(r.w)),
        "pickle of data": lambda r: pickle.loads(pickle.dumps(r.w.data)),
        "copy.copy": lambda r: copy.copy(r.w) + 0,
        "deepcopy of p": lambda r: copy.deepcopy(r.w),
        "deepcopy of data": lambda r: copy.deepcopy(r.w.data),
        "deepcopy of a dict of parameters": lambda r: copy.deepcopy(
            dict(r.model.named_parameters())
        ),
        "torch.save of p": lambda r: _saved(r.w),
        "torch.save of data": lambda r: _saved(r.w.data),
        "torch.save of a view": lambda r: _saved(r.w.detach()[3:5]),
        "json of a list": lambda r: json.dumps(r.b.tolist()),
        "safetensors of parameters": lambda r: _through_file(
            {n: p.detach() for n, p in r.model.named_parameters()}
        ),
        "safetensors of data": lambda r: safetensors.torch.load(
            safetensors.torch.save({"w": r.w.data})
        ),
        "type": lambda r: [
            r.w.type(),
            isinstance(r.w.data, torch.Tensor),
            isinstance(r.w, nn.Parameter),
        ],
        "type(dtype)": lambda r: r.w.type(torch.float64),
        "to(other)": lambda r: r.w.to(torch.empty(1, dtype=torch.float64, device=r.device)),
        "cpu": lambda r: r.w.cpu() + 0,
        "to meta": lambda r: list(r.w.to("meta").shape),
        "requires_grad of views": lambda r: [
            r.w.t().requires_grad,
            r.w.data.requires_grad,
            r.w.detach().is_leaf,
        ],
        "share_memory": lambda r: r.w.detach().clone().share_memory_(),
        "pin or contiguous": lambda r: r.w.contiguous() + 0,
        "is_shared": lambda r: [r.w.is_shared() if r.device == "cpu" else False, r.w.is_pinned()],
        "result_type": lambda r: [
            torch.result_type(r.w, 1),
            torch.promote_types(r.w.dtype, torch.float64),
        ],
        "hash and dict": lambda r: {str(r.w.shape): {r.w: 1}[r.w], "set": len({r.w, r.b, r.w})},
        "nan_to_num": lambda r: torch.nan_to_num(r.w),
        "DisableTorchFunctionSubclass": lambda r: _without_functions(r),
        "DisableTorchFunction": lambda r: _without_any_function(r),
        "_C functions": lambda r: (
            torch._C._VariableFunctions.sum(r.w) + torch._C._nn.gelu(r.w).sum()
        ),
        "aten ops": lambda r: torch.ops.aten.mm.default(r.w, r.w),
        "overload packet": lambda r: torch.ops.aten.add(r.w, r.w, alpha=2),
        "foreach": lambda r: torch._foreach_mul([r.w, r.b], 2.0),
        "foreach norm": lambda r: torch._foreach_norm([r.w, r.b]),
        "foreach of data": lambda r: torch._foreach_add([r.w.data, r.b.data], [r.w.data, r.b.data]),
        "vmap": lambda r: torch.vmap(lambda row: row.square().sum())(r.w),
        "vmap over two": lambda r: torch.vmap(torch.dot)(r.w, r.param("layers.0.weight")),
        "vmap captured": lambda r: torch.vmap(lambda x: x @ r.w)(r.h()),
        "attributes": lambda r: [
            list(r.w.shape),
            [r.w.dtype, str(r.w.device), str(r.w.layout), r.w.grad_fn],
            [r.w.requires_grad, r.w.is_leaf, r.w.is_contiguous(), r.w.is_floating_point()],
            [r.w.numel(), r.w.dim(), r.w.nbytes, r.w.element_size(), r.w.storage_offset()],
            list(r.w.stride()),
        ],
        "likes": lambda r: [
            torch.zeros_like(r.w),
            r.w.new_zeros(3),
            r.w.new_full((3,), float(r.w[0, 0])),
            torch.ones_like(r.w, dtype=torch.int8),
        ],
        "alignment": lambda r: [r.w.data_ptr() % 64, r.w.data.data_ptr() % 64],
        "as_subclass": lambda r: r.w.as_subclass(torch.Tensor).detach().clone(),
        "slices into a tensor": lambda r: _slices(r),
    },
)


def _slices(run: Run) -> Any:
    target = torch.zeros(48, 32, device=run.device)
    with torch.no_grad():
        target[:32].copy_(run.w)
        target[16:] += run.w
    return target


@door("read/one object by every way", "8", served=True)
def _(run: Run) -> Any:
    mine = list(run.model.parameters())
    owned = [p for group in run.optimizer.param_groups for p in group["params"]]
    is_same = [p is q for p, q in zip(mine, owned, strict=True)]
    return [is_same, len(set(mine)), run.model.layers[3].weight is run.w]


@door("read/contexts of devices", "8", trains=False)
def _(run: Run) -> Any:
    """Beginning after the first manage: transformers asks torch.tensor([]) for the device."""
    makes = (torch.tensor, torch.as_tensor, torch.asarray, torch.zeros(1).new_tensor)
    seen = []
    for make in makes:
        with torch.device("meta"):
            seen.append(str(make([1.0]).device))
    torch.set_default_device("meta")
    try:
        return [*seen, str(torch.tensor([1.0]).device)]
    finally:
        torch.set_default_device(None)


def _np_save(run: Run) -> Any:
    file = io.BytesIO()
    np.savez(file, **{n: p.detach().cpu().numpy() for n, p in run.model.named_parameters()})
    file.seek(0)
    return dict(np.load(file))


def _through_file(tensors: dict[str, torch.Tensor]) -> Any:
    """By name: safetensors reads a file in an order of hashes, which differ from process to process."""
    return dict(sorted(safetensors.torch.load(safetensors.torch.save(tensors)).items()))


def _through_ctypes(run: Run) -> Any:
    kept = run.w.detach().cpu()
    return list((ctypes.c_float * kept.numel()).from_address(kept.data_ptr()))[:50]


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _without_functions(run: Run) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return [run.w.sum(), run.w @ run.w, run.w.detach() * 2]


def _without_any_function(run: Run) -> Any:
    with torch._C.DisableTorchFunction():
        return [run.w.sum(), torch.mm(run.w, run.w)]


class _Rewriting(torch.Tensor):
    """A subclass of a user that unwraps everything before it calls torch."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(torch.Tensor) if isinstance(out, torch.Tensor) else out


class _Typed(torch.Tensor):
    """One that hands a list of types of its own on."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return super().__torch_function__(func, (cls,), args, kwargs or {})


@door("read/np.savez of all", "8", needs_all=True)
def _(run: Run) -> Any:
    return _np_save(run)


@door("read/beside a subclass that unwraps", "8")
def _(run: Run) -> Any:
    x = run.h().as_subclass(_Rewriting)
    return [F.linear(x, run.w), x @ run.w, torch.add(run.w[:5], x)]


@door("read/beside a subclass that rewrites types", "8")
def _(run: Run) -> Any:
    x = run.h().as_subclass(_Typed)
    return [t.as_subclass(torch.Tensor) for t in (F.linear(x, run.w), x @ run.w)]


def _wrapper(inner: torch.Tensor, beside: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of a class that is made now, around another: its operations run on that, and read one `beside`."""

    class Around(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            made = torch.Tensor._make_wrapper_subclass(
                cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
            )
            made.inner = inner
            return made

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            def unwrap(value: Any) -> Any:
                return value.inner if isinstance(value, cls) else value

            result = func(*map(unwrap, args), **(kwargs or {}))
            return result if beside is None else result + beside.sum()

    return Around(inner)


@door("read/in a wrapper of its own class", "8")
def _(run: Run) -> Any:
    around = _wrapper(run.w.detach())
    return [around.clone(), around.sum(), around @ around, around.mul(2.0), around[3].clone()]


@door("write/in a wrapper of its own class", "8")
def _(run: Run) -> Any:
    around = _wrapper(run.w.detach())
    around.mul_(0.5)
    return [run.w.clone(), around.clone()]


@door("read/in a wrapper's dispatch", "8")
def _(run: Run) -> Any:
    around = _wrapper(run.h().detach(), beside=run.w.detach())
    return [around * 2.0, around.sum()]


@door("read/under a function mode", "8")
def _(run: Run) -> Any:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        return [run.w.sum(), run.w @ run.w, F.linear(run.h(), run.w, run.b)]


@door("read/under a dispatch mode", "8")
def _(run: Run) -> Any:
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            seen.extend(a.clone() for a in args if isinstance(a, torch.Tensor))
            return out

    with Mode():
        value = run.w.detach() @ run.w.detach()
    return [value, len(seen) > 0]


@door("read/a whole step under a dispatch mode", "8")
def _(run: Run) -> Any:
    sums = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.addmm.default:
                sums.append(args[2].sum().item())
            return func(*args, **(kwargs or {}))

    with Mode():
        loss = run.backward()
    return [loss, sums]


# ---- views and copies that are kept --------------------------------------------------------------

VIEWS: dict[str, Callable[[Run], torch.Tensor]] = {
    "detach": lambda r: r.w.detach(),
    "data": lambda r: r.w.data,
    "t": lambda r: r.w.t(),
    "row": lambda r: r.w[3],
    "slice of data": lambda r: r.w.data[2:9, 1:],
    "view": lambda r: r.w.view(-1),
    "expand": lambda r: r.b.expand(4, 32),
    "element": lambda r: r.w[0, 0],
    "alias of a state dict": lambda r: r.model.state_dict()["layers.3.weight"],
    "state dict kept as variables": lambda r: r.model.state_dict(keep_vars=True)["layers.3.weight"],
    "view_as_real of a view": lambda r: torch.view_as_complex(r.w.detach().reshape(32, 16, 2)).real,
    "from_dlpack": lambda r: torch.from_dlpack(r.w.detach()),
}


def _keep(take: Callable[[Run], torch.Tensor]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        kept = take(run)
        first = kept.detach().clone()
        with torch.no_grad():
            run.loss(3)
        again = kept.detach().clone()
        run.backward(4)  # other chunks pass through the device
        return [first, again, kept.detach().clone(), kept.detach().cpu().sum()]

    return program


def _keep_over_step(take: Callable[[Run], torch.Tensor]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        kept = take(run)
        losses = run.step(3)
        return [losses, kept.detach().clone()]

    return program


for name, take in VIEWS.items():
    door(f"kept/{name} over passes", "8", needs_all=True)(_keep(take))
    door(f"kept/{name} over steps", "8", needs_all=True)(_keep_over_step(take))


@door("kept/numpy over passes", "8", needs_all=True)
def _(run: Run) -> Any:
    kept = run.w.detach().cpu().numpy()
    first = kept.copy()
    run.backward()
    return [first, kept.copy()]


@door("kept/iterator over the parameter", "8", needs_all=True)
def _(run: Run) -> Any:
    rows_of = iter(run.w)
    first = next(rows_of).detach().clone()
    run.backward()
    return [first, next(rows_of).detach().clone(), next(rows_of).sum()]


@door("kept/cache of views of all layers", "8", needs_all=True)
def _(run: Run) -> Any:
    cache = {n: p.detach().view(-1) for n, p in run.model.named_parameters()}
    run.backward()
    return {n: v.clone() for n, v in cache.items()}


@door("kept/detach inside full_parameters", "8", needs_all=True)
def _(run: Run) -> Any:
    if run.engine is not None:
        with run.engine.full_parameters():
            kept = [p.detach() for p in run.model.parameters()]
            state = run.model.state_dict()
    else:
        kept, state = [p.detach() for p in run.model.parameters()], run.model.state_dict()
    run.backward()
    return [[k.clone() for k in kept], {k: v.clone() for k, v in state.items()}]


@door("kept/of a part inside full_parameters", "8", needs_all=True)
def _(run: Run) -> Any:
    layer = run.model.layers[3]
    if run.engine is not None:
        with run.engine.full_parameters(layer):
            kept, view, state = layer.weight.detach(), layer.weight.data[1], layer.state_dict()
    else:
        kept, view, state = layer.weight.detach(), layer.weight.data[1], layer.state_dict()
    run.backward()
    run.optimizer.zero_grad()
    losses = run.step(2)
    return [losses, kept.clone(), view.clone(), {k: v.clone() for k, v in state.items()}]


@door("kept/other.weight.data = managed.weight.data", "8", needs_all=True)
def _(run: Run) -> Any:
    other = nn.Linear(32, 32).to(run.device)
    other.weight.data = run.w.data
    other.bias.data = run.b.data
    first = other(run.h()).detach()
    run.backward()
    return [first, other(run.h()).detach(), other.weight.detach().clone()]


@door("kept/a module around the data", "8", needs_all=True)
def _(run: Run) -> Any:
    q = nn.Parameter(run.w.detach(), requires_grad=False)
    run.backward()
    return [q.sum(), q.detach().clone()]


@door("kept/in a hook of another layer", "8", needs_all=True)  # beside those of the hook's own
def _(run: Run) -> Any:
    seen: list[Any] = []

    def look(*_: Any) -> None:
        seen.append([run.w.detach().sum(), run.b.data.clone(), run.model.stem.weight[0, 0].item()])

    handle = run.model.layers[0].register_forward_hook(look)
    run.backward()
    handle.remove()
    return seen


@door("kept/taken in a hook of its own layer", "8", needs_all=True)
def _(run: Run) -> Any:
    kept: list[torch.Tensor] = []
    layer = run.model.layers[3]
    handles = [
        layer.register_forward_pre_hook(lambda m, a: kept.append(m.weight.detach())),
        layer.register_forward_hook(lambda m, a, o: kept.append(m.weight.data[2])),
        layer.register_full_backward_hook(lambda m, i, o: kept.append(m.weight.detach().t())),
    ]
    run.backward()
    for handle in handles:
        handle.remove()
    run.optimizer.zero_grad()
    early = [k.clone() for k in kept]
    with torch.no_grad():
        run.loss(9)
    return [early, [k.clone() for k in kept]]


# ---- gradients -----------------------------------------------------------------------------------

GRADS: dict[str, Callable[[Run], Any]] = {
    "numpy": lambda r: r.w.grad.cpu().numpy().copy(),
    "tolist": lambda r: r.w.grad.tolist(),
    "item": lambda r: r.w.grad[1, 2].item(),
    "clone": lambda r: r.w.grad.clone(),
    "norm": lambda r: [p.grad.norm() for p in r.model.parameters()],
    "data": lambda r: r.w.grad.data.clone(),
    "detach of view": lambda r: r.w.grad.view(-1).detach()[3:9].clone(),
    "pickle": lambda r: pickle.loads(pickle.dumps(r.w.grad)),
    "deepcopy": lambda r: copy.deepcopy(r.w.grad),
    "torch.save": lambda r: _saved(r.w.grad),
    "asarray": lambda r: np.asarray(r.w.grad.cpu()).copy(),
    "isfinite": lambda r: torch.isfinite(r.w.grad).all().item(),
    "is": lambda r: [r.w.grad is not None, r.w.grad.shape == r.w.shape, str(r.w.grad.dtype)],
    "attributes": lambda r: [
        list(r.w.grad.stride()),
        r.w.grad.is_contiguous(),
        r.w.grad.requires_grad,
    ],
    "same object": lambda r: torch.equal(r.w.grad, r.w.grad),
    "product with p": lambda r: (r.w.grad * r.w).sum(),
    "foreach norm": lambda r: torch._foreach_norm([p.grad for p in r.model.parameters()]),
    "stack": lambda r: torch.stack([r.w.grad, r.param("layers.4.weight").grad]),
    "vmap": lambda r: torch.vmap(lambda g: g.sum())(r.w.grad),
    "str": lambda r: str(r.w.grad[0]),
    "get_total_norm": lambda r: nn.utils.get_total_norm([p.grad for p in r.model.parameters()]),
    "cosine of two": lambda r: F.cosine_similarity(r.w.grad, r.param("layers.2.weight").grad),
    "sign of all": lambda r: [p.grad.sign().sum() for p in r.model.parameters()],
    "getattr": lambda r: getattr(r.w, "grad", None).sum(),
}


def _of_grad(body: Callable[[Run], Any]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        run.backward()
        return body(run)

    return program


# By their address: served outside of any unit by a copy, or refused by name.
GRADS_BY_ADDRESS: dict[str, Callable[[Run], Any]] = {
    "dlpack": lambda r: torch.from_dlpack(r.w.grad).clone(),
    "safetensors": lambda r: safetensors.torch.load(safetensors.torch.save({"g": r.w.grad})),
}

rows("grad", "19", {name: _of_grad(body) for name, body in GRADS.items()}, served=True)
rows("grad", "19", {name: _of_grad(body) for name, body in GRADS_BY_ADDRESS.items()})


@door("grad/kept over a second backward", "19")
def _(run: Run) -> Any:
    run.backward(0)
    kept = run.w.grad
    first = kept.clone()
    run.backward(1)
    return [first, kept.clone(), run.w.grad.clone()]


@door("grad/kept over zero_grad", "19")
def _(run: Run) -> Any:
    run.backward(0)
    kept = run.w.grad
    first = kept.clone()
    run.optimizer.zero_grad()
    return [first, kept.clone(), run.w.grad is None]


@door("grad/before any backward", "19")
def _(run: Run) -> Any:
    return [p.grad is None for p in run.model.parameters()]


# ---- state dicts and the optimizer's state -------------------------------------------------------

STATES: dict[str, Callable[[Run], Any]] = {
    "clone": lambda r: {k: v.clone() for k, v in r.model.state_dict().items()},
    "pickle": lambda r: pickle.loads(pickle.dumps(dict(r.model.state_dict()))),
    "torch.save": lambda r: dict(_saved(r.model.state_dict())),
    "deepcopy": lambda r: dict(copy.deepcopy(r.model.state_dict())),
    "numpy": lambda r: {k: v.cpu().numpy().copy() for k, v in r.model.state_dict().items()},
    "dlpack": lambda r: {k: torch.from_dlpack(v).clone() for k, v in r.model.state_dict().items()},
    "safetensors": lambda r: _through_file(dict(r.model.state_dict())),
    "save_model": lambda r: [n for n, _ in r.model.named_parameters()],
    "of a layer": lambda r: {k: v + 0 for k, v in r.model.layers[3].state_dict().items()},
    "sum": lambda r: sum(v.double().sum() for v in r.model.state_dict().values()),
    "into another model": lambda r: _into_another(r),
    "keep_vars": lambda r: {
        k: v.detach().clone() for k, v in r.model.state_dict(keep_vars=True).items()
    },
    "destination": lambda r: {k: v.clone() for k, v in r.model.state_dict(prefix="a.").items()},
    "views of it": lambda r: {k: v.view(-1)[:5].clone() for k, v in r.model.state_dict().items()},
    "to half": lambda r: {k: v.half() for k, v in r.model.state_dict().items()},
}


def _into_another(run: Run) -> Any:
    other = type(run.model)().to(run.device)
    other.load_state_dict(run.model.state_dict())
    return [other(run.x()).detach(), dict(other.state_dict())]


rows("state dict", "4", STATES)


def _moments(run: Run, take: Callable[[torch.Tensor], Any]) -> Any:
    run.step(1)
    state = run.optimizer.state[run.w]
    return [take(state[key]) for key in ("exp_avg", "exp_avg_sq")] + [float(state["step"])]


rows(
    "moments",
    "5",
    {
        "clone": lambda r: _moments(r, lambda t: t.clone()),
        "numpy": lambda r: _moments(r, lambda t: t.cpu().numpy().copy()),
        "tolist": lambda r: _moments(r, lambda t: t.tolist()),
        "pickle": lambda r: _moments(r, lambda t: pickle.loads(pickle.dumps(t))),
        "deepcopy": lambda r: _moments(r, copy.deepcopy),
        "dlpack": lambda r: _moments(r, lambda t: torch.from_dlpack(t.cpu()).clone()),
        "safetensors": lambda r: _moments(
            r, lambda t: safetensors.torch.load(safetensors.torch.save({"t": t}))
        ),
        "norm": lambda r: _moments(r, torch.norm),
    },
)


@door("model/deepcopy", "8")
def _(run: Run) -> Any:
    other = copy.deepcopy(run.model).to(run.device)
    out = other(run.x())
    out.sum().backward()
    return [out.detach(), dict(other.state_dict()), other.layers[3].weight.grad]


@door("model/pickle", "8")
def _(run: Run) -> Any:
    other = pickle.loads(pickle.dumps(run.model)).to(run.device)
    return [other(run.x()).detach(), dict(other.state_dict())]


@door("model/torch.save", "8")
def _(run: Run) -> Any:
    return dict(_saved(run.model).state_dict())


@door("model/deepcopy of a layer", "8")
def _(run: Run) -> Any:
    other = copy.deepcopy(run.model.layers[3]).to(run.device)
    return [other(run.h()).detach(), other.weight.detach()]


@door("model/deepcopy of an optimizer", "5", whole=True)
def _(run: Run) -> Any:
    run.step(1)
    return len(copy.deepcopy(run.optimizer).param_groups)


@door("model/checkpoint with the optimizer", "13", setups=("cpu", "auto"))
def _(run: Run) -> Any:
    run.step(2)
    saved = _saved({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()})
    run.step(2)
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    return [run.step(2), saved["optimizer"]["state"][3]["exp_avg"]]


@door("model/parameters_to_vector", needs_all=True)
def _(run: Run) -> Any:
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()
