"""`gemini-strategy profile`: its table, its JSON and its picture from given rates, and one measurement of two ranks."""

from __future__ import annotations

import functools
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini_strategy as gs
from gemini_strategy import _C, cli
from gemini_strategy.estimates.machines import machine_of
from gemini_strategy.machine import rates
from gemini_strategy.tools import profile as profiles
from helpers.ranks import fork_context

BESIDE = {"h2d_beside", "d2h_beside", "host_adam_beside"}
MACHINE = {"host": "a", "cpu": "a processor", "gpu": "host", "threads": "3", "version": "0"}


def rank(number: int, size: int, gpu: str, kept: bool) -> dict[str, Any]:
    """Rates that tell the rank, the number of ranks and the name."""
    measured = {n: 1e9 * (i + 10 * size + number / 4) for i, n in enumerate(rates.REFERENCE, 1)}
    return {
        "machine": MACHINE | {"gpu": gpu},
        "kept": {name: value + 5e12 for name, value in measured.items()} if kept else None,
        "rates": measured,
    }


def given(monkeypatch: pytest.MonkeyPatch, gpu: str = "host", kept: bool = False) -> None:
    def measured(size: int, has_gpu: bool) -> list[dict[str, Any]]:
        assert has_gpu == (gpu != "host")
        return [rank(number, size, gpu, kept) for number in range(size)]

    monkeypatch.setattr(profiles, "_measured", measured)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu != "host")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0 if gpu == "host" else 3)
    monkeypatch.delenv("GEMINI_RATES", raising=False)


def cells(text: str) -> dict[str, dict[str, list[str]]]:
    """By part and line of the table."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in text.split("\n\n")[1:]:
        title, *lines = part.splitlines()
        found[title] = {line[:36].strip(): line[36:].split() for line in lines}
    return found


def test_table_of_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given(monkeypatch, "a GPU, driver 1", kept=True)
    file = tmp_path / "rates.json"
    assert cli.main(["profile", "--json", str(file)]) == 0  # as many ranks as GPUs
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "a processor, a GPU, driver 1"
    assert "host device" not in text
    assert text.splitlines()[1].split() == ["ranks", "at", "once", "1", "2", "3"]
    parts = cells(text)
    assert [len(lines) for lines in parts.values()] == [len(rates.REFERENCE)] * 3
    together, slowest, kept = parts.values()
    # h2d is the first: 11 of one rank; 21 and 21.25 of two; 31, 31.25 and 31.5 of three
    assert together["to the device, GB/s"] == ["11", "42.2", "93.8"]
    assert slowest["to the device, GB/s"] == ["11", "21", "31"]
    assert kept["to the device, GB/s"] == ["5.01e+03", "5.02e+03", "5.03e+03"]
    assert together["Adam beside copies, G params/s"][0] != "-"
    whole = json.loads(file.read_text())
    assert [run["ranks"] for run in whole["runs"]] == [1, 2, 3]
    for run in whole["runs"]:
        for name in rates.REFERENCE:
            assert run["total"][name] == sum(own[name] for own in run["each"])
            assert run["lowest"][name] == run["each"][0][name]
    # An estimate takes the file: the rates of one rank.
    assert machine_of("h100", file).rates == rank(0, 1, "", False)["rates"]


def test_the_host_device_says_so_and_shows_no_figure_that_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given(monkeypatch)
    file = tmp_path / "rates.json"
    assert cli.main(["profile", "--ranks", "2", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    assert "no GPU" in text
    assert "the host device is measured: copies go from host memory to host memory" in text
    together, _, kept = cells(text).values()
    shown = {name: together[title] for name, title in profiles._TITLES.items()}
    assert {name for name, row in shown.items() if row == ["-", "-"]} == BESIDE
    assert all(row == ["-", "-"] for row in kept.values())
    whole = json.loads(file.read_text())
    assert {n for n, value in whole["runs"][1]["total"].items() if value is None} == BESIDE
    with pytest.raises(ValueError):  # a GPU's figures are not to be had from it
        machine_of("h100", file)
    monkeypatch.setenv("GEMINI_RATES", "measure")
    assert cli.main(["profile"]) == 0
    assert "GEMINI_RATES is set" in capsys.readouterr().out


def test_wrong_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given(monkeypatch, "a GPU, driver 1")
    assert cli.main(["profile", "--ranks", "4"]) == 2
    assert "--ranks 4: at most 3, one for each GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["profile", "--plot", "rates.pdf"])
    assert ".svg or .png" in capsys.readouterr().err
    given(monkeypatch)
    assert cli.main(["profile", "--ranks", "0"]) == 2
    assert "--ranks 0: at least 1" in capsys.readouterr().err
    assert cli.main(["profile", "--json", str(tmp_path / "no" / "rates.json")]) == 2


def test_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given(monkeypatch)
    drawn = []
    original = profiles.draw

    def draw(empty: Any, *arguments: Any) -> None:
        original(empty, *arguments)
        drawn.append(empty)

    monkeypatch.setattr(profiles, "draw", draw)
    for suffix, begins in ((".svg", b"<?xml"), (".png", b"\x89PNG")):
        file = tmp_path / f"rates{suffix}"
        assert cli.main(["profile", "--ranks", "2", "--plot", str(file)]) == 0
        assert file.read_bytes().startswith(begins)
    copies, adam = drawn[0].axes
    lines = {line.get_label(): line for panel in (copies, adam) for line in panel.get_lines()}
    assert len(copies.get_lines()) == 4 and len(adam.get_lines()) == 2  # none of what has a dash
    assert lines["to the device"].get_xydata().tolist() == [[1, 11], [2, 42.25]]


def test_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given(monkeypatch)
    monkeypatch.setattr(profiles, "profile", lambda ranks: pytest.fail("it is said before"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'gemini-strategy\[plots\]'"):
        profiles.figure()
    assert cli.main(["profile", "--plot", "rates.svg"]) == 2
    assert "gemini-strategy[plots]" in capsys.readouterr().err


# ---- measured ------------------------------------------------------------------------------------


def measure_when_all_do(
    environment: dict[str, str], rank: int, size: int, has_gpu: bool, folder: str
) -> None:
    """In a rank's process: its measurement begins only when all others' have."""
    from gemini_strategy.tools import profile

    os.environ.clear()
    os.environ.update(environment)  # of who asked, not of who forks

    def measure(ordinal: int, threads: int, block_bytes: int) -> dict[str, float]:
        store = dist.FileStore(f"{folder}/meeting", size)
        store.set(f"rank {rank}", "measures")
        store.wait([f"rank {other}" for other in range(size)], timedelta(seconds=200))
        return rates_measure(ordinal, threads, 4 << 20)

    rates_measure, _C.rates_measure = _C.rates_measure, measure
    profile._measure(rank, size, has_gpu, folder)


def fail(rank: int, size: int, has_gpu: bool, folder: str) -> None:
    raise gs.GeminiMemoryError("HOST: no memory to measure")


def test_two_ranks_measure_at_once_and_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GEMINI_THREADS", "1")
    one = rank(0, 1, "host", False)
    machine = rates.about_machine(None, 1, 2)
    kept = dict.fromkeys(rates.REFERENCE, 1e9)
    file = tmp_path / "gemini" / rates._file_name(machine)
    rates._write(file, {"machine": machine, "rates": kept})
    before = file.read_text()
    measure = functools.partial(measure_when_all_do, dict(os.environ))
    monkeypatch.setattr(profiles, "_measure", measure)
    monkeypatch.setattr(
        *(profiles.multiprocessing, "spawn"),  # test_a_rank_that_fails has it as it is
        functools.partial(
            profiles.multiprocessing.start_processes,
            start_method=fork_context().get_start_method(),
        ),
    )
    measured = profiles._measured
    monkeypatch.setattr(profiles, "_measured", lambda n, gpu: [one] if n == 1 else measured(n, gpu))
    assert cli.main(["profile", "--ranks", "2", "--json", str(tmp_path / "rates.json")]) == 0
    assert "kept for manage(), a rank" in capsys.readouterr().out
    run = json.loads((tmp_path / "rates.json").read_text())["runs"][1]
    assert run["threads"] == [1, 1]
    assert all(0 < v < 1e14 for own in run["each"] for n, v in own.items() if n not in BESIDE)
    assert run["each"][0] != run["each"][1]
    assert run["kept"] == kept | dict.fromkeys(BESIDE)
    assert [*file.parent.iterdir()] == [file] and file.read_text() == before


def test_a_rank_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "_measure", fail)
    assert cli.main(["profile", "--ranks", "1"]) == 2
    assert "HOST: no memory to measure" in capsys.readouterr().err
