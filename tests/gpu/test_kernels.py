"""The kernels through the Python binding: the bits of the host implementation."""

import pytest
import torch

from gemini_strategy import _C

pytestmark = pytest.mark.gpu

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMATS = list(CODES)


def any_bits(numel: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random bits: every scale, denormals, infinities and NaNs."""
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64)
        return bits.to(torch.int32).view(dtype)
    bits = torch.randint(-(2**15), 2**15, (numel,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int16).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.cpu().view(integers), b.cpu().view(integers))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@pytest.mark.parametrize("skew", [0, 1, 8])
@pytest.mark.parametrize("adamw", [True, False])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("grad", ["same", "fp32"])
def test_adam(dtype: torch.dtype, grad: str, adamw: bool, skew: int) -> None:
    numel = 100_003
    generator = torch.Generator().manual_seed(skew)
    grad_dtype = torch.float32 if grad == "fp32" else dtype
    low_dtype = {torch.float32: torch.float32, torch.bfloat16: torch.bfloat16,
                 torch.float16: torch.float32}[dtype]  # fmt: skip
    dtypes = [dtype, low_dtype, torch.float32, torch.float32, grad_dtype]
    host = [any_bits(numel + skew, d, generator) for d in dtypes]
    device = [t.cuda() for t in host]
    scalars = [
        _C.adam_scalars(1e-3, 0.9, 0.999, 1e-8, 0.1, step, adamw, True, 128.0, 0.5)
        for step in (1, 7)
    ]
    ranges = [(0, 5, scalars[0]), (5, 5, scalars[1]), (17, numel - 3, scalars[1])]

    def addresses(tensors: list[torch.Tensor]) -> list[int]:
        found = [t[skew:].data_ptr() for t in tensors]
        if dtype == torch.float32:
            found[1] = 0
        return found

    codes = (CODES[dtype], CODES[grad_dtype])
    _C.adam(-1, 0, *codes, *addresses(host), ranges)
    _C.adam(0, stream(), *codes, *addresses(device), ranges)
    for on_host, on_device in zip(host, device, strict=True):
        assert same_bits(on_host, on_device)


@pytest.mark.parametrize("skew", [0, 1, 5])
@pytest.mark.parametrize("dtype", FORMATS)
def test_sum_of_squares(dtype: torch.dtype, skew: int) -> None:
    generator = torch.Generator().manual_seed(skew)
    numel = 1_000_003
    data = [any_bits(numel, dtype, generator), torch.randn(numel, generator=generator).to(dtype)]
    finite = [torch.where(t.isfinite(), t, torch.zeros_like(t)) for t in data]
    expected = None
    total = torch.zeros(len(_C.sumsq_merge(None, None)), dtype=torch.uint8, device="cuda")
    for t in finite:
        expected = _C.sumsq_host(t[skew:].data_ptr(), CODES[dtype], numel - skew, expected)
        on_device = t.cuda()
        _C.sumsq_cuda(
            0, stream(), on_device[skew:].data_ptr(), CODES[dtype], numel - skew, total.data_ptr()
        )
        on_host = total.cpu()
        found = _C.sumsq_read(on_host.data_ptr())
        assert _C.sumsq_merge(found, None) == _C.sumsq_merge(expected, None)
        assert _C.sumsq_value(found) == _C.sumsq_value(expected)
