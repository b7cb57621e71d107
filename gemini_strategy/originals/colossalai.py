"""Colossal-AI's ways in, over the engine of `manage()`: `import gemini_strategy.colossalai as colossalai`.

    colossalai.launch_from_torch(config)
    with colossalai.ZeroInitContext(device, shard_strategy, shard_param=True):
        model = build()
    engine, train_dataloader, *_ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

and of 0.5 `Booster(plugin=GeminiPlugin())`, `GeminiDDP`, `GeminiOptimizer`. All names stand here.
docs/originals.md says what became of what.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import runpy
import weakref
from collections.abc import Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

import gemini_strategy as gs
from gemini_strategy.originals.arguments import Only, counted, taken, takes
from gemini_strategy.originals.booster import Booster, GeminiDDP, GeminiOptimizer, GeminiPlugin
from gemini_strategy.originals.wrapper import SCALING, WrappedModule, WrappedOptimizer, place

__all__ = [
    "AMP_TYPE", "Booster", "BucketTensorShardStrategy", "CPUAdam", "FusedAdam", "GeminiDDP",
    "GeminiOptimizer", "GeminiPlugin", "HybridAdam", "TensorShardStrategy", "ZeroInitContext", "get_current_device",
    "global_context", "initialize", "launch_from_torch",
]  # fmt: skip

_MESH = Only(None, "give initialize(mesh=...)")
_AVERAGED = "the engine averages gradients over the ranks itself; leave it out"
_REFUSED = {  # of a configuration
    "torch_ddp": _AVERAGED,
    "gradient_handler": _AVERAGED,
    "sync_batchnorm": "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before initialize() does that",
}  # fmt: skip
_MODEL = {  # zero=dict(model_config=...)
    "shard_strategy": None,
    "tensor_placement_policy": None,
    "fp32_reduce_scatter": None,
    "offload_config": None,
    "reduce_scatter_bucket_size_mb": Only(25, "a chunk's gradients are reduced as a whole"),
    "gradient_predivide_factor": Only(1.0, "gradients are divided before the sum by the ranks' power of two"),
    "reuse_fp16_shard": Only(False, "gradients have places of their own"),
    "use_memory_tracer": Only(False, "the first step is traced in any case"),
    "process_group": _MESH,
    "reduce_scatter_process_group": _MESH,
}  # fmt: skip
_OPTIMIZER = {  # zero=dict(optimizer_config=...)
    **SCALING,
    "gpu_margin_mem_ratio": None,
    "cpu_offload": Only(None, "tensor_placement_policy of model_config says where states are"),
    "keep_unshard": Only(False, "the ranks share every chunk"),
    "verbose": Only(False, "give initialize(verbose=True)"),
    "dp_process_group": _MESH,
    "mp_process_group": Only(None, "there is data parallelism alone"),
}
_FP16 = {**SCALING, "mode": None, "init_scale": None}


# For fp16=dict(mode=...): there is one way to train in fp16, and all of them mean it.
AMP_TYPE = Enum("AMP_TYPE", {"APEX": "apex", "TORCH": "torch", "NAIVE": "naive"})


class Config(dict[str, Any]):
    """A configuration, whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the configuration has no {name!r}")
        return self[name]


global_context = SimpleNamespace(config=Config())  # what launch_from_torch has found


def get_current_device() -> torch.device:
    """Where this process computes: its CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def launch_from_torch(
    config: Any = None, backend: str | None = None, seed: int = 1024, verbose: bool = True
) -> None:
    """Joins the ranks that torchrun has started, if there are some, and seeds torch's and Python's random numbers.

    `config` is a dict, or the path of a Python file whose names are the configuration. Keys that `initialize` does not
    read are the program's own, but for those that ask for what is not here: these are a ValueError.
    """
    found = _read(config)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and not dist.is_initialized():
        backend = backend or ("nccl" if cuda else "gloo")
        dist.init_process_group(backend, timeout=timedelta(seconds=300))
    random.seed(seed)
    torch.manual_seed(seed)
    global_context.config = found
    rank, size = place()
    if verbose and rank == 0:
        log = logging.getLogger("gemini_strategy")
        log.info("%d ranks, %s, seed %d", size, get_current_device(), seed)


def _read(config: Any) -> Config:
    """The configuration, if nothing in it is refused."""
    if isinstance(config, str | os.PathLike):
        if not Path(config).is_file():
            raise ValueError(f"launch_from_torch(config={str(config)!r}): there is no such file")
        names = runpy.run_path(str(config))
        config = {name: value for name, value in names.items() if not name.startswith("__")}
    if not isinstance(config, Mapping | None):
        allowed = "give a dict, or the path of a Python file"
        raise ValueError(f"launch_from_torch(config={config!r}): {allowed}")
    found = Config(config or {})
    for key, reason in _REFUSED.items():
        if found.get(key):
            raise ValueError(f"config: {key}={found[key]!r} is not taken: {reason}.")
    for kind, value in (found.get("parallel") or {}).items():
        size = value.get("size", 1) if isinstance(value, Mapping) else value
        if kind != "data" and size not in (None, 1):
            raise ValueError(
                f"config: parallel=dict({kind}={value!r}) is not taken: a model larger than a GPU is trained here by "
                f"moving chunks, with data parallelism alone: leave {kind}= out, give initialize(device_budget=...) "
                "and start as many ranks as there are GPUs."
            )
    return found


class TrainingEngine:
    """A model, its optimizer and its criterion: `engine(data)`, `engine.backward(loss)`, `engine.step()`.

    `model.engine` is the Engine of manage(). What is not here (train, eval, training, close) is the model's.
    """

    def __init__(self, model: WrappedModule, optimizer: WrappedOptimizer, n: int, criterion: Any):
        self.model = model
        self.optimizer = optimizer
        self.accumulation = n
        self._criterion = criterion
        self._n_backwards = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @property
    def criterion(self) -> Any:
        if self._criterion is None:
            raise ValueError("engine.criterion: initialize() was given none")
        return self._criterion

    @property
    def is_between(self) -> bool:
        """Whether micro-batches of a step are still to come."""
        return self._n_backwards % self.accumulation != 0

    def zero_grad(self) -> None:
        """Drops the gradients; between micro-batches of a step it does nothing."""
        if not self.is_between:
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """The loss's gradients, scaled for fp16; with gradient_accumulation=N a Nth of them."""
        self.optimizer.backward(loss if self.accumulation == 1 else loss / self.accumulation)
        self._n_backwards += 1

    def step(self) -> Any:
        """Clips if the configuration says so, and updates; with gradient_accumulation=N every Nth time."""
        return None if self.is_between else self.optimizer.step()


class _Schedule:
    """A scheduler of steps, stepped once per micro-batch."""

    def __init__(self, schedule: Any, engine: TrainingEngine) -> None:
        self._schedule, self._engine = schedule, engine

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._engine.is_between:
            self._schedule.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_schedule"], name)


@takes(
    criterion=None, train_dataloader=None, test_dataloader=None, lr_scheduler=None,
    ophooks=Only(None, "register hooks on the modules themselves"), verbose=False, device_budget=None,
    host_budget=None, precision=None, weights=None, mesh=None,
)  # fmt: skip
def initialize(
    model: nn.Module, optimizer: Any, criterion: Any, train_dataloader: Any, test_dataloader: Any,
    lr_scheduler: Any, verbose: bool, precision: str | None, **more: Any,
) -> tuple[TrainingEngine, Any, Any, Any]:  # fmt: skip
    """The engine, and loaders and schedule as they were given (several ranks: give the loader a DistributedSampler).

    Of the configuration of launch_from_torch it reads `zero` (model_config, optimizer_config), `fp16`,
    `gradient_accumulation`, with which the schedule counts steps, not micro-batches, and `clip_grad_norm`.

    precision=None is "16-mixed" with `zero` or `fp16` in the configuration, else "32-true". What follows `verbose` is
    as manage() has it.
    """
    config = global_context.config
    zero, fp16 = config.get("zero"), config.get("fp16")
    n = counted("config", "gradient_accumulation", config.get("gradient_accumulation", 1))
    if precision is None:
        precision = "32-true" if zero is None and fp16 is None else "16-mixed"
    if zero is not None:
        more |= _zero(zero.get("model_config", {}), dict(zero.get("optimizer_config", {})))
    scaling = taken("config: fp16", fp16 or {}, _FP16)
    scaling.pop("mode", None)
    if "init_scale" in scaling:
        scaling["initial_scale"] = scaling.pop("init_scale")
    wrapped = WrappedModule(
        model, precision=precision, report=verbose or None, **{**more, **scaling}
    )
    # Of the ZeroInitContext in which it was built and left without values.
    seed = next((getattr(p, "init_seed", None) for p in model.parameters() if p.is_meta), None)
    with contextlib.ExitStack() as stack:
        if seed is not None:
            stack.enter_context(torch.random.fork_rng([]))
            torch.manual_seed(seed)
        own = WrappedOptimizer(wrapped, optimizer, max_norm=config.get("clip_grad_norm") or 0.0)
    engine = TrainingEngine(wrapped, own, n, criterion)
    if lr_scheduler is not None and n > 1:
        lr_scheduler = _Schedule(lr_scheduler, engine)
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _zero(model: Mapping[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """Arguments of manage() for zero=dict(model_config=model, optimizer_config=optimizer)."""
    where = "zero.model_config"
    own = dict.fromkeys(_MODEL) | taken(f"config: {where}", model, _MODEL)
    strategy, offload = own["shard_strategy"], own["offload_config"]
    policy = own["tensor_placement_policy"] or ("cpu" if offload else "cuda")
    if not isinstance(strategy, TensorShardStrategy):
        raise ValueError(f"{where}(shard_strategy={strategy!r}): expected a TensorShardStrategy().")
    if offload is not None and (offload, policy) != ({"device": "cpu"}, "cpu"):
        raise ValueError(
            f"{where}(offload_config={offload!r}, tensor_placement_policy={policy!r}): only dict(device='cpu') is "
            "taken, which is tensor_placement_policy='cpu'."
        )
    if optimizer.get("cpu_offload") and policy == "cpu":
        del optimizer["cpu_offload"]
    if not optimizer.get("gpu_margin_mem_ratio") and policy != "auto":
        optimizer.pop("gpu_margin_mem_ratio", None)
    found = taken("config: zero.optimizer_config", optimizer, _OPTIMIZER)
    dtype = torch.float32 if own["fp32_reduce_scatter"] else None
    return {**found, "placement_policy": policy, "gradient_dtype": dtype}


class TensorShardStrategy:
    """Says that the ranks share parameters: each has 1/N of every chunk. It does nothing by itself."""


class BucketTensorShardStrategy(TensorShardStrategy):
    """The same: a chunk has many parameters in any case."""


class ZeroInitContext:
    """What is built inside with shard_param=True comes up without memory, and gets its values in its chunks.

    Its parameters are on the meta device, so no rank ever has the whole model. `initialize`, or manage(), makes their
    modules' own initial values, or reads weights from a file, straight into the chunks of the rank that keeps them.
    With shard_param=False it is built on the target device. Random numbers outside go on as if none were drawn.
    """

    @takes(seed=2**10 - 1, shard_param=False, default_dtype=None, model_numel_tensor=None)
    def __init__(self, target_device: Any, shard_strategy: TensorShardStrategy, **given: Any):
        if not isinstance(shard_strategy, TensorShardStrategy):
            wrong = f"ZeroInitContext(shard_strategy={shard_strategy!r})"
            raise ValueError(f"{wrong}: expected a TensorShardStrategy().")
        self.target_device = torch.device(target_device)
        self.seed, self.shard_param, self.default_dtype, total = given.values()
        self.model_numel_tensor = torch.zeros(1, dtype=torch.int) if total is None else total
        self._built: list[weakref.ref[nn.Parameter]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ZeroInitContext:
        with contextlib.ExitStack() as stack:
            if self.default_dtype is not None:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.default_dtype)
            devices = [self.target_device] if self.target_device.type == "cuda" else []
            stack.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(self.seed)
            stack.callback(register_module_parameter_registration_hook(self._note).remove)
            stack.enter_context(torch.device("meta" if self.shard_param else self.target_device))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        # One that has been tied away is none.
        own = {id(p): p for built in self._built if (p := built()) is not None}
        self._built.clear()
        for parameter in own.values():
            parameter.init_seed = self.seed
        self.model_numel_tensor += sum(parameter.numel() for parameter in own.values())

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            self._built.append(weakref.ref(parameter))


# The optimizers, with the originals' arguments in the originals' order.
_ADAM = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
_NO_FILES = "moments are on the host or on the device, there is no file tier yet; leave it out"
_NVME = {"nvme_offload_fraction": Only(0.0, _NO_FILES), "nvme_offload_dir": Only(None, _NO_FILES)}
_FUSED = {
    "amsgrad": Only(False, "Adam and AdamW only"),
    "set_grad_none": Only(True, "zero_grad(set_to_none=False) zeroes gradients"),
}
_adam = takes(**_ADAM, weight_decay=0.0, adamw_mode=True, **_NVME)
HybridAdam, CPUAdam = _adam(gs.HybridAdam), _adam(gs.CPUAdam)
FusedAdam = takes(**_ADAM, adamw_mode=True, weight_decay=0.0, **_FUSED)(gs.HybridAdam)
