"""TorchPool: what torch allocates is counted, from every thread, and given back to the device."""

import gc
from collections.abc import Iterator

import pytest
import torch

from gemini_strategy.memory.torch_pool import TorchPool

pytestmark = pytest.mark.gpu

MIB = 2**20


class OwnPool(TorchPool):
    """Counts from what the process held when it was made: all pools of a process are counted together, and what an
    earlier test's tensors still hold is not this one's."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.earlier = super().bytes()

    def bytes(self) -> int:
        return super().bytes() - self.earlier

    def peak_bytes(self) -> int:
        return super().peak_bytes() - self.earlier


@pytest.fixture
def pool() -> Iterator[OwnPool]:
    pool = OwnPool()
    yield pool
    pool.end()
    gc.collect()
    pool.trim()
    assert pool.bytes() == 0


def test_counts_only_between_begin_and_end(pool: TorchPool) -> None:
    outside = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.bytes() == 0
    pool.begin()
    pool.begin()
    inside = torch.full((64 * MIB,), 7, dtype=torch.uint8, device="cuda")
    assert pool.bytes() == 64 * MIB
    pool.end()
    pool.end()
    later = torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.bytes() == 64 * MIB
    assert bool((inside == 7).all())
    del outside, later


def test_counts_the_thread_of_autograd(pool: TorchPool) -> None:
    x = torch.ones(16 * MIB, device="cuda", requires_grad=True)
    pool.begin()
    doubled = x * 2.0  # kept, so that backward cannot reuse its memory
    before = pool.bytes()
    doubled.sum().backward()
    assert pool.bytes() >= before + 64 * MIB
    pool.end()
    assert bool((x.grad == 2.0).all())


def test_trim_gives_back_what_is_cached_and_keeps_what_lives(pool: TorchPool) -> None:
    pool.begin()
    dead = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    alive = torch.full((32 * MIB,), 3, dtype=torch.uint8, device="cuda")
    del dead
    assert pool.bytes() == 96 * MIB  # cached
    assert pool.peak_bytes() == 96 * MIB
    pool.trim()
    assert pool.bytes() == 32 * MIB
    assert pool.peak_bytes() == 96 * MIB
    pool.reset_peak()
    assert pool.peak_bytes() == 32 * MIB
    more = torch.empty(2 * MIB, dtype=torch.uint8, device="cuda")  # still routed
    assert pool.bytes() > 32 * MIB
    assert bool((alive == 3).all())
    del alive, more


def test_prepared_segments_serve_what_comes(pool: TorchPool) -> None:
    pool.begin()
    pool.prepare([96 * MIB, 64 * MIB])
    assert pool.bytes() == 160 * MIB
    inside = [torch.empty(size * MIB, dtype=torch.uint8, device="cuda") for size in (60, 40, 50)]
    assert pool.bytes() == 160 * MIB
    more = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    assert pool.bytes() == 190 * MIB
    refusals = pool.refusals()
    pool.prepare([1 << 50])  # more than there is: nothing happens
    assert pool.bytes() == 190 * MIB
    assert pool.refusals() > refusals
    del inside, more


def test_tensors_outlive_the_pool(pool: TorchPool) -> None:
    other = TorchPool("cuda")
    other.begin()
    tensor = torch.full((48 * MIB,), 5, dtype=torch.uint8, device="cuda")
    other.end()
    del other
    gc.collect()
    assert pool.bytes() == 48 * MIB
    assert bool((tensor == 5).all())
    del tensor
    torch.cuda.empty_cache()
    assert pool.bytes() == 0


def test_needs_a_cuda_device() -> None:
    with pytest.raises(ValueError, match="device is cpu"):
        TorchPool("cpu")
