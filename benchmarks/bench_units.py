"""Time of entering and leaving units, and of the hooks of backward: microseconds per unit.

    python benchmarks/bench_units.py [--units 200] [--repeats 30] [--parameters 1|2] [--device cpu|cuda]

A model of many Linears that compute nearly nothing runs managed, with everything resident, and plain; what
the managed one takes longer is the engine's host time. Prints one JSON line, microseconds:

    hooks         two empty module hooks, which units do without: a yardstick of the machine
    enter_leave   one unit entered and left (forward without grad)
    pack          one tensor saved for backward (forward with grad; a Linear saves its input and its weight)
    touch         one backward node that unpacks its weight (autograd.grad to the input alone)
    gradient      one gradient taken, with its share of unpacking inputs (backward less the former)
    forward, backward   all of that per unit; plain_* the same of the plain model, whole

Each figure is the difference of two minima over the repeats; managed and plain alternate.
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
from lines import keep_line
from torch import nn

import gemini_strategy as gs

WIDTH = 8


def linears(n: int, parameters: int, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH, bias=parameters == 2) for _ in range(n))
    return nn.Sequential(*layers).to(device)


def hooked(model: nn.Module) -> nn.Module:
    """Every unit with a pre-hook and an always-called hook that do nothing."""
    for module in model:
        module.register_forward_pre_hook(lambda module, args: None)
        module.register_forward_hook(lambda module, args, output: None, always_call=True)
    return model


class Timed:
    """One model and the least times that its passes have taken, in seconds."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self.model = model
        self.device = device
        self.least: dict[str, float] = {}

    def _time(self, name: str, run: Callable[[], Any]) -> Any:
        if self.device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - begin
        self.least[name] = min(seconds, self.least.get(name, seconds))
        return result

    def run(self) -> None:
        model = self.model
        x = torch.ones(1, WIDTH, device=self.device, requires_grad=True)
        with torch.no_grad():
            self._time("eval", lambda: model(x))
        y = self._time("forward", lambda: model(x)).sum()
        self._time("input_grad", lambda: torch.autograd.grad(y, x))
        y = model(x).sum()
        self._time("backward", y.backward)
        for parameter in model.parameters():
            parameter.grad = None


def measure(n: int, parameters: int, repeats: int, device: str) -> dict[str, float]:
    """The figures of the module's docstring, in microseconds per unit (or pack, touch, gradient)."""
    managed = linears(n, parameters, device)
    optimizer = gs.HybridAdam(managed.parameters())
    engine = gs.manage(managed, optimizer, device=device)
    runs = [
        Timed(managed, device),
        Timed(linears(n, parameters, device), device),
        Timed(hooked(linears(n, parameters, device)), device),
    ]
    for _ in range(repeats):
        for run in runs:
            run.run()
    engine.close()
    ours, plain, empty = (run.least for run in runs)
    per_unit = {key: (ours[key] - plain[key]) / n * 1e6 for key in ours}
    return {
        "hooks": (empty["eval"] - plain["eval"]) / n * 1e6,
        "enter_leave": per_unit["eval"],
        "pack": (per_unit["forward"] - per_unit["eval"]) / 2,
        "touch": per_unit["input_grad"],
        "gradient": (per_unit["backward"] - per_unit["input_grad"]) / parameters,
        "forward": per_unit["forward"],
        "backward": per_unit["backward"],
        "plain_forward": plain["forward"] / n * 1e6,
        "plain_backward": plain["backward"] / n * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--parameters", type=int, default=2, choices=(1, 2), help="of each unit")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(args.units, args.parameters, args.repeats, args.device)
    about = {
        "bench": "units",
        "units": args.units,
        "parameters": args.parameters,
        "device": args.device,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    keep_line(about | {key: round(value, 2) for key, value in figures.items()}, None)


if __name__ == "__main__":
    main()
