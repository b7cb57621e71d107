"""The machine's rates: measured once, kept per machine, measured again when the file is no good, and
replaced by GEMINI_RATES."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gemini_strategy import _C
from gemini_strategy.machine import rates

MEASURED = {name: 1e9 + i for i, name in enumerate(rates.REFERENCE)}


class Machine:
    """A machine whose measurements are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.cache = cache
        monkeypatch.setattr(rates, "_C", SimpleNamespace(rates_measure=self.measure))
        monkeypatch.setattr(rates, "_measured", {})
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.delenv("GEMINI_RATES", raising=False)
        monkeypatch.delenv("GEMINI_THREADS", raising=False)

    def measure(self, ordinal: int, threads: int, block_bytes: int) -> dict[str, float]:
        self.calls.append((ordinal, threads, block_bytes))
        return {name: value + len(self.calls) for name, value in MEASURED.items()}

    def restart(self) -> None:
        """As a new process would begin."""
        rates._measured.clear()

    def files(self) -> list[Path]:
        return sorted((self.cache / "gemini").iterdir())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path / "cache")


def test_measured_once_and_kept(machine: Machine) -> None:
    first = rates.machine_rates(None, 2, 4 << 20)
    assert first == {name: value + 1 for name, value in MEASURED.items()}
    assert machine.calls == [(-1, 2, 4 << 20)]
    first["h2d"] = 0  # the caller's own
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 1
    machine.restart()
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 1
    assert len(machine.calls) == 1
    assert len(machine.files()) == 1  # and no temporary file


def test_another_machine_has_its_own_figures(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = rates.machine_rates(None, 2)
    three = rates.machine_rates(None, 3)
    assert two != three
    monkeypatch.setattr(rates.platform, "node", lambda: "elsewhere")
    rates.machine_rates(None, 2)
    monkeypatch.setattr("gemini_strategy.machine.rates.__version__", "0.0.0")
    rates.machine_rates(None, 2)
    monkeypatch.setattr(rates, "cpu_name", lambda: "another processor")
    rates.machine_rates(None, 2)
    monkeypatch.setenv("GEMINI_THREADS", "7")
    rates.machine_rates(None, 0)
    rates.machine_rates(None, 7)
    assert len(machine.calls) == len(machine.files()) == 6


def test_the_gpu_and_its_driver_are_part_of_the_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates.torch.cuda, "get_device_name", lambda ordinal: f"GPU {ordinal}")
    monkeypatch.setattr(rates, "_driver", lambda: "580.1")
    rates.machine_rates(0, 2)
    rates.machine_rates(1, 2)
    monkeypatch.setattr(rates, "_driver", lambda: "590.1")
    rates.machine_rates(0, 2)
    rates.machine_rates(None, 2)
    assert [ordinal for ordinal, _, _ in machine.calls] == [0, 1, 0, -1]


def test_driver_version_from_the_kernel_module(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
    monkeypatch.setattr(rates, "_text", lambda path: text)
    assert rates._driver() == "580.159.04"


BAD_FILES = {
    "empty": "",
    "no JSON": "h2d 1",
    "cut off": '{"machine": {"host": "a"}, "rat',
    "a list": "[1, 2]",
    "a number": "1",
    "no bytes of text": b"\xff\xfe\x00",
    "rates only": json.dumps({"rates": MEASURED}),
    "rates are no object": json.dumps({"machine": None, "rates": [1]}),
}


@pytest.mark.parametrize("content", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_measured_again(machine: Machine, content: str | bytes) -> None:
    rates.machine_rates(None, 2)
    (file,) = machine.files()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    machine.restart()
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 2
    machine.restart()
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 2
    assert machine.files() == [file]


@pytest.mark.parametrize("change", ["machine", "missing", "more", "zero", "nan", "text"])
def test_a_foreign_file_is_measured_again(machine: Machine, change: str) -> None:
    rates.machine_rates(None, 2)
    (file,) = machine.files()
    content = json.loads(file.read_text())
    if change == "machine":
        content["machine"]["host"] = "elsewhere"
    elif change == "missing":
        del content["rates"]["d2h"]
    elif change == "more":
        content["rates"]["more"] = 1.0
    else:
        content["rates"]["d2h"] = {"zero": 0, "nan": float("nan"), "text": "fast"}[change]
    file.write_text(json.dumps(content))
    machine.restart()
    assert rates.machine_rates(None, 2)["d2h"] == MEASURED["d2h"] + 2


def test_a_folder_that_cannot_be_written_costs_only_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 1
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 1  # once per process
    machine.restart()
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 2
    assert in_the_way.read_text() == ""


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise PermissionError(f"{target}: read-only")

    monkeypatch.setattr(Path, "replace", refuse)
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 1
    assert machine.files() == []


def test_where_it_is_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for cache in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        rates.machine_rates(None, 2)
        assert len(list((tmp_path / ".cache" / "gemini").glob("rates-*.json"))) == 1
    assert len(machine.calls) == 1

    def no_home() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", no_home)
    machine.restart()
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 2


def test_measure_refreshes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    rates.machine_rates(None, 2)
    machine.restart()
    monkeypatch.setenv("GEMINI_RATES", "measure")
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 2
    machine.restart()
    monkeypatch.delenv("GEMINI_RATES")
    assert rates.machine_rates(None, 2)["h2d"] == MEASURED["h2d"] + 2
    assert len(machine.calls) == 2


def test_given_figures(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=11e9, d2h_both=7e9,")
    given = rates.machine_rates(0)
    assert given["h2d"] == 11e9
    assert given["d2h_both"] == 7e9
    in_proportion = 11e9 / rates.REFERENCE["h2d"]
    for name in ("h2d_both", "h2d_beside"):
        assert given[name] == pytest.approx(rates.REFERENCE[name] * in_proportion, rel=1e-12)
    for name in ("d2h", "d2h_beside", "host_adam", "host_adam_beside", "device_adam"):
        assert given[name] == rates.REFERENCE[name]
    assert given.keys() == rates.REFERENCE.keys()
    everything = ",".join(f"{name}={1e10 / 3:.30f}" for name in rates.REFERENCE)
    monkeypatch.setenv("GEMINI_RATES", everything)  # longer than a file's name may be
    assert set(rates.machine_rates(0).values()) == {1e10 / 3}
    assert machine.calls == []
    assert not machine.cache.exists()


def test_given_file(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "rates=mine.json"
    file.write_text(json.dumps(MEASURED))
    monkeypatch.setenv("GEMINI_RATES", str(file))
    assert rates.machine_rates(0) == MEASURED
    assert machine.calls == []
    file.write_text("[")
    with pytest.raises(ValueError, match="no JSON file"):
        rates.machine_rates(0)
    file.write_text("[1]")
    with pytest.raises(ValueError, match="no object of figures"):
        rates.machine_rates(0)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ("nowhere.json", "no file has that name"),
        ("n" * 300, "no file has that name"),
        ("h2h=1", "'h2h' is no rate; they are h2d, d2h"),
        ("h2d=0", "h2d is '0'; it must be a positive number"),
        ("h2d=-5e9", "must be a positive number"),
        ("h2d=inf", "must be a positive number"),
        ("h2d=nan", "must be a positive number"),
        ("h2d=fast", "h2d is 'fast'"),
        ("h2d=1e9,d2h", "d2h is ''"),
    ],
)
def test_wrong_wishes_are_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, wish: str, words: str
) -> None:
    monkeypatch.setenv("GEMINI_RATES", wish)
    with pytest.raises(ValueError, match=words):
        rates.machine_rates(None)
    assert machine.calls == []


def test_measurement_of_the_host() -> None:
    found = _C.rates_measure(-1, 2, 4 << 20)
    assert found.keys() == rates.REFERENCE.keys()
    assert all(0 < value < 1e14 for value in found.values())
    with pytest.raises(ValueError, match="block_bytes is 0"):
        _C.rates_measure(-1, 2, 0)
