"""Adam's arithmetic: an oracle in exact rationals, equality of all instruction sets, and torch.

tests/c/test_adam.c compares the implementations with each other over far more inputs; here the
written reference itself is compared with csrc/arith/arith.h read anew, operation by operation.
"""

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini_strategy import _C

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LOW = {torch.float32: None, torch.bfloat16: torch.int16, torch.float16: torch.float32}
LARGEST = Fraction(2**24 - 1) * 2**104


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


@pytest.fixture(params=["scalar", "avx2", "avx512"])
def isa(request):
    """Every instruction set that this processor has; scalar in the place of one that it lacks."""
    name = request.param
    try:
        _C.isa_force(name)
    except NotImplementedError as error:
        assert name in str(error)
        name = "scalar"
        _C.isa_force(name)
    assert _C.isa_name() == name
    yield name
    _C.isa_force(None)


class Arrays:
    """Weight, low part, moments and gradient; `run` updates them."""

    def __init__(self, dtype, weight, low, m, v, grad):
        self.dtype, self.weight, self.low, self.m, self.v = dtype, weight, low, m, v
        self.grad = grad

    def clone(self):
        copies = [None if t is None else t.clone() for t in (self.weight, self.low, self.m, self.v)]
        return Arrays(self.dtype, *copies, self.grad)

    def run(self, **hyper):
        options = {
            "lr": 1e-3,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "weight_decay": 0.01,
            "step": 1,
            "adamw": True,
            "bias_correction": True,
            "grad_divisor": 1.0,
            "clip_factor": 1.0,
        } | hyper
        scalars = _C.adam_scalars(*options.values())
        _C.adam(
            -1,
            0,
            FORMATS[self.dtype],
            FORMATS[self.grad.dtype],
            self.weight.data_ptr(),
            0 if self.low is None else self.low.data_ptr(),
            self.m.data_ptr(),
            self.v.data_ptr(),
            self.grad.data_ptr(),
            [(0, self.weight.numel(), scalars)],
        )

    def equal(self, other):
        mine = (self.weight, self.low, self.m, self.v)
        theirs = (other.weight, other.low, other.m, other.v)
        return all(
            a is None or torch.equal(bits_of(a), bits_of(b))
            for a, b in zip(mine, theirs, strict=True)
        )


def random_arrays(dtype, grad_dtype, numel, seed=0, special=True):
    generator = torch.Generator().manual_seed(seed)

    def make(kind):
        values = torch.randn(numel, generator=generator).mul_(0.02)
        if kind is torch.int16:
            return torch.randint(-(2**15), 2**15, (numel,), generator=generator).to(kind)
        values = values.to(kind)
        if special:
            word = bits_of(values).dtype
            top = 2 ** (8 * values.element_size() - 1)
            noise = torch.randint(-top, top, (numel,), generator=generator).to(word)
            bits_of(values)[::3] = noise[::3]
        return values

    low = LOW[dtype] and make(LOW[dtype])
    return Arrays(
        dtype, make(dtype), low, make(torch.float32), make(torch.float32).abs_(), make(grad_dtype)
    )


KINDS = [(d, g) for d in FORMATS for g in {d, torch.float32}]


@pytest.mark.parametrize(("dtype", "grad_dtype"), KINDS)
@pytest.mark.parametrize("adamw", [True, False])
def test_every_instruction_set_gives_the_same_bits(isa, dtype, grad_dtype, adamw):
    for numel in (0, 1, 7, 8, 31, 70, 100_003):
        arrays = random_arrays(dtype, grad_dtype, numel, seed=numel)
        reference = arrays.clone()
        for step in (1, 2, 3):
            arrays.run(step=step, adamw=adamw)
        _C.isa_force("scalar")
        for step in (1, 2, 3):
            reference.run(step=step, adamw=adamw)
        _C.isa_force(isa)
        assert arrays.equal(reference)


def test_ranges_have_their_own_scalars_and_leave_the_rest_alone():
    arrays = random_arrays(torch.bfloat16, torch.bfloat16, 1000)
    before = arrays.clone()
    parts = [(10, 333), (333, 334), (500, 999)]
    scalars = [
        _C.adam_scalars(1e-3 * (i + 1), 0.9, 0.99, 1e-8, 0.0, i + 1, True, True, 2.0, 0.5)
        for i in range(3)
    ]
    ranges = [(b, e, s) for (b, e), s in zip(parts, scalars, strict=True)]
    tensors = (arrays.weight, arrays.low, arrays.m, arrays.v, arrays.grad)
    _C.adam(-1, 0, 1, 1, *(t.data_ptr() for t in tensors), ranges)
    for i, (begin, end) in enumerate(parts):
        single = before.clone()
        single.grad = before.grad
        pointers = [t.data_ptr() for t in (single.weight, single.low, single.m, single.v)]
        _C.adam(-1, 0, 1, 1, *pointers, before.grad.data_ptr(), [(begin, end, scalars[i])])
        for ours, theirs in ((arrays.weight, single.weight), (arrays.m, single.m)):
            assert torch.equal(bits_of(ours)[begin:end], bits_of(theirs)[begin:end])
    untouched = [*range(10), *range(334, 500), 999]
    for ours, theirs in ((arrays.weight, before.weight), (arrays.v, before.v)):
        assert torch.equal(bits_of(ours)[untouched], bits_of(theirs)[untouched])


# ---- the oracle: one IEEE operation at a time, in rationals ----


def to_f32(value: Fraction, negative_zero: bool = False) -> float:
    """Rounds to fp32, nearest even, denormals kept; the result is held in a Python float."""
    if value == 0:
        return -0.0 if negative_zero else 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / unit) * unit  # Python rounds halves to even
    result = math.inf if rounded > LARGEST else float(rounded)
    return -result if value < 0 else result


def is_minus(x: float) -> bool:
    return math.copysign(1.0, x) < 0


def mul(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    return to_f32(Fraction(a) * Fraction(b), is_minus(a) != is_minus(b))


def fma(a: float, b: float, c: float) -> float:
    if not all(map(math.isfinite, (a, b, c))):
        return a * b + c
    product = Fraction(a) * Fraction(b)
    minus = product == 0 and (is_minus(a) != is_minus(b)) and is_minus(c)
    return to_f32(product + Fraction(c), minus and c == 0)


def sub(a: float, b: float) -> float:
    return fma(a, 1.0, -b)


def root(a: float) -> float:
    if a != a or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    # 2^-400 units: far finer than half a unit of the result, and a root is never a tie
    scaled = math.isqrt(int(Fraction(a) * 2**800))
    exact = scaled * scaled == Fraction(a) * 2**800
    return to_f32(Fraction(2 * scaled + (0 if exact else 1), 2**401))


def div(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0):
        return math.nan
    sign = -1.0 if is_minus(a) != is_minus(b) else 1.0
    if math.isinf(a):
        return math.nan if math.isinf(b) else sign * math.inf
    if math.isinf(b):
        return sign * 0.0
    if b == 0:
        return sign * math.inf
    return to_f32(Fraction(a) / Fraction(b), sign < 0)


def oracle(p, g, m, v, step, adamw, lr=1e-3, wd=0.01, eps=1e-8, divisor=4.0, clip=0.75):
    """One element, as csrc/arith/arith.h writes it."""
    f = lambda x: to_f32(Fraction(x))  # noqa: E731
    b1, b2 = 0.9, 0.999
    g = mul(g, f(clip / divisor))
    if adamw:
        p = mul(p, f(1.0 - lr * wd))
    else:
        g = fma(f(wd), p, g)
    m = fma(sub(g, m), f(1.0 - b1), m)
    v = fma(mul(g, g), f(1.0 - b2), mul(v, f(b2)))
    d = fma(root(v), f(1.0 / math.sqrt(1.0 - b2**step)), f(eps))
    return fma(-f(lr / (1.0 - b1**step)), div(m, d), p), m, v


def word(x: float) -> int:
    """fp32 bits; a NaN is the canonical one."""
    return 0x7FC00000 if x != x else struct.unpack("<I", struct.pack("<f", x))[0]


f32 = st.floats(width=32, allow_nan=False)
small = st.floats(min_value=-1.0, max_value=1.0, width=32)
variance = st.floats(min_value=0.0, width=32, allow_nan=False)


@settings(max_examples=100)
@given(
    rows=st.lists(
        st.tuples(f32 | small, f32 | small, f32 | small, variance), min_size=1, max_size=20
    ),
    step=st.integers(1, 6),
    adamw=st.booleans(),
)
def test_the_reference_is_what_arith_h_says(rows, step, adamw):
    columns = [torch.tensor(c, dtype=torch.float32) for c in zip(*rows, strict=True)]
    p, g, m, v = columns
    arrays = Arrays(torch.float32, p.clone(), None, m.clone(), v.clone(), g)
    arrays.run(step=step, adamw=adamw, grad_divisor=4.0, clip_factor=0.75)
    for i, (pi, gi, mi, vi) in enumerate(rows):
        expected = oracle(pi, gi, mi, vi, step, adamw)
        got = (arrays.weight[i], arrays.m[i], arrays.v[i])
        assert [word(x) for x in expected] == [word(float(x)) for x in got], (i, rows[i])


@settings(max_examples=50)
@given(rows=st.lists(st.tuples(small, small, small, variance), min_size=1, max_size=20))
def test_low_parts_hold_the_same_masters(rows):
    """bf16 and fp16 weights train the fp32 parameter that an fp32 weight would train."""
    p, g, m, v = (torch.tensor(c, dtype=torch.float32) for c in zip(*rows, strict=True))
    full = Arrays(torch.float32, p.clone(), None, m.clone(), v.clone(), g)
    full.run(step=2)
    for dtype in (torch.bfloat16, torch.float16):
        weight, low = torch.empty(len(p), dtype=dtype), torch.empty(len(p), dtype=LOW[dtype])
        pointers = (p.data_ptr(), weight.data_ptr(), low.data_ptr())
        _C.split_host(FORMATS[dtype], *pointers, len(p))
        packed = Arrays(dtype, weight, low, m.clone(), v.clone(), g)
        packed.run(step=2)
        master = torch.empty_like(p)
        pointers = (weight.data_ptr(), low.data_ptr(), master.data_ptr())
        _C.merge_host(FORMATS[dtype], *pointers, len(p))
        assert torch.equal(bits_of(master), bits_of(full.weight))
        assert torch.equal(bits_of(packed.m), bits_of(full.m))
        if dtype is torch.float16:
            assert torch.equal(bits_of(weight), bits_of(full.weight.to(dtype)))


def test_zero_variance_without_eps_is_nan_everywhere(isa):
    zeros = [torch.zeros(40) for _ in range(3)]
    arrays = Arrays(torch.float32, torch.ones(40), None, *zeros)
    arrays.run(eps=0.0)
    assert bits_of(arrays.weight).tolist() == [0x7FC00000] * 40
    assert arrays.m.tolist() == [0.0] * 40


@pytest.mark.parametrize("adamw", [True, False])
def test_within_1e_6_of_torch_after_1000_steps(adamw):
    """Relative to the largest value that the weight had on its way: one that ends near zero still
    carries the roundings of where it came from, in torch as in ours. As a whole: of the norm.
    """
    torch.manual_seed(0)
    numel = 5_000
    weight = torch.randn(numel)
    arrays = Arrays(torch.float32, weight.clone(), None, *(torch.zeros(numel) for _ in range(3)))
    theirs = torch.nn.Parameter(weight.clone())
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    optimizer = kind([theirs], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    largest = weight.abs()
    for step in range(1, 1001):
        grad = torch.randn(numel) + 0.1 * weight
        arrays.grad = theirs.grad = grad
        arrays.run(step=step, adamw=adamw)
        optimizer.step()
        largest = torch.maximum(largest, theirs.detach().abs())
    difference = (arrays.weight - theirs.detach()).double()
    assert not torch.equal(arrays.weight, weight)
    each = (difference.abs() / largest).max().item()
    whole = (difference.norm() / theirs.detach().double().norm()).item()
    print(f"adamw={adamw}: after 1000 steps {each:.2e} at most per weight, {whole:.2e} of the norm")
    assert each <= 1e-6
    assert whole <= 1e-6


@settings(max_examples=80)
@given(
    values=st.lists(st.tuples(f32, f32), min_size=1, max_size=40),
    dtypes=st.tuples(st.sampled_from(list(FORMATS)), st.sampled_from(list(FORMATS))),
    accumulate=st.booleans(),
    divisor=st.sampled_from([1.0, 2.0, 8.0, 1.5, 1.25]),
)
def test_gradient_accumulation_is_what_autograd_does(values, dtypes, accumulate, divisor):
    dst_dtype, src_dtype = dtypes
    dst = torch.tensor([a for a, _ in values]).to(dst_dtype)
    src = torch.tensor([b for _, b in values]).to(src_dtype)
    share = src.float() / divisor
    total = dst.float() + share if accumulate else share
    expected = total.to(dst_dtype)
    pointers = (dst.data_ptr(), FORMATS[dst_dtype], src.data_ptr(), FORMATS[src_dtype])
    _C.grad_add_host(*pointers, len(values), accumulate, divisor)
    nan = expected.isnan()
    assert torch.equal(nan, dst.isnan())
    assert torch.equal(bits_of(dst)[~nan], bits_of(expected)[~nan])


def test_refusals_name_the_argument():
    good = [1e-3, 0.9, 0.999, 1e-8, 0.0, 1, True, True, 1.0, 1.0]
    for index, value, text in [
        (0, -1.0, "lr is -1"),
        (1, 1.0, "betas"),
        (3, math.nan, "eps"),
        (4, -0.1, "weight_decay is -0.1"),
        (5, 0, "step is 0"),
        (8, 0.0, "grad_divisor is 0"),
    ]:
        bad = good.copy()
        bad[index] = value
        with pytest.raises(ValueError, match=text):
            _C.adam_scalars(*bad)
    with pytest.raises(ValueError, match="sse9"):
        _C.isa_force("sse9")
    with pytest.raises(ValueError, match="format"):
        _C.adam(-1, 0, 1, 2, 0, 0, 0, 0, 0, [])
    with pytest.raises(ValueError, match="dtype is 7"):
        _C.adam(-1, 0, 7, 0, 0, 0, 0, 0, 0, [])
    with pytest.raises(ValueError, match="scalars are 3 bytes"):
        _C.adam(-1, 0, 0, 0, 0, 0, 0, 0, 0, [(0, 0, b"abc")])
