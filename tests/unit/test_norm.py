"""The exact sum of squares against integers of any size: the correctly rounded double, always."""

import math
import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_strategy import _C
from gemini_strategy.optim.adam import grad_norm

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def exact(tensor: torch.Tensor) -> float:
    """The sum of squares in units of 2^-298, rounded once by Python's exact division."""
    units = sum(int(math.ldexp(x, 149)) ** 2 for x in tensor.double().flatten().tolist())
    return float(Fraction(units, 2**298))


def sum_bytes(tensor: torch.Tensor, start: bytes | None = None) -> bytes:
    return _C.sumsq_host(tensor.data_ptr(), DTYPES[tensor.dtype], tensor.numel(), start)


def random_floats(numel: int, least: int, greatest: int, seed: int) -> torch.Tensor:
    """Random signs and significands, exponents uniform in [least, greatest]."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2**23, (numel,), generator=generator)
    bits += torch.randint(least, greatest + 1, (numel,), generator=generator) << 23
    bits += torch.randint(0, 2, (numel,), generator=generator) << 31
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


@pytest.fixture(params=["scalar", "best"])
def isa(request):
    _C.isa_force("scalar" if request.param == "scalar" else None)
    yield
    _C.isa_force(None)


@pytest.mark.parametrize(
    ("least", "greatest"),
    [(0, 0), (0, 1), (0, 30), (0, 254), (254, 254), (220, 254), (127, 127), (105, 127), (60, 160)],
)
def test_is_the_correctly_rounded_sum(isa, least, greatest):
    for seed, numel in enumerate((1, 2, 70, 2047, 2048, 2049, 10_000)):
        data = random_floats(numel, least, greatest, seed)
        assert _C.sumsq_value(sum_bytes(data)) == exact(data)
        for dtype in (torch.bfloat16, torch.float16):
            half = data.to(dtype)
            half[~half.isfinite()] = 1.5
            assert _C.sumsq_value(sum_bytes(half)) == exact(half)


def test_normal_gradients_and_tails():
    generator = torch.Generator().manual_seed(3)
    data = torch.randn(50_000, generator=generator).mul_(1e-3)
    assert _C.sumsq_value(sum_bytes(data)) == exact(data)
    tails = data * torch.exp(4 * torch.randn(50_000, generator=generator))
    assert _C.sumsq_value(sum_bytes(tails)) == exact(tails)
    sparse = torch.where(torch.rand(50_000, generator=generator) < 0.99, 0.0, tails)
    assert _C.sumsq_value(sum_bytes(sparse)) == exact(sparse)


@settings(max_examples=100)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60))
def test_any_floats(values):
    data = torch.tensor(values, dtype=torch.float32)
    assert _C.sumsq_value(sum_bytes(data)) == exact(data)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), spread=st.integers(0, 254), repeat=st.integers(1, 3000))
def test_order_and_splits_do_not_matter(seed, spread, repeat):
    data = random_floats(3000 + repeat, 254 - spread, 254, seed)
    whole = sum_bytes(data)
    rng = random.Random(seed)
    assert sum_bytes(data[torch.randperm(len(data))].contiguous()) == whole
    parts = []
    begin = 0
    while begin < len(data):
        end = min(len(data), begin + rng.randint(1, 2500))
        parts.append(sum_bytes(data[begin:end]))
        begin = end
    rng.shuffle(parts)
    merged = None
    for part in parts:
        merged = _C.sumsq_merge(merged, part)
    assert merged == whole
    running = None
    for piece in data.split(701):
        running = sum_bytes(piece, running)
    assert running == whole


def test_infinities_and_nans_are_counted():
    data = random_floats(5000, 100, 130, 0)
    data[17] = math.inf
    data[4000] = -math.inf
    assert _C.sumsq_value(sum_bytes(data)) == math.inf
    data[30] = math.nan
    assert math.isnan(_C.sumsq_value(sum_bytes(data)))
    merged = _C.sumsq_merge(sum_bytes(data[:20]), sum_bytes(torch.ones(4)))
    assert _C.sumsq_value(merged) == math.inf


def test_ties_of_the_rounding():
    # 2^53 + 1 is a tie; one more least square breaks it
    tie = torch.tensor([2.0**26] * 2 + [1.0], dtype=torch.float32)
    assert exact(tie) == 2.0**53
    assert _C.sumsq_value(sum_bytes(tie)) == 2.0**53
    above = torch.cat([tie, torch.tensor([2.0**-149])])
    assert exact(above) == 2.0**53 + 2
    assert _C.sumsq_value(sum_bytes(above)) == 2.0**53 + 2


def test_empty_sum_and_errors():
    assert _C.sumsq_value(_C.sumsq_merge(None, None)) == 0.0
    with pytest.raises(ValueError, match="bytes"):
        _C.sumsq_merge(b"x", None)


def test_grad_norm_of_tensors():
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(n, generator=generator) for n in (1, 100, 5000)]
    expected = math.sqrt(exact(torch.cat(tensors)))
    assert grad_norm(tensors) == expected
    assert grad_norm([*reversed(tensors), None, torch.empty(0)]) == expected
    assert grad_norm(torch.cat(tensors)) == expected
    assert grad_norm([]) == 0.0
    matrix = torch.randn(40, 50, generator=generator)
    norm = grad_norm(matrix)
    assert grad_norm(matrix.t()) == norm
    assert grad_norm([matrix[:, ::2], matrix[:, 1::2]]) == norm
    assert grad_norm(torch.nn.Parameter(matrix)) == norm
    mixed = [matrix.bfloat16(), matrix.half()]
    assert grad_norm(mixed) == math.sqrt(exact(torch.cat([t.float() for t in mixed])))
    assert norm == pytest.approx(torch.linalg.vector_norm(matrix.double()).item(), rel=1e-12)


def test_grad_norm_refuses_by_name():
    with pytest.raises(TypeError, match="sparse"):
        grad_norm(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="float64"):
        grad_norm(torch.ones(3, dtype=torch.float64))
    with pytest.raises(TypeError, match="meta"):
        grad_norm(torch.ones(3, device="meta"))


def test_flush_to_zero_of_the_caller_does_not_matter():
    data = random_floats(5000, 0, 3, 7)
    whole = sum_bytes(data)
    assert torch.set_flush_denormal(True)
    try:
        flushed = sum_bytes(data)
    finally:
        torch.set_flush_denormal(False)
    assert flushed == whole
