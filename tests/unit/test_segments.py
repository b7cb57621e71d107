"""The replay of torch's allocator, and segments chosen with it."""

from __future__ import annotations

import random

import pytest

from gemini_strategy.memory.segments import (
    Event,
    choose_segments,
    events_of,
    missing_bytes,
    staying_bytes,
)

MIB = 1 << 20


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, int | str]:
    return {"action": action, "addr": address, "size": size, "stream": stream}


def test_events_are_large_tensors_of_the_stream_that_began_in_the_record() -> None:
    entries = [
        entry("segment_alloc", 0, 20 * MIB),
        entry("alloc", 0, 3 * MIB + 1),
        entry("alloc", 100, MIB),  # small
        entry("alloc", 200, 5 * MIB, stream=7),
        entry("free_requested", 0, 3 * MIB + 1),
        entry("free_completed", 0, 3 * MIB + 1),
        entry("free_completed", 300, 9 * MIB),  # began before the record
        entry("alloc", 0, 2 * MIB),  # the same address again
        entry("alloc", 400, 8 * MIB),  # lives on
        entry("free_completed", 0, 2 * MIB),
    ]
    first, second, last = (events_of(entries, 0)[i][0] for i in (0, 2, 3))
    assert len({first, second, last}) == 3
    assert events_of(entries, 0) == [
        (first, 3 * MIB + 512),
        (first, 0),
        (second, 2 * MIB),
        (last, 8 * MIB),
        (second, 0),
    ]
    assert [size for _, size in events_of(entries, 7)] == [5 * MIB]


def test_segments_are_of_the_tensors_own_size_from_10_mib_on() -> None:
    assert missing_bytes([(0, 3 * MIB), (0, 0)], []) == 20 * MIB
    assert missing_bytes([(0, 11 * MIB), (0, 0)], []) == 12 * MIB
    together = [(0, 3 * MIB), (1, 4 * MIB), (0, 0), (1, 0)]
    assert missing_bytes(together, []) == 20 * MIB
    after_another = [(0, 100 * MIB), (0, 0), (1, 101 * MIB), (1, 0)]
    assert missing_bytes(after_another, []) == 202 * MIB
    assert missing_bytes(after_another, [102 * MIB]) == 0


def test_the_smallest_block_serves_and_neighbours_grow_together() -> None:
    events = [(0, 10 * MIB), (1, 20 * MIB), (0, 0), (1, 0), (2, 30 * MIB), (2, 0)]
    assert missing_bytes(events, [30 * MIB]) == 0
    assert missing_bytes(events, [30 * MIB, 10 * MIB]) == 0  # 0 goes into the second one
    kept_between = [(0, 10 * MIB), (1, 20 * MIB), (0, 0), (2, 12 * MIB), (1, 0), (2, 0)]
    assert missing_bytes(kept_between, [30 * MIB]) == 12 * MIB
    assert missing_bytes(kept_between, [32 * MIB, 10 * MIB]) == 0


def test_a_rest_of_one_mib_is_not_cut_off() -> None:
    events = [(0, 9 * MIB), (1, MIB + 512), (0, 0), (1, 0)]
    assert missing_bytes(events, [10 * MIB]) == 20 * MIB
    assert missing_bytes(events, [10 * MIB + 1024]) == 0


def step_of(layers: int, logits: int) -> list[Event]:
    """A forward that keeps its layers' inputs, large tensors at the loss, the layers again backwards."""
    events: list[Event] = []
    n = 0

    def begin(size: int) -> int:
        nonlocal n
        n += 1
        events.append((n, size * MIB))
        return n

    def layer() -> None:
        inner = [begin(8), begin(24), begin(32), begin(32)]
        events.extend((tensor, 0) for tensor in inner)

    kept = []
    for _ in range(layers):
        kept.append(begin(8))
        layer()
    large = [begin(logits // 2), begin(logits), begin(logits), begin(logits)]
    events.extend((tensor, 0) for tensor in large)
    for tensor in reversed(kept):
        layer()
        events.append((tensor, 0))
    return events


@pytest.mark.parametrize(("layers", "logits"), [(4, 200), (16, 206), (40, 60)])
def test_chosen_segments_serve_the_step_in_less(layers: int, logits: int) -> None:
    events = step_of(layers, logits)
    peak = layers * 8 * MIB + max(96, 7 * logits // 2) * MIB
    sizes = choose_segments(events)
    assert 1 <= len(sizes) <= 2
    assert missing_bytes(events, sizes) == 0
    assert missing_bytes(events * 1 + [(t + 10**6, s) for t, s in events], sizes) == 0
    assert sum(sizes) <= 1.13 * peak
    assert sum(sizes) < missing_bytes(events, [])


@pytest.mark.parametrize("at", [0, 5, 11])
def test_what_a_step_leaves_is_in_the_way_of_the_next(at: int) -> None:
    """Steps one after the other, each with a tensor of the one before somewhere in the segments."""
    events = step_of(12, 206)
    kept = [tensor for tensor, size in events if size == 8 * MIB][2 * at]  # a layer's input
    events.remove((kept, 0))
    sizes = choose_segments(events)
    assert sizes
    steps: list[Event] = []
    for step in range(6):
        for tensor, size in events:
            steps.append((1000 * step + tensor, size))
            if tensor == kept and size and step:  # the loop's name for it is given to the new one
                steps.append((1000 * (step - 1) + tensor, 0))
    assert missing_bytes(steps, sizes) == 0
    forgotten = choose_segments([*events, (kept, 0)])  # as if it had ended with the step
    if at == 11:  # the last layer's input, with the large tensors beside it
        assert missing_bytes(steps, forgotten) > 0


def test_bytes_that_a_pool_cannot_give_back() -> None:
    def segment(
        pool: tuple[int, int], allocated: int, device: int = 0, pending: int = 0
    ) -> dict[str, object]:
        size = {"total_size": 100 * MIB, "allocated_size": allocated}
        size["active_size"] = allocated + pending
        return {"device": device, "segment_pool_id": pool, **size}

    segments = [
        segment((0, 1), 0),
        segment((0, 1), 512),
        segment((0, 2), 64 * MIB),
        segment((0, 2), 0, pending=64 * MIB),  # gone, after another stream used it
        segment((0, 0), 64 * MIB),  # torch's own
        segment((0, 1), MIB, device=1),
    ]
    assert staying_bytes(segments, 0) == 200 * MIB


def test_random_events_never_overlap_and_the_choice_holds() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        events: list[Event] = []
        alive: list[int] = []
        for tensor in range(300):
            events.append((tensor, dice.randrange(2, 90) * MIB))
            alive.append(tensor)
            while alive and dice.random() < 0.48:
                events.append((alive.pop(dice.randrange(len(alive))), 0))
        events += [(tensor, 0) for tensor in alive]
        sizes = choose_segments(events)
        if sizes:
            assert missing_bytes(events, sizes) == 0
            assert sum(sizes) < missing_bytes(events, [])


def test_nothing_to_gain() -> None:
    assert choose_segments([]) == []
    assert choose_segments([(0, 64 * MIB), (0, 0)]) == []
