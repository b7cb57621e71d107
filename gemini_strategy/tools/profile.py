"""`gemini-strategy profile`: the rates of this machine with 1 to N ranks on it at once, beside those that are kept.

For each number of ranks as many processes are started. Each takes its share of the host as under manage(), and when all
have, all begin to measure: copies and Adam, for about a second (see `gemini_strategy._C.rates_measure`). Within that
second each goes on at its own pace, as in manage(). Nothing is kept.

Invariants
    1. A figure that was not measured is None, and is shown as a dash. On the host device work is done when it is
       issued, so nothing runs beside anything else there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from gemini_strategy import _C
from gemini_strategy.errors import GeminiError
from gemini_strategy.machine.host import pci_bus_id, place, share_of_host
from gemini_strategy.machine.rates import BLOCK_BYTES, REFERENCE, about_machine, kept_rates
from gemini_strategy.ranks.ranks import Ranks
from gemini_strategy.tools.plots import FORMATS, draw, figure

_BESIDE = tuple(name for name in REFERENCE if name.endswith("_beside"))
_TITLES = {
    "h2d": "to the device, GB/s",
    "d2h": "to the host, GB/s",
    "h2d_both": "both ways, to the device, GB/s",
    "d2h_both": "both ways, to the host, GB/s",
    "h2d_beside": "beside Adam, to the device, GB/s",
    "d2h_beside": "beside Adam, to the host, GB/s",
    "host_adam": "Adam on the host, G params/s",
    "host_adam_beside": "Adam beside copies, G params/s",
    "device_adam": "Adam on the device, G params/s",
}
_FAILURES = (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException)
Rates = Mapping[str, float | None]


@dataclass(frozen=True)
class Run:
    """What so many ranks have measured at the same time; all rates have the keys of `rates.REFERENCE`.

    Attributes:
        ranks: how many.
        threads: of Adam on the host, of each rank.
        each: the rates of each rank.
        kept: of each of so many ranks, as manage() has kept them for this machine; None: it has not.
    """

    ranks: int
    threads: tuple[int, ...]
    each: tuple[Rates, ...]
    kept: Rates | None

    def total(self) -> Rates:
        """All ranks together: the sum."""
        return self._of_each(sum)

    def lowest(self) -> Rates:
        """Of the slowest rank, which is what manage() plans with."""
        return self._of_each(min)

    def _of_each(self, over: Any) -> Rates:
        columns = {name: [own[name] for own in self.each] for name in REFERENCE}
        return {name: None if None in c else over(c) for name, c in columns.items()}


@dataclass(frozen=True)
class Profile:
    """The runs of one machine, whose `gpu` is "host" for the host device."""

    machine: Mapping[str, str]
    runs: tuple[Run, ...]

    def as_json(self) -> dict[str, Any]:
        """The runs with their totals. Of a GPU also "rates", those of one rank, for `estimate --rates FILE`."""
        runs = [{**asdict(run), "total": run.total(), "lowest": run.lowest()} for run in self.runs]
        whole: dict[str, Any] = {"machine": dict(self.machine), "runs": runs}
        if self.machine["gpu"] != "host":
            whole["rates"] = self.runs[0].lowest()
        return whole


def _measure(rank: int, size: int, has_gpu: bool, folder: str) -> None:
    """One rank of a run, in a process of its own; the first one writes what all have found."""
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    ranks = Ranks()
    device = torch.device("cuda", rank) if has_gpu else torch.device("cpu")
    ordinal = rank if has_gpu else None
    places = ranks.gather_here("place on the host", place(pci_bus_id(device)))
    share = share_of_host(places, ranks.local_rank, has_gpu=has_gpu)
    share.use()
    own: dict[str, Any] = {
        "machine": about_machine(ordinal, share.threads, size),
        "kept": kept_rates(ordinal, share.threads, size),
    }
    ranks.gather_here("all are ready")
    own["rates"] = _C.rates_measure(rank if has_gpu else -1, share.threads, BLOCK_BYTES)
    everyone = ranks.gather_here("measured rates", own)
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(everyone))
    ranks.close()
    dist.destroy_process_group()


def _measured(size: int, has_gpu: bool) -> list[dict[str, Any]]:
    """ "machine", "kept" and "rates" of each of so many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            multiprocessing.spawn(_measure, (size, has_gpu, folder), nprocs=size)
        except _FAILURES as error:
            last = str(error).strip().splitlines()[-1]
            raise GeminiError(f"{size} ranks could not measure; one of them: {last}") from error
        return json.loads((Path(folder) / "found").read_text())


def profile(ranks: int) -> Profile:
    """Measures with 1 to `ranks` processes on this host, each with a GPU of its own, or on the host device.

    Raises:
        ValueError: there are not as many GPUs.
        GeminiError: a rank could not measure.
    """
    has_gpu = torch.cuda.is_available()
    if ranks < 1 or (has_gpu and ranks > torch.cuda.device_count()):
        most = f"at most {torch.cuda.device_count()}, one for each GPU" if has_gpu else "at least 1"
        raise ValueError(f"--ranks {ranks}: {most}")
    runs, machine = [], {}
    for size in range(1, ranks + 1):
        everyone = _measured(size, has_gpu)
        machine = machine or everyone[0]["machine"]
        unknown = {} if has_gpu else dict.fromkeys(_BESIDE)
        kept = everyone[0]["kept"]
        runs.append(
            Run(
                size,
                tuple(int(own["machine"]["threads"]) for own in everyone),
                tuple({**own["rates"], **unknown} for own in everyone),
                None if kept is None else {**kept, **unknown},
            )
        )
    return Profile(machine, tuple(runs))


def table(found: Profile) -> str:
    """The profile for people; a column for each number of ranks."""
    machine, has_gpu = found.machine, found.machine["gpu"] != "host"
    lines = [f"{machine['cpu']}, {machine['gpu'] if has_gpu else 'no GPU'}"]
    if not has_gpu:
        lines.append("the host device is measured: copies go from host memory to host memory")
    if os.environ.get("GEMINI_RATES"):
        lines.append("GEMINI_RATES is set: manage() goes by it, and not by what is kept")
    threads = [", ".join(map(str, sorted(set(run.threads)))) for run in found.runs]
    lines.append(_row("ranks at once", [str(run.ranks) for run in found.runs]))
    lines.append(_row("threads of each", threads))
    parts = {
        "all ranks together": [run.total() for run in found.runs],
        "the slowest rank": [run.lowest() for run in found.runs],
        "kept for manage(), a rank": [run.kept or {} for run in found.runs],
    }
    for title, columns in parts.items():
        lines += ["", title]
        for name, text in _TITLES.items():
            lines.append(_row(f"  {text}", [_shown(rates.get(name)) for rates in columns]))
    return "\n".join(lines)


def _row(text: str, cells: Sequence[str]) -> str:
    return f"{text:<36}" + "".join(f"{cell:>9}" for cell in cells)


def _shown(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.3g}"


def _picture(text: str) -> Path:
    if Path(text).suffix not in FORMATS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give a file that ends in {' or '.join(FORMATS)}"
        )
    return Path(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, metavar="N", help="measure with 1 to N processes (the number of GPUs)")
    add("--json", type=Path, metavar="FILE", help="write all figures, in bytes/s and parameters/s")
    add("--plot", type=_picture, metavar="FILE", help="draw them: .svg or .png; needs matplotlib")


def execute(arguments: argparse.Namespace) -> int:
    """Prints the table and writes the files; 0, or 2 where that is impossible."""
    try:
        picture = None if arguments.plot is None else figure()  # before the time is spent
        ranks = arguments.ranks
        found = profile(max(torch.cuda.device_count(), 1) if ranks is None else ranks)
        print(table(found))
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(found.as_json(), indent=1) + "\n")
        if picture is not None:
            totals = {run.ranks: run.total() for run in found.runs}
            draw(picture, totals, _TITLES, arguments.plot)
    except (GeminiError, ImportError, OSError, ValueError) as error:
        print(f"gemini-strategy profile: {error}", file=sys.stderr)
        return 2
    return 0
