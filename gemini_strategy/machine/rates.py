"""The rates of this machine: measured once, kept per machine, replaced by hand where wished.

`machine_rates` measures for about a second (see `gemini_strategy._C.rates_measure`) and keeps the figures in
`$XDG_CACHE_HOME/gemini` (`~/.cache/gemini` where that is not set), one file per machine. What counts as the
machine: host name, processor, GPU and driver, threads, the ranks on it, and the version of this package. A file
that cannot be read, or that is about something else, is measured again; a folder that cannot be written costs the
second at the next start, and nothing else.

`GEMINI_RATES` overrides this:

* `measure`: measure anew (once per process), and keep the result;
* `h2d=26e9,d2h=25e9`: these figures, in bytes/s and parameters/s, and nothing is measured. What is not
  named follows `REFERENCE`, in proportion where it belongs to a figure that is named (`h2d_both` and
  `h2d_beside` to `h2d`, and so on);
* the path of a JSON file with one object of such figures: the same, from a file.

What Adam does on the host in a step differs from what it does in that second. Beside a GPU a plan that is made
again is therefore made from the figure that the steps before it have shown, for this run alone, unless figures
were given; `GEMINI_TUNE=0` or `1` decides otherwise.
"""

import hashlib
import json
import math
import os
import platform
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gemini_strategy import _C, _torch
from gemini_strategy._version import __version__
from gemini_strategy.ranks.ranks import Ranks

BLOCK_BYTES = 32 << 20  # of the device's memory while it is measured

#: Measured on one NVIDIA H200 with 16 cores of its host, PCIe Gen5: bytes/s and parameters/s.
REFERENCE: dict[str, float] = {
    "h2d": 55e9,
    "d2h": 54e9,
    "h2d_both": 45e9,
    "d2h_both": 50e9,
    "host_adam": 5.3e9,
    "host_adam_beside": 3.5e9,
    "h2d_beside": 31e9,
    "d2h_beside": 49e9,
    "device_adam": 151e9,
}

_measured: dict[str, dict[str, float]] = {}  # by file name; one measurement per process and machine


def machine_rates(
    ordinal: int | None,
    threads: int = 0,
    block_bytes: int = BLOCK_BYTES,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """The rates of this machine, all positive: copies in bytes/s, Adam in parameters/s (bf16).

    Args:
        ordinal: CUDA device index; None for the host device.
        threads: threads of Adam on the host; 0: as many as this process has cores, or GEMINI_THREADS.
        block_bytes: block size of the device's memory while it is measured.
        ranks: of several ranks all call this; those of one host measure at the same time, and the lowest figures of
            all ranks are everybody's.

    Returns:
        The keys of `REFERENCE`: alone, `_both` (both ways at once), `_beside` (both ways beside Adam on
        the host).

    Raises:
        ValueError: GEMINI_RATES is neither a file nor figures, or names an unknown or impossible figure.
        GeminiMemoryError: no memory for the measurement.
    """
    wish = os.environ.get("GEMINI_RATES", "")
    if wish and wish != "measure":
        return _lowest([_given(wish)] if ranks is None else ranks.gather("rates", _given(wish)))
    machine = about_machine(ordinal, threads, 1 if ranks is None else ranks.local_size)
    name, folder = _file_name(machine), _folder()
    kept = _measured.get(name)
    if kept is None and wish != "measure" and folder:
        kept = _read(folder / name, machine)
    # Those of a host measure together, or not at all; this is also where they wait for each other.
    is_kept = [kept is not None]
    if not all(is_kept if ranks is None else ranks.gather_here("kept rates", is_kept[0])):
        kept = _C.rates_measure(-1 if ordinal is None else ordinal, threads, block_bytes)
        if ranks is not None:
            kept = _lowest(ranks.gather_here("measured rates", kept))
        if folder and (ranks is None or ranks.local_rank == 0):
            _write(folder / name, {"machine": machine, "rates": kept})
    _measured[name] = kept
    return _lowest([kept] if ranks is None else ranks.gather("rates", kept))


def kept_rates(ordinal: int | None, threads: int = 0, n_ranks: int = 1) -> dict[str, float] | None:
    """What `machine_rates` has kept of a machine with so many ranks; None: nothing. Does not measure."""
    machine, folder = about_machine(ordinal, threads, n_ranks), _folder()
    return _read(folder / _file_name(machine), machine) if folder else None


def _file_name(machine: Mapping[str, str]) -> str:
    return f"rates-{hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]}.json"


def _lowest(everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The lowest of the ranks' figures: a plan is as slow as the slowest of them."""
    return {name: min(own[name] for own in everyone) for name in everyone[0]}


def are_tuned(has_gpu: bool) -> bool:
    """Whether steps correct the rates."""
    wish = os.environ.get("GEMINI_TUNE", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"GEMINI_TUNE is {wish!r}: set it to 0 or 1, or not at all")
    is_measured = os.environ.get("GEMINI_RATES", "") in ("", "measure")
    return wish == "1" if wish else has_gpu and is_measured


def _given(wish: str) -> dict[str, float]:
    """What GEMINI_RATES says, completed from REFERENCE."""
    if os.path.isfile(wish):  # noqa: PTH113 - Path.is_file raises where a name is too long
        try:
            figures = json.loads(Path(wish).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"GEMINI_RATES: {wish} is no JSON file: {error}") from error
    elif "=" in wish:
        pairs = (part.partition("=") for part in wish.split(",") if part.strip())
        figures = {name.strip(): text.strip() for name, _, text in pairs}
    else:
        raise ValueError(
            f"GEMINI_RATES is {wish!r}: no file has that name, and it is not of the form "
            "h2d=26e9,d2h=25e9; set it to one of these, to measure, or not at all"
        )
    if not isinstance(figures, dict):
        raise ValueError(f"GEMINI_RATES: {wish} holds no object of figures")
    return completed(figures, REFERENCE)


def completed(figures: Mapping[str, Any], others: Mapping[str, float]) -> dict[str, float]:
    """Figures as a person gave them, with `others` for the rest, in proportion where they belong to one that is given.

    Raises:
        ValueError: one is unknown, or no positive number.
    """
    given = {name: _figure(name, value) for name, value in figures.items()}
    rates = {}
    for name, other in others.items():
        base = re.sub("_(both|beside)$", "", name)
        ratio = given.get(base, others[base]) / others[base]
        rates[name] = given.get(name, other * ratio)
    return rates


def _figure(name: str, value: Any) -> float:
    if name not in REFERENCE:
        raise ValueError(
            f"GEMINI_RATES or rates=: {name!r} is no rate; they are {', '.join(REFERENCE)}"
        )
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ValueError(
            f"GEMINI_RATES or rates=: {name} is {value!r}; it must be a positive number"
        )
    return number


def about_machine(ordinal: int | None, threads: int, n_ranks: int) -> dict[str, str]:
    """What the rates depend on; "gpu" is "host" for the host device."""
    wished = os.environ.get("GEMINI_THREADS", "")
    cores = threads or (int(wished) if wished.isdecimal() else len(os.sched_getaffinity(0)))
    gpu = "host"
    if ordinal is not None:
        gpu = f"{torch.cuda.get_device_name(ordinal)}, driver {_driver()}"
    machine = {
        "host": platform.node(),
        "cpu": cpu_name(),
        "gpu": gpu,
        "threads": str(cores),
        "version": __version__,
    }
    if n_ranks > 1:
        machine["ranks"] = str(n_ranks)
    return machine


def cpu_name() -> str:
    """As the kernel tells it."""
    text = _text("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _driver() -> str:
    """The GPU driver's version, or that of the CUDA that it offers."""
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _text("/proc/driver/nvidia/version"))
    return found.group(1) if found else _torch.driver_version()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _folder() -> Path | None:
    """Where figures are kept; None without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if cache.is_absolute():  # others are to be ignored, says the specification of these folders
        return cache / "gemini"
    try:
        return Path.home() / ".cache" / "gemini"
    except RuntimeError:
        return None


def _read(path: Path, machine: Mapping[str, str]) -> dict[str, float] | None:
    """The rates that a file holds; None unless it is whole and about this machine."""
    try:
        kept = json.loads(path.read_text())
        if kept["machine"] != machine or kept["rates"].keys() != REFERENCE.keys():
            return None
        return {name: _figure(name, value) for name, value in kept["rates"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """In one step, so that a reader never meets half a file; does without where it may not write."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                json.dump(content, file, indent=1)
                file.flush()
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
    except OSError:
        return
