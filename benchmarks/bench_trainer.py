"""transformers' Trainer under the runner, beside a plain loop under the same budget.

    python benchmarks/bench_trainer.py --out FILE [--model opt-1.5b] [--budget 12GB] [--sequences 8] [--max-norm 1.0]

Both train the same bf16 model on the same rows (the Trainer shuffles them), each in a process of its own: `plain` is a
loop with `gemini_strategy.manage`, `trainer` is a script with an ordinary Trainer, which `gemini_strategy run` starts.
One line is added: seconds per step of both (the median after the plan stays), tokens per second, their ratio, and how
long each took from its start to its first step. With --max-norm 0 both update inside backward. With --again `plain`
runs before and after the Trainer, so that a machine that changes its speed is seen.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]


class Marks:
    """The times at which steps ended; the first ones are those of the set-up."""

    def __init__(self) -> None:
        import torch

        self._wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        self.begun = time.perf_counter()
        self.ends: list[float] = []

    def begin(self) -> None:
        """Training begins."""
        self.prepared = time.perf_counter() - self.begun

    def end_step(self) -> None:
        """One synchronisation a step, for both loops alike."""
        self._wait()
        self.ends.append(time.perf_counter())

    def write(self, args: argparse.Namespace, out: Path) -> None:
        """The last steps' median, after as many as a plan needs to stay."""
        last = self.ends[-args.steps - 1 :]
        seconds = [b - a for a, b in pairwise(last)]
        result = {
            "seconds": median(seconds),
            "least": min(seconds),
            "most": max(seconds),
            "prepared_seconds": self.prepared,
            "first_step_seconds": self.ends[0] - self.begun - self.prepared,
        }
        out.write_text(json.dumps(result))


def build(args: argparse.Namespace) -> Any:
    """On the host, in bf16, with checkpointing."""
    import torch
    from models import build_model
    from shapes import SHAPES

    home = torch.device("cpu")
    return build_model(SHAPES[args.model], home, torch.device(args.device), torch.bfloat16)


def rows(args: argparse.Namespace) -> Any:
    """Random tokens, a row for each sequence of the whole run; both loops see each row once."""
    import torch
    from shapes import SHAPES

    torch.manual_seed(1)
    n = (args.warm + args.steps) * args.sequences
    return torch.randint(SHAPES[args.model].vocabulary, (n, args.length))


def plain(args: argparse.Namespace) -> None:
    """A loop of one's own."""
    import torch

    import gemini_strategy as gs

    marks = Marks()
    device = torch.device(args.device)
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = gs.manage(
        model, optimizer, device_budget=args.budget, precision="bf16-true", device=device
    )
    batches = rows(args).split(args.sequences)
    marks.begin()
    for batch in batches:
        ids = batch.pin_memory().to(device) if device.type == "cuda" else batch
        loss = model(input_ids=ids, labels=ids).loss
        engine.backward(loss, step=args.max_norm == 0)
        if args.max_norm > 0:
            engine.clip_grad_norm_(args.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        marks.end_step()
    marks.write(args, args.child_out)
    engine.close()


def trainer(args: argparse.Namespace) -> None:
    """A script that knows nothing of Gemini."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    marks = Marks()

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            marks.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.end_step()

    model = build(args)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=args.sequences,
            max_steps=args.warm + args.steps,
            max_grad_norm=args.max_norm,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=args.device == "cpu",
        )
        data = [{"input_ids": row, "labels": row} for row in rows(args)]
        Trainer(model, arguments, train_dataset=data, callbacks=[Watch()]).train()
    marks.write(args, args.child_out)


def child(args: argparse.Namespace, what: str) -> dict[str, Any]:
    """One of the two in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        runner = ["-m", "gemini_strategy", "run", "--device-budget", args.budget]
        begun = time.perf_counter()
        subprocess.run(
            [
                sys.executable,
                *(runner if what == "trainer" else []),
                str(Path(__file__).resolve()),
                *sys.argv[1:],
                *("--child", what, "--child-out", str(out)),
            ],
            check=True,
            cwd=HERE.parent,
        )
        result = json.loads(out.read_text())
        result["process_seconds"] = time.perf_counter() - begun
        print(what, result, flush=True)
        return result


def main() -> int:
    """Adds the line."""
    from lines import keep_line, parser_of

    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="opt-1.5b")
    parser.add_argument("--budget", default="12GB")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--child", choices=["plain", "trainer"], help=argparse.SUPPRESS)
    parser.add_argument("--child-out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        {"plain": plain, "trainer": trainer}[args.child](args)
        return 0
    if args.out is None:
        parser.error("--out is missing")
    runs = [child(args, what) for what in ("plain", "trainer", *(["plain"] * args.again))]
    import torch
    from measure import environment

    best = min(run["seconds"] for run in (runs[0], *runs[2:]))
    tokens = args.sequences * args.length
    line = {
        **{k: str(v) for k, v in vars(args).items() if k not in ("out", "child", "child_out")},
        "plain": [runs[0], *runs[2:]],
        "trainer": runs[1],
        "tokens_per_second": tokens / runs[1]["seconds"],
        "of_plain": best / runs[1]["seconds"],
        "environment": environment(torch.device(args.device)),
    }
    keep_line(line, args.out)
    print(f"the Trainer makes {line['of_plain']:.3f} of the plain loop's tokens/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
