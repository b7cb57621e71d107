"""The training loops that bench_offload.py compares, one process each: `loops.py run.json`.

Every loop trains the same model from the same bf16 values on the same batches. AdamW has fp32-precision masters beside
bf16 compute weights, but for torchao's; other optimizers step the bf16 weights. Loops differ in who keeps what where,
and in the rounding of the arithmetic; `arithmetic` in the result says which one it is.
The file named on the command line holds the run's specification; the result goes to the file that
it names.
"""

import gc
import hashlib
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from first_values import draw_on_demand
from measure import Clock, Peaks, environment
from models import Batches, build_model
from optimizers import ADAM, OPTIMIZERS
from shapes import SHAPES
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package of this tree

MAX_NORM = 1.0  # unless the specification has another one
MOST_WARMUP = 24  # steps until Gemini's plan stays, beyond the warm-up
TIMELINE_STEPS = 2
SLOW_HOST = 0.75  # of the reference host's Adam
SLICE_ELEMENTS = 256 << 20  # masters updated at once, so that few gradients exist in fp32


class UnavailableError(Exception):
    """This machine lacks what the loop needs; the text says what."""


class Loop:
    """One way to train: `model` after prepare(), then backward() and finish() in every step."""

    arithmetic = ""
    starts_on_device = True  # whether the model is built where it computes
    home = "cpu"  # where it is built otherwise
    dtype = torch.bfloat16
    library: str | None = None  # that the loop needs and that may not be installed
    has_weights = True  # whether the model's parameters are whole tensors

    @classmethod
    def check_available(cls, spec: dict[str, Any]) -> None:
        """Raises UnavailableError if this run cannot be made here."""
        if cls.library:
            try:
                import_module(cls.library)
            except Exception as error:
                reason = f"import {cls.library}: {type(error).__name__}: {error}"
                raise UnavailableError(reason) from None

    def __init__(self, spec: dict[str, Any], device: torch.device) -> None:
        self.spec, self.device, self.clip = spec, device, spec["clip"]
        self.optimizer = spec.get("optimizer", "adamw")
        if self.optimizer != "adamw":
            self.arithmetic = f"{self.optimizer} on bf16 weights, by its own step()"
        self.max_norm = spec.get("max_norm", MAX_NORM)
        self.model = self.build()
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def build(self) -> torch.nn.Module:
        """The model, before prepare()."""
        home = self.device if self.starts_on_device else torch.device(self.home)
        model = build_model(SHAPES[self.spec["model"]], home, self.device, self.dtype)
        if self.spec.get("liger"):
            try:
                from liger_kernel.transformers import _apply_liger_kernel_to_instance
            except ImportError as error:
                raise UnavailableError(f"Liger: {error}") from None
            _apply_liger_kernel_to_instance(model=model)
            if "forward" not in vars(model):
                raise UnavailableError(f"Liger has no kernels for {type(model).__name__}")
        return model

    def batches(self) -> Batches:
        """What it is trained on."""
        spec = self.spec
        size = spec["sequences"], spec["length"], spec["micro_batches"]
        return Batches(SHAPES[spec["model"]], *size, self.device)

    def make_optimizers(self) -> list[Any]:
        """Those of the specification, on the model's parameters."""
        try:
            return OPTIMIZERS[self.optimizer](self.model)
        except ImportError as error:
            raise UnavailableError(f"{self.optimizer}: {error}") from None

    def prepare(self) -> None:
        """Makes the optimizers and whatever keeps the states."""
        self.optimizers = self.make_optimizers()

    def loss(self, ids: Tensor) -> Tensor:
        """The mean over one micro-batch's tokens, from the model's own labels."""
        return self.model(input_ids=ids, labels=ids).loss

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Accumulates gradients; `is_last`: the step's last micro-batch."""
        loss.backward()

    def clip_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def finish(self) -> None:
        """Clips if asked, updates, drops the gradients."""
        if self.clip:
            self.clip_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def weight_hashes(self) -> dict[str, str]:
        """Of every parameter's bytes, by name."""
        names = self.model.named_parameters() if self.has_weights else ()
        return {
            name: hashlib.sha256(
                p.detach().to("cpu", copy=True).reshape(-1).view(torch.uint8).numpy()
            ).hexdigest()
            for name, p in names
        }

    def still_changes(self) -> bool:
        """Whether the next steps are not yet as all later ones will be."""
        return False

    def watch(self, step: Callable[[], None]) -> dict[str, Any]:
        """After the measured steps and the report: more steps, to look at what they do; more figures."""
        return {}

    def report(self) -> dict[str, Any]:
        """What only this loop can tell, after the last step."""
        return {}


class Masters:
    """torch's fused AdamW on fp32 copies of bf16 weights, slice by slice."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._slices: list[tuple[list[Tensor], list[Tensor], torch.optim.AdamW]] = []
        weights: list[Tensor] = []
        for parameter in parameters:
            if weights and sum(w.numel() for w in weights) + parameter.numel() > SLICE_ELEMENTS:
                self._add_slice(weights)
                weights = []
            weights.append(parameter)
        self._add_slice(weights)

    def _add_slice(self, weights: list[Tensor]) -> None:
        masters = [w.detach().float() for w in weights]
        self._slices.append((weights, masters, torch.optim.AdamW(masters, fused=True, **ADAM)))

    @torch.no_grad()
    def step(self) -> None:
        """Drops the gradients, too."""
        for weights, masters, optimizer in self._slices:
            for weight, master in zip(weights, masters, strict=True):
                master.grad = weight.grad.float()
                weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
            torch._foreach_copy_(weights, masters)

    def zero_grad(self) -> None:
        """step() has done it."""


class Resident(Loop):
    """Everything on the device; with AdamW fp32 masters, and bf16 copies to compute with."""

    arithmetic = "torch.optim.AdamW(fused) on fp32 masters, bf16 gradients widened slice by slice"

    def make_optimizers(self) -> list[Any]:
        if self.optimizer == "adamw":
            return [Masters(self.model.parameters())]
        return super().make_optimizers()

    def report(self) -> dict[str, Any]:
        return pass_memory(self)


class Hybrid(Loop):
    """Everything on the device: HybridAdam's packed states, 12 bytes per parameter."""

    arithmetic = "gemini_strategy.HybridAdam on plain tensors, packed masters"

    def prepare(self) -> None:
        import gemini_strategy as gs

        gs.cast_model_(self.model, "bf16-true")
        self.optimizers = [gs.HybridAdam(self.model.parameters(), **ADAM)]

    def clip_gradients(self) -> None:
        self.optimizers[0].clip_grad_norm_(self.max_norm)

    report = Resident.report


class Gemini(Loop):
    """Under a device budget."""

    arithmetic = "gemini_strategy, packed masters"
    starts_on_device = False

    def build(self) -> torch.nn.Module:
        if not self.spec.get("host_budget"):
            return super().build()
        self.home = "meta"  # manage() gives it values, and the host never has two copies of them
        model = super().build()
        draw_on_demand(model, self.device)
        return model

    def prepare(self) -> None:
        import gemini_strategy as gs

        self.optimizers = self.make_optimizers()
        self.engine = gs.manage(
            self.model,
            self.optimizers,
            device_budget=self.spec["budget"],
            host_budget=self.spec.get("host_budget"),
            chunk_size=self.spec.get("chunk_size"),
            placement_policy=self.spec["policy"],
            precision="bf16-true",
            device=self.device,
        )

    def backward(self, loss: Tensor, is_last: bool) -> None:
        self.engine.backward(loss, step=is_last and not self.clip)

    def clip_gradients(self) -> None:
        self.engine.clip_grad_norm_(self.max_norm)

    def weight_hashes(self) -> dict[str, str]:
        # A pending step inside an operation on a weight: there torch.compile cannot compile it.
        self.engine._runtime.core.catch_up()
        return super().weight_hashes()

    def still_changes(self) -> bool:
        return bool(self.engine.stats()["settling"])

    def watch(self, step: Callable[[], None]) -> dict[str, Any]:
        if self.spec["timeline"]:
            path = Path(self.spec["timeline"])
            self.engine.timeline(path, path.with_suffix(".svg"), TIMELINE_STEPS)
            for _ in range(TIMELINE_STEPS):
                step()
        return {}

    def report(self) -> dict[str, Any]:
        stats, plan = self.engine.stats(), self.engine._runtime.core.plan_info() or {}
        kept = ("rates", "n_of_class", "when", "h2d_bytes", "d2h_bytes")
        return {
            "stats": stats,
            "plan": {key: plan.get(key) for key in (*kept, "host_seconds", "h2d_seconds")},
            **host_speed(self.engine._runtime.settings.rates),
            "says_that_backward_ends_the_step": not self.clip,
            **{key: value for key, value in stats.items() if key.startswith("predicted_")},
        }


class FullyShard(Loop):
    """PyTorch's fully_shard per block and root, torch's fused AdamW."""

    dtype = torch.float32
    has_weights = False

    def shard(self, blocks: Iterable[torch.nn.Module], n_ranks: int, **more: Any) -> None:
        """`more`: of fully_shard's options."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        options = {
            "mesh": init_device_mesh(self.device.type, (n_ranks,)),
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16
            ),
            **more,
        }
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(self.model, **options)

    def make_optimizer(self) -> None:
        """On what fully_shard has made of the parameters."""
        self.optimizers = [torch.optim.AdamW(self.model.parameters(), fused=True, **ADAM)]
        if self.device.type == "cuda":  # what sharding took
            torch.cuda.empty_cache()


class FSDP2(FullyShard):
    """On one rank, parameters and optimizer on the CPU."""

    arithmetic = "torch.optim.AdamW(fused, CPU) on fp32 shards, bf16 compute and reduction"

    def prepare(self) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy

        on_gpu = self.device.type == "cuda"
        self._folder = tempfile.TemporaryDirectory()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.FileStore(str(Path(self._folder.name) / "store"), 1),
            rank=0,
            world_size=1,
        )
        policy = CPUOffloadPolicy(pin_memory=on_gpu)
        blocks = next(m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList))
        self.shard(blocks, 1, offload_policy=policy)
        self.make_optimizer()

    def report(self) -> dict[str, Any]:
        import torch.distributed as dist

        dist.destroy_process_group()
        self._folder.cleanup()
        return {}


class DeepSpeed(Loop):
    """ZeRO-3 with parameters and optimizer on the CPU, pinned, one rank."""

    arithmetic = "DeepSpeedCPUAdam on fp32 masters, bf16 compute"
    starts_on_device = False
    library = "deepspeed"
    has_weights = False
    stage = 3

    def prepare(self) -> None:
        import deepspeed

        # One rank, found without a launcher.
        found = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
        for name, value in found.items():
            os.environ.setdefault(name, value)
        pinned = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        config = {
            "train_micro_batch_size_per_gpu": self.spec["sequences"],
            "gradient_accumulation_steps": self.spec["micro_batches"],
            "gradient_clipping": self.max_norm if self.clip else 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": {
                "stage": self.stage,
                "offload_optimizer": pinned,
                **({"offload_param": pinned} if self.stage == 3 else {}),
                "overlap_comm": True,
                "contiguous_gradients": True,
            },
            "optimizer": {"type": "AdamW", "params": dict(ADAM)},
            "wall_clock_breakdown": False,
        }
        self.model, *_ = deepspeed.initialize(model=self.model, config=config)

    def backward(self, loss: Tensor, is_last: bool) -> None:
        # The engine divides by the number of micro-batches itself; the loop has done so already.
        self.model.backward(loss * self.spec["micro_batches"])
        if not is_last:
            self.model.step()

    def finish(self) -> None:
        self.model.step()


class DeepSpeedZ2(DeepSpeed):
    """ZeRO-2: the optimizer on the CPU, the weights on the device."""

    stage = 2


class TorchAO(Loop):
    """Any optimizer on the CPU by torchao, the weights on the device, bf16 throughout, as its documentation advises."""

    arithmetic = "torch.optim.AdamW(fused, CPU) on bf16 weights and moments, no masters"
    library = "torchao.optim"

    @classmethod
    def check_available(cls, spec: dict[str, Any]) -> None:
        if not spec["device"].startswith("cuda"):
            raise UnavailableError("CPUOffloadOptimizer of torchao wants a GPU")
        if spec["clip"]:  # what it copies to the CPU in backward is what it updates with
            raise UnavailableError("CPUOffloadOptimizer of torchao does not support clipping")
        super().check_available(spec)

    def prepare(self) -> None:
        from torchao.optim import CPUOffloadOptimizer

        (optimizer,) = self.make_optimizers()
        more = {"fused": True} if self.optimizer == "adamw" else {}
        offloaded = CPUOffloadOptimizer(
            self.model.parameters(),
            type(optimizer),
            offload_gradients=self.spec["micro_batches"] == 1,  # else they do not accumulate
            **more,
            **ADAM,
        )
        self.optimizers = [offloaded]


LOOPS: dict[str, type[Loop]] = {
    "resident": Resident,
    "hybrid": Hybrid,
    "gemini": Gemini,
    "fsdp2": FSDP2,
    "deepspeed": DeepSpeed,
    "deepspeed-z2": DeepSpeedZ2,
    "torchao": TorchAO,
}


def host_speed(rates: Sequence[float]) -> dict[str, Any]:
    """The machine's rates as they were before steps corrected them, and whether its host is slow.

    The host is as slow as the worse of Adam alone and Adam beside copies, to the reference host's.
    """
    from gemini_strategy import _C
    from gemini_strategy.machine.rates import REFERENCE

    named = dict(zip(_C.RATES, rates, strict=True))
    share = min(named[name] / REFERENCE[name] for name in ("host_adam", "host_adam_beside"))
    return {"machine_rates": named, "host_share": share, "host_is_slow": share < SLOW_HOST}


def pass_memory(loop: Loop) -> dict[str, Any]:
    """Device bytes that one micro-batch's pass takes beside weights, gradients and states.

    Measured by torch's allocator in a pass whose gradients are dropped as they come, so one unit's
    gradient at a time, and the tied embedding's during all of backward, is in the figure.
    """
    if loop.device.type != "cuda":
        return {}
    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    spec = loop.spec
    batches = Batches(SHAPES[spec["model"]], spec["sequences"], spec["length"], 1, loop.device)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    base, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(2):  # the second finds the blocks that the first left
        torch.cuda.reset_peak_memory_stats()
        loss = loop.loss(batches(0, 0))
        forward = torch.cuda.max_memory_allocated() - base
        kept = torch.cuda.memory_allocated() - base
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        del loss
    return {
        "static_bytes": base,
        "pass_forward_peak_bytes": forward,
        "pass_kept_bytes": kept,
        "pass_backward_peak_bytes": torch.cuda.max_memory_allocated() - base,
        "pass_reserved_bytes": torch.cuda.max_memory_reserved() - reserved,
    }


def say_phase(name: str) -> None:
    """Tells the process that reads the memory which part of the run begins."""
    print(f"@phase {name}", flush=True)


class Training:
    """The steps of one loop: times, losses, peaks."""

    def __init__(self, loop: Loop, device: torch.device) -> None:
        self._loop, self._device = loop, device
        self._batches = loop.batches()
        self._clock = Clock(device)
        self._losses: list[Tensor] = []

    def step(self, is_measured: bool = False) -> None:
        """The next one."""
        loop, step, micro_batches = self._loop, len(self._losses), self._loop.spec["micro_batches"]
        total = torch.zeros((), device=self._device)
        for micro in range(micro_batches):
            loss = loop.loss(self._batches(step, micro)) / micro_batches
            total += loss.detach()
            if is_measured:
                self._clock.mark("forward")
            loop.backward(loss, micro + 1 == micro_batches)
            del loss
            if is_measured:
                self._clock.mark("backward")
        loop.finish()
        if is_measured:
            self._clock.mark("update")
        self._losses.append(total)

    def run(self, enter: Any) -> dict[str, Any]:
        """Warm-up and measured steps."""
        from gemini_strategy.report.tables import host_peak_bytes

        loop, spec, device, losses = self._loop, self._loop.spec, self._device, self._losses
        steps, warmup, micro_batches = spec["steps"], spec["warmup"], spec["micro_batches"]
        is_cuda = device.type == "cuda"
        latest = warmup + spec.get("settling", MOST_WARMUP)
        enter("warmup")
        began = time.perf_counter()
        ends = [began]
        while len(losses) < warmup or (len(losses) < latest and loop.still_changes()):
            self.step()
            ends.append(time.perf_counter())
        warmed = len(losses)
        if is_cuda:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        warm_seconds = time.perf_counter() - began
        enter("train")
        began = time.perf_counter()
        self._clock.mark("begin")
        for _ in range(steps):
            self.step(True)
        spans = self._clock.spans()
        wall = time.perf_counter() - began
        enter("after")
        values = [loss.item() for loss in losses]

        per_step: list[dict[str, float]] = [{}]
        for name, seconds in spans:
            per_step[-1][name] = per_step[-1].get(name, 0.0) + seconds
            if name == "update":
                per_step.append({})
        per_step.pop()
        seconds = [sum(parts.values()) for parts in per_step]
        peaks = {}
        if is_cuda:
            peaks["torch_peak_bytes"] = torch.cuda.max_memory_allocated(device)
            peaks["torch_reserved_peak_bytes"] = torch.cuda.max_memory_reserved(device)
            pinned = torch.cuda.host_memory_stats()
            peaks["torch_pinned_peak_bytes"] = pinned.get("allocated_bytes.peak")
        tokens = spec["sequences"] * spec["length"] * micro_batches
        return {
            "parameters": loop.parameters,
            "tokens_per_step": tokens,
            "step_seconds": median(seconds),
            "step_seconds_min": min(seconds),
            "step_seconds_max": max(seconds),
            "step_seconds_each": seconds,
            "wall_seconds_per_step": wall / steps,
            "forward_seconds": median(parts["forward"] for parts in per_step),
            "backward_seconds": median(parts["backward"] for parts in per_step),
            "update_seconds": median(parts["update"] for parts in per_step),
            "tokens_per_s": tokens / median(seconds),
            "warmup": warmed,
            "warmup_seconds": warm_seconds,
            "warmup_issued_seconds_each": [b - a for a, b in pairwise(ends)],  # by the host
            "loss": values[warmup + steps - 1],
            "losses": values,
            "losses_finite": all(map(math.isfinite, values)),
            **peaks,
            "host_peak_rss_bytes": host_peak_bytes(),
        }


def keep(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """Leaves the result where the specification says, whole or not at all."""
    path = Path(spec["result"])
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(path)


def run(spec: dict[str, Any], table: dict[str, type[Loop]]) -> None:
    """One run; what went wrong is part of the result."""
    from gemini_strategy.report.tables import host_peak_bytes

    result: dict[str, Any] = {"available": True, "error": None}
    device = torch.device(spec["device"])
    if spec.get("bits"):  # of attention's kernels flash alone is fused and repeats its bits
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    if spec["threads"]:
        torch.set_num_threads(spec["threads"])
    peaks: Peaks | None = None
    if spec["sample_here"]:  # the driver's figure as CUDA gives it, of the whole device

        def used() -> int:
            free, total = torch.cuda.mem_get_info(device)
            return total - free

        peaks = Peaks({"device": used})
        peaks.before["device"] = 0
        peaks.__enter__()

    def enter(phase: str) -> None:
        say_phase(phase)
        if peaks is not None:
            peaks.enter(phase)

    try:
        table[spec["system"]].check_available(spec)
        enter("build")
        began = time.perf_counter()
        loop = table[spec["system"]](spec, device)
        result["arithmetic"] = loop.arithmetic
        result["build_seconds"] = time.perf_counter() - began
        enter("setup")
        began = time.perf_counter()
        loop.prepare()
        result["setup_seconds"] = time.perf_counter() - began
        training = Training(loop, device)
        result |= training.run(enter)
        result |= loop.report()
        if spec.get("bits"):
            result["weight_hashes"] = loop.weight_hashes()
        keep(spec, result | {"environment": environment(device)})  # should what follows not end
        result |= loop.watch(training.step)
    except UnavailableError as reason:
        result |= {"available": False, "error": str(reason)}
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
        result["is_out_of_memory"] = isinstance(error, torch.OutOfMemoryError | MemoryError)
        result["host_peak_rss_bytes"] = host_peak_bytes()
    if peaks is not None:
        peaks.__exit__(None, None, None)
        result["device_phases"] = {
            phase: seen["device"] for phase, seen in peaks.by_phase.items() if "device" in seen
        }
    keep(spec, result | {"environment": environment(device)})


def end() -> None:
    """Ends the process: what a failed run left behind must not decide how."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Reads the specification, runs it, leaves the result beside it."""
    run(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), LOOPS)
    end()


if __name__ == "__main__":
    main()
