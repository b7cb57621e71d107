"""All of torch's operations on absent tensors: torch's own samples of them, with the bits of plain tensors.

Each sample runs with its tensors as they are, as conjugates or negatives, and, if complex, as views of real ones. What
comes out and the gradients of what went in are compared. The first samples of each operation run; OPERATIONS=all runs
all of them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

from gemini_strategy.parameters import absent, doors

MOST = None if os.environ.get("OPERATIONS") == "all" else 1
GROUPS = 32
DTYPES = (torch.float32, torch.complex64)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# What gives memory as it is, and kernels from a string, which take addresses past the dispatcher: refused by name.
LEFT_OUT = ("empty", "new_empty", "jiterator")


class _Home(absent.Home):
    name, key = "w", "weight"

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def open(self, is_written: bool) -> Tensor:
        return self.values

    def takes_late(self) -> bool:
        return True


def _is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested


def _leaf(values: Tensor, is_absent: bool, requires_grad: bool) -> Tensor:
    values = values.detach().clone(memory_format=torch.contiguous_format)
    if is_absent:
        geometry = tuple(values.shape), values.stride(), values.dtype, values.device
        values = absent.tensor(_Home(values), *geometry)
    return values.requires_grad_(requires_grad)


AS: dict[str, Callable[[Tensor, bool], tuple[Tensor, Tensor]]] = {
    "it is": lambda v, a: (leaf := _leaf(v, a, v.requires_grad), leaf),
    "a conjugate": lambda v, a: (
        leaf := _leaf(v, a, v.requires_grad),
        leaf.conj() if v.is_complex() else torch._neg_view(leaf),
    ),
    "a view of a real one": lambda v, a: (
        leaf := _leaf(torch.view_as_real(v.detach().resolve_conj()), a, v.requires_grad),
        torch.view_as_complex(leaf),
    ),
}


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in tree_flatten(value)[0] if isinstance(item, Tensor)]


def _bits(value: Tensor) -> Any:
    """Plain data; NaN is equal to NaN."""
    if value.layout is not torch.strided or value.is_quantized or value.is_nested:
        return str(value.layout)
    plain = value.detach().clone().cpu().resolve_conj().resolve_neg().contiguous()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.dtype, plain.shape, plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def _outcome(op: Any, sample: Any, how: str, is_absent: bool) -> Any:
    """What a sample gives, as plain data, and the gradients; or the class of its error."""
    leaves = []

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not (_is_plain(value) and value.dtype in DTYPES and value.numel()):
            return value.detach().clone().requires_grad_(value.requires_grad)
        is_viewed = how != "a view of a real one" or value.is_complex()
        leaf, shown = AS[how if is_viewed else "it is"](value, is_absent)
        leaves.append(leaf)
        return shown

    args = tree_map(given, (sample.input, *sample.args))
    kwargs = tree_map(given, sample.kwargs)
    torch.manual_seed(0)
    try:
        result = op(*args, **kwargs)
    except Exception as error:
        return type(error).__name__
    values = [_bits(value) for value in _tensors(result)]
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    roots = [v for v in _tensors(result) if v.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not (roots and wanted):
        return values
    torch.manual_seed(1)
    directions = [torch.randn(v.shape, dtype=v.dtype, device=v.device) for v in roots]
    try:
        grads = torch.autograd.grad(roots, wanted, directions, allow_unused=True)
    except Exception as error:
        return values, type(error).__name__
    return values, [None if grad is None else _bits(grad) for grad in grads]


def _cases(group: int, device: str) -> Iterator[tuple[str, Any, Any, str]]:
    for op, dtype in itertools.product(op_db[group::GROUPS], DTYPES):
        if dtype not in op.supported_dtypes(device) or op.name.startswith(LEFT_OUT):
            continue
        has_grad = dtype in op.supported_backward_dtypes(device)
        samples = op.sample_inputs(device, dtype, requires_grad=has_grad)
        for sample in itertools.islice(samples, MOST):
            # CUDA's kernels that assert their values, as of a probability, end the process: no negatives.
            for how in list(AS)[: 3 if dtype.is_complex else 2 if device == "cpu" else 1]:
                yield f"{op.formatted_name} of {dtype}, {how}", op, sample, how


@pytest.fixture
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_deterministic")
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("device", DEVICES)
def test_operations_give_the_bits_of_plain_tensors(device: str, group: int) -> None:
    doors.install()
    wrong, n = [], 0
    for name, op, sample, how in _cases(group, device):
        want, got = (_outcome(op, sample, how, is_absent=is_absent) for is_absent in (False, True))
        n += 1
        # Else the operation itself differs from run to run.
        if got != want and _outcome(op, sample, how, is_absent=False) == want:
            wrong.append(name)
    assert n > 10
    assert wrong == []
