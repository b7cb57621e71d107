"""The rates of a machine with a GPU: plausible, repeatable, about a second, and nothing is kept."""

import time

import pytest
import torch

from gemini_strategy import _C
from gemini_strategy.machine.rates import REFERENCE, machine_rates

pytestmark = pytest.mark.gpu

BLOCK_BYTES = 32 << 20


def test_rates_of_this_machine() -> None:
    torch.zeros(1, device="cuda")  # the context is torch's, and not part of the time
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    begin = time.perf_counter()
    first = _C.rates_measure(0, 0, BLOCK_BYTES)
    took = time.perf_counter() - begin
    assert torch.cuda.mem_get_info()[0] >= free - (8 << 20)
    second = _C.rates_measure(0, 0, BLOCK_BYTES)
    print(f"{took:.2f} s", {name: f"{value:.3g}" for name, value in first.items()})
    assert took < 5
    assert first.keys() == REFERENCE.keys()
    for name, value in first.items():
        assert 0.4 < value / second[name] < 2.5, (name, value, second[name])
    for way in ("h2d", "d2h"):
        # no bus is faster than this, and sharing makes nothing faster
        assert 1e9 < first[way] < 1e12
        assert first[f"{way}_beside"] <= first[f"{way}_both"] <= first[way]
    assert first["host_adam_beside"] <= first["host_adam"]
    assert first["device_adam"] > first["host_adam"]


def test_one_small_block_is_enough() -> None:
    found = _C.rates_measure(0, 2, 2 << 20)
    assert all(value > 0 for value in found.values())


def test_no_such_gpu() -> None:
    with pytest.raises(ValueError, match="cuda:4096"):
        _C.rates_measure(4096, 0, BLOCK_BYTES)


def test_kept_for_the_next_process(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GEMINI_RATES", "measure")
    monkeypatch.setattr("gemini_strategy.machine.rates._measured", {})
    measured = machine_rates(0)
    monkeypatch.delenv("GEMINI_RATES")
    monkeypatch.setattr("gemini_strategy.machine.rates._measured", {})
    assert machine_rates(0) == measured
    (file,) = (tmp_path / "gemini").iterdir()
    assert torch.cuda.get_device_name(0) in file.read_text()
