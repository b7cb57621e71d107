"""What a checkpoint costs while a model trains: `python3 benchmarks/bench_save.py --folder DIR --out FILE`.

A model is trained under a budget until its plan stays. Then the same state is saved twice: once while training waits,
and once in the background while the next steps run. A line is written then, and once more with what loading took. It
has, in seconds and bytes,

    step_seconds       of a step without a save, the median
    save_seconds       of the call that waits for the disk; save_host_bytes: how far it raised the resident set
    call_seconds       of the call in the background; beside_seconds: of the steps while the writer ran
    stall_seconds      what the call and all those steps took more than as many steps without a save
    written_seconds    from that call until the checkpoint had its name; beside_host_bytes: as save_host_bytes
    copied and most    bytes of chunks that had no spare; spare_bytes: of those that had one, in whole pages
    same               whether both folders have the same tensors, by their checksums
    load_seconds       of engine.load; load_host_bytes
    loaded_same        whether the masters are those of the call then

Spares are there with --clip and a --max-norm that no step reaches. The folder needs room for one checkpoint, 12 bytes
per parameter.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lines import budget, keep_line, parser_of
from loops import MOST_WARMUP, Gemini
from measure import environment
from shapes import SHAPES

STEPS = 4  # that the median is taken of


def checksums(folder: Path) -> dict[str, Any]:
    """Of each tensor in a checkpoint, piece by piece."""
    from gemini_strategy.checkpoint.manifest import Manifest

    return {
        name: (
            str(stored.dtype),
            stored.shape,
            sorted((p.first, p.n, p.crc) for p in stored.pieces),
        )
        for name, stored in Manifest(folder).tensors.items()
    }


def raised(work: Callable[[], Any]) -> tuple[float, int]:
    """(seconds, bytes by which the resident set was above its size before)."""
    from gemini_strategy.report.tables import host_peak_bytes, host_resident_bytes

    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, begin = host_resident_bytes(), time.perf_counter()
    work()
    return time.perf_counter() - begin, host_peak_bytes() - before


def masters(engine: Any) -> dict[str, int]:
    """Of each fp32 master its bits, added up."""
    return {
        name: int(value.view(torch.int32).sum(dtype=torch.int64))
        for name, value in engine.model_state_dict().items()
        if value.dtype == torch.float32
    }


def parse_arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="on the disk that is asked about"
    )
    parser.add_argument("--out", type=Path, required=True, help="two lines are added")
    parser.add_argument("--model", choices=SHAPES, default="opt-3.4b")
    parser.add_argument("--budget", type=budget, default="24GB")
    parser.add_argument("--policy", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--max-norm", type=float, default=1e6)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def main() -> int:
    """Writes two lines of JSON; 1 if the two checkpoints differ, or what was loaded."""
    args = parse_arguments()
    device = torch.device(args.device)
    spec = vars(args) | {"micro_batches": 1}
    loop = Gemini(spec, device)
    loop.prepare()
    batches, done = loop.batches(), 0

    def step() -> float:
        nonlocal done
        begin = time.perf_counter()
        loss = loop.loss(batches(done, 0))
        loop.backward(loss, is_last=True)
        loop.finish()
        float(loss.detach())  # waits for the device
        done += 1
        taken = time.perf_counter() - begin
        print(f"step {done}: {taken:.3f} s", flush=True)
        return taken

    for _ in range(3):
        step()
    while loop.still_changes() and done < 3 + MOST_WARMUP:
        step()
    steps = [step() for _ in range(STEPS)]
    engine, usual = loop.engine, median(steps)
    target = args.folder / "checkpoint"
    save_seconds, save_bytes = raised(lambda: engine.save(target))
    print(f"saved in {save_seconds:.1f} s", flush=True)
    first = checksums(target)
    size = sum(file.stat().st_size for file in target.iterdir())
    shutil.rmtree(target)
    before, spares = masters(engine), engine.stats()["spare_bytes"]
    beside: list[float] = []
    told: list[Any] = []

    def save_beside() -> None:
        begin = time.perf_counter()
        told.append(engine.save(target, background=True))
        told.append(time.perf_counter() - begin)
        beside.append(step())
        while not told[0].done:
            beside.append(step())
        told[0].wait()

    written, beside_bytes = raised(save_beside)
    saving, call = told
    print(f"saved in the background in {written:.1f} s", flush=True)
    same = checksums(target) == first
    stats = engine.stats()
    line = {
        **{key: str(value) for key, value in vars(args).items() if key not in ("out", "folder")},
        "parameters": loop.parameters,
        "step_seconds": usual,
        "steps": steps,
        "save_seconds": save_seconds,
        "save_host_bytes": save_bytes,
        "checkpoint_bytes": size,
        "call_seconds": call,
        "beside_seconds": beside,
        "stall_seconds": call + sum(beside) - len(beside) * usual,
        "written_seconds": written,
        "beside_host_bytes": beside_bytes,
        "spare_bytes": spares,
        "copied": saving.copied_bytes,
        "most": saving.most_bytes,
        "waits": saving.waits,
        "same": same,
        "host_bytes": stats["host_bytes"],
        "chunks": stats["chunks"],
        "environment": environment(device),
    }
    keep_line(line, args.out)  # it stays where the time of a machine ends while this loads
    seconds, n_bytes = raised(lambda: engine.load(target))
    loaded_same = masters(engine) == before
    shutil.rmtree(target)
    engine.close()
    line |= {"load_seconds": seconds, "load_host_bytes": n_bytes, "loaded_same": loaded_same}
    keep_line(line, args.out)
    return 0 if same and loaded_same else 1


if __name__ == "__main__":
    sys.exit(main())
