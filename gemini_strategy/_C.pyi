"""The C core; see the files named in each section."""

from collections.abc import Sequence

BUILT_WITH_CUDA: int
DEBUG: int

# ---- arithmetic (csrc/py_arith.c) ----
# dtypes and weight formats: 0 fp32, 1 bf16, 2 fp16; tensors are addresses; sums are opaque bytes

def isa_name() -> str: ...
def isa_force(name: str | None, /) -> None: ...
def adam_scalars(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    adamw: bool,
    bias_correction: bool,
    grad_divisor: float,
    clip_factor: float,
    /,
) -> bytes: ...
def adam_host(
    weight_format: int,
    grad_dtype: int,
    weight: int,
    low: int,
    m: int,
    v: int,
    grad: int,
    ranges: Sequence[tuple[int, int, bytes]],
    /,
) -> None: ...
def adam_cuda(
    ordinal: int,
    stream: int,
    weight_format: int,
    grad_dtype: int,
    weight: int,
    low: int,
    m: int,
    v: int,
    grad: int,
    ranges: Sequence[tuple[int, int, bytes]],
    /,
) -> None: ...
def grad_add_host(
    dst: int, dst_dtype: int, src: int, src_dtype: int, numel: int, accumulate: bool, /
) -> None: ...
def sumsq_host(data: int, dtype: int, numel: int, total: bytes | None, /) -> bytes: ...
def sumsq_cuda(
    ordinal: int, stream: int, data: int, dtype: int, numel: int, total: int, /
) -> None: ...
def sumsq_merge(a: bytes | None, b: bytes | None, /) -> bytes: ...
def sumsq_value(total: bytes, /) -> float: ...
def sumsq_read(address: int, /) -> bytes: ...
def split_host(weight_format: int, master: int, weight: int, low: int, numel: int, /) -> None: ...
def merge_host(weight_format: int, weight: int, low: int, master: int, numel: int, /) -> None: ...
def reconcile_host(
    weight_format: int, old_weight: int, weight: int, low: int, numel: int, /
) -> int: ...
