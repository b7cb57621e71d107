"""Bars of long work: what they count is what was done, whoever may see them sees them, and they end with the work."""

import io
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.checkpoint import one_file, parts
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.report import progress as module
from gemini_strategy.report.progress import nothing, progress
from helpers.ranks import run_ranks
from helpers.saving import make, train


class Terminal(io.StringIO):
    is_one = True

    def isatty(self) -> bool:
        return self.is_one


class Bar:
    """tqdm, as far as it is used."""

    made: list["Bar"]

    def __init__(self, **how: Any) -> None:
        self.how, self.updates, self.n_closed = how, [], 0
        self.made.append(self)

    def update(self, n: int) -> None:
        assert not self.n_closed
        self.updates.append(n)

    def close(self) -> None:
        self.n_closed += 1

    @property
    def is_full(self) -> bool:
        return sum(self.updates) == self.how["total"] and self.n_closed == 1


def watch(patch: pytest.MonkeyPatch) -> list[Bar]:
    """The bars that are made from now on, on a terminal (the true stderr belongs to pytest)."""
    made: list[Bar] = []
    patch.setattr("tqdm.tqdm", type("tqdm", (Bar,), {"made": made}))
    patch.setattr(module, "sys", types.SimpleNamespace(stderr=Terminal()))
    return made


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    return watch(monkeypatch)


# ---- the bar itself ----


def test_a_bar_waits_counts_bytes_and_goes(bars: list[Bar]) -> None:
    with progress("work", 10, rank=0) as done:
        done(4)
        done(6)
        assert not bars[0].n_closed
    (bar,) = bars
    assert bar.updates == [4, 6] and bar.is_full
    assert bar.how["desc"] == "work" and bar.how["unit"] == "B"
    assert bar.how["delay"] >= 2 and bar.how["file"] is module.sys.stderr


def test_tqdm_takes_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(module, "sys", types.SimpleNamespace(stderr=terminal))
    with progress("work", 10, rank=0) as done:
        done(10)
    assert terminal.getvalue() == ""  # it did not last


def test_a_bar_is_closed_when_an_error_passes(bars: list[Bar]) -> None:
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as caught, progress("work", 10, rank=0) as done:
        done(4)
        raise error
    assert caught.value is error
    assert bars[0].n_closed == 1 and bars[0].updates == [4]


@pytest.mark.parametrize("why", ["rank", "no terminal", "no stderr", "no tqdm"])
def test_nobody_watches(why: str, bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no terminal":
        monkeypatch.setattr(Terminal, "is_one", False)
    elif why == "no stderr":
        monkeypatch.setattr(module, "sys", types.SimpleNamespace(stderr=None))
    elif why == "no tqdm":
        monkeypatch.setitem(sys.modules, "tqdm", None)
    with progress("work", 10, rank=int(why == "rank")) as done:
        done(10)
    assert done is nothing and not bars


# ---- the work ----


def only(bars: list[Bar]) -> Bar:
    """The one that there is since the last time."""
    (bar,) = bars
    bars.clear()
    return bar


def weight_bytes(engine: gs.Engine) -> int:
    """Of each parameter once, as the engine has it; the empty one has none."""
    return sum(p.numel() * p.element_size() for p in engine.model.parameters())


def test_taking_saving_loading_closing(bars: list[Bar], tmp_path: Path) -> None:
    engine = make()
    bar = only(bars)
    assert bar.is_full and bar.how["total"] == weight_bytes(engine)
    train(engine, 1)
    assert only(bars).how["desc"] == "Gemini: the first step"
    train(engine, 1)
    assert not bars  # another step has none
    trained = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in engine.model.parameters() if not p.requires_grad)
    engine.save(tmp_path / "a")
    bar = only(bars)
    assert bar.is_full and bar.how["total"] == 12 * trained + 4 * frozen
    engine.load(tmp_path / "a")
    bar = only(bars)
    assert bar.is_full and bar.how["total"] == 2 * (12 * trained + 4 * frozen)
    engine.save(tmp_path / "b", background=True).wait()
    assert not bars  # written in a thread
    engine.close()
    bar = only(bars)
    assert bar.is_full and bar.how["total"] == 12 * trained + 4 * frozen


@pytest.mark.parametrize("with_states", [True, False])
def test_closing_in_fp32(with_states: bool, bars: list[Bar]) -> None:
    engine = make()
    train(engine, 1)
    trained = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in engine.model.parameters() if not p.requires_grad)
    bars.clear()
    engine.close(dtype=torch.float32, with_states=with_states)
    bar = only(bars)
    assert bar.is_full
    assert bar.how["total"] == (12 if with_states else 4) * trained + 4 * frozen


class Steps(nn.Module):
    """Three modules with parameters, one of them frozen, and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = self.c(self.b(self.a(self.a(x))))
        if fails:
            raise OSError("no more data")
        return x.square().mean()


def managed_steps() -> gs.Engine:
    torch.manual_seed(0)
    model = Steps()
    return gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")


def test_tracing_is_refused_by_name_while_the_first_step_is_watched(bars: list[Bar]) -> None:
    with (
        managed_steps() as engine,
        pytest.raises(gs.GeminiError, match="^a: a managed model has no code"),
    ):
        torch.jit.trace(engine.model, torch.ones(2, 8))


def test_each_pass_of_the_first_step_has_a_bar(bars: list[Bar]) -> None:
    engine = managed_steps()
    bars.clear()
    x = torch.ones(2, 8)
    with torch.no_grad():
        engine.model(x)
    assert not bars
    loss = engine.model(x)
    (bar,) = bars
    assert bar.how["total"] == 3 + 2 and bar.how["unit"].strip() == "modules"
    assert bar.updates == [1] * 3 and not bar.n_closed
    loss.backward()
    assert bar.updates == [1] * 5 and not bar.n_closed
    engine.backward(engine.model(x))
    assert bar.is_full
    assert bars[1].how["desc"] == "Gemini: the first step, pass 2"
    engine.optimizer.step()
    assert bars[1].is_full and len(bars) == 2
    engine.backward(engine.model(x))
    assert len(bars) == 2 and engine._runtime.takes_plainly
    assert not any("enter" in vars(unit) for unit in engine._runtime.units)
    engine.close()


@pytest.mark.parametrize("where", ["forward", "backward", "close"])
def test_a_first_step_that_does_not_end(where: str, bars: list[Bar]) -> None:
    engine = managed_steps()
    bars.clear()
    x = torch.ones(2, 8)
    if where == "forward":
        with pytest.raises(OSError, match="no more data"):
            engine.model(x, fails=True)
    elif where == "backward":
        loss = engine.model(x)
        engine.model.c.weight.register_hook(fails)
        with pytest.raises(OSError, match="no space left"):
            engine.backward(loss)
    else:
        engine.model(x)
        engine.close()
    assert bars[0].n_closed == 1 and not bars[0].is_full
    engine.close()


def test_who_watches_gets_the_same_bits(bars: list[Bar], monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for is_one in (True, False):
        monkeypatch.setattr(Terminal, "is_one", is_one)
        bars.clear()
        engine = managed_steps()
        assert bool(engine._runtime.first_step) == is_one
        for _ in range(2):
            engine.backward(engine.model(torch.ones(2, 8)))
            engine.clip_grad_norm_(0.1)
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        engine.close()
        found.append([p.detach().clone() for p in engine.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class Mlp(nn.Module):
    """`hidden` is in the file, `head` is not, `scale` has values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 16)
        self.head = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(5, device="cpu"))


def test_weights_of_files_initial_ones_and_own_ones(bars: list[Bar], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({f"hidden.{k}": v for k, v in nn.Linear(16, 16).state_dict().items()}, tmp_path / "f")
    with torch.device("meta"):
        model = Mlp()
    engine = gs.manage(model, weights=tmp_path / "f", missing="init", device="cpu")
    bar = only(bars)
    assert bar.is_full and bar.how["total"] == 4 * (2 * 17 * 16 + 5)
    assert len(bar.updates) == 5
    engine.close()


def test_one_file_and_a_folder_for_others(bars: list[Bar], tmp_path: Path) -> None:
    engine = gs.manage(Mlp(), device="cpu", precision="bf16-true")
    bars.clear()
    one_file.write({"a": torch.zeros(7, 3), "b": torch.ones(4)}, tmp_path / "file")
    bar = only(bars)
    assert bar.is_full and bar.how["total"] == 4 * (21 + 4)
    engine.save_pretrained(tmp_path / "folder", dtype=torch.float32)
    bar = only(bars)
    assert bar.is_full and bar.how["total"] == 4 * (2 * 17 * 16 + 5)
    engine.close()


def fails(*args: Any) -> Any:
    raise OSError(28, "no space left")


@pytest.mark.parametrize("what", ["saving", "closing", "taking"])
def test_bars_of_work_that_fails(
    what: str, bars: list[Bar], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "taking":
        monkeypatch.setattr(Slot, "fill", fails)
        with pytest.raises(OSError, match="no space"):
            make()
    else:
        engine = make()
        bars.clear()
        act: Callable[[], object] = engine.close
        with monkeypatch.context() as patch:
            if what == "saving":
                patch.setattr(parts.Part, "add", fails)
                act = lambda: engine.save(tmp_path / "a")  # noqa: E731
            else:
                patch.setattr(Slot, "_read", fails)
            with pytest.raises((OSError, gs.GeminiError), match="no space"):
                act()
    bar = only(bars)
    assert bar.n_closed == 1 and not bar.is_full


def watched_rank(rank: int, size: int, folder: str) -> list[tuple[int, bool]]:
    with pytest.MonkeyPatch.context() as patch:
        bars = watch(patch)
        engine = gs.manage(Mlp(), device="cpu")
        engine.save(Path(folder) / "a")
        engine.save_pretrained(Path(folder) / "b")
        engine.close()
        return [(bar.how["total"], bar.is_full) for bar in bars]


def test_only_the_first_rank_shows_its_part(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, watched_rank, str(tmp_path))
    assert first.error is None and second.error is None, (first.error, second.error)
    assert second.value == []
    whole = 4 * (2 * 17 * 16 + 5)
    *parts_of_first, closing = first.value
    assert closing == (whole, True)  # every rank gets the whole model back
    assert len(parts_of_first) == 3
    for total, is_full in parts_of_first:
        assert is_full and 0 < total < whole
