"""Gemini of 0.5: GeminiDDP, GeminiOptimizer, GeminiPlugin and Booster, whose checkpoints keep every bit."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.originals import wrapper as base
from gemini_strategy.originals.arguments import Only, chosen, takes

_PLAN = "the plan decides that from device_budget and what was measured; leave it out"
_MESH = Only(None, "give zero_group=, a DeviceMesh of two dimensions: replicas, shards")
_PARALLEL = "a model larger than a GPU is trained by moving chunks, with data parallelism alone; leave it out"
_KERNELS = Only(False, "choose them in the model (attn_implementation=, compiled blocks)")
_OPTIMIZER = {"gpu_margin_mem_ratio": None, **base.SCALING, **base.CLIPPING}
MODEL = {
    "chunk_config_dict": Only(None, "give chunk_size=, in bytes of weights"),
    "chunk_init_device": Only(None, "values go straight to their places"),
    "placement_policy": "auto",
    "enable_gradient_accumulation": False,
    "max_prefetch": Only(0, f"how far is fetched ahead: {_PLAN}"),
    "shard_param_frac": 1.0, "offload_optim_frac": 0.0, "offload_param_frac": 0.0,
    "warmup_non_model_data_ratio": Only(0.8, f"the first step is served on demand: {_PLAN}"),
    "steady_cuda_cap_ratio": Only(0.9, "give device_budget=, which is kept"),
    "search_range_m": 32, "hidden_dim": None, "min_chunk_size_m": 32,
    "pin_memory": Only(True, "places on the host are pinned memory"),
    "force_outputs_fp32": False,
    "strict_ddp_mode": Only(False, 'give placement_policy="static", which keeps everything on the device'),
    "scatter_after_inference": Only(True, f"what stays after an evaluation: {_PLAN}"),
    "mixed_precision": torch.float16,
    "zero_group": None,
    "memstats": Only(None, "the first step is traced in any case"),
    "master_weights": Only(True, "fp32 masters are always kept; they cost 2 bytes beside a bf16 weight"),
    "extra_dp_group": _MESH,
    "verbose": False,
    "enable_async_reduce": Only(True, "reductions run beside the backward in any case"),
    "fp8_communication": Only(False, "nothing is quantized"),
    "use_fp8": Only(False, "nothing is quantized"),
    "chunk_size": None, "device_budget": None,
}  # fmt: skip
_PLUGIN = {
    **{name: each for name, each in MODEL.items() if name not in ("mixed_precision", "extra_dp_group")}, **_OPTIMIZER,
    "precision": "fp16", "tp_size": Only(1, _PARALLEL), "extra_dp_size": Only(1, _MESH.reason),
    "enable_all_optimization": _KERNELS, "enable_fused_normalization": _KERNELS, "enable_flash_attention": _KERNELS,
    "enable_sequence_parallelism": Only(False, _PARALLEL), "enable_jit_fused": _KERNELS,
    "enable_sequence_overlap": Only(False, _PARALLEL),
}  # fmt: skip
_ORDER = """
chunk_config_dict chunk_init_device placement_policy enable_gradient_accumulation max_prefetch shard_param_frac
offload_optim_frac offload_param_frac warmup_non_model_data_ratio steady_cuda_cap_ratio precision master_weights
pin_memory force_outputs_fp32 strict_ddp_mode search_range_m hidden_dim min_chunk_size_m memstats gpu_margin_mem_ratio
initial_scale min_scale growth_factor backoff_factor growth_interval hysteresis max_scale max_norm norm_type tp_size
extra_dp_size enable_all_optimization enable_fused_normalization enable_flash_attention enable_sequence_parallelism
enable_jit_fused enable_sequence_overlap enable_async_reduce use_fp8 fp8_communication scatter_after_inference
zero_group verbose
"""  # of the plugin's arguments
_PRECISIONS = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
_DTYPES = {**_PRECISIONS, torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}
_POLICIES = {
    ("auto", 1.0, 0.0, 0.0): "auto",
    ("static", 1.0, 0.0, 0.0): "cuda",
    ("static", 1.0, 1.0, 0.0): "auto",
    ("static", 1.0, 1.0, 1.0): "cpu",
}
_WIDTH = 2 << 20  # bytes of 2^20 elements


def _management(call: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of manage() for those of GeminiDDP."""
    names = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
    policy, fractions = given["placement_policy"], tuple(float(given[name]) for name in names)
    if (policy, *fractions) not in _POLICIES:
        raise ValueError(
            f"{call}(placement_policy={policy!r}, {names}={fractions}): expected one of 'auto', 'static', the latter "
            f"with (1, 0, 0), all on the device, (1, 1, 0), which is 'auto', or (1, 1, 1), all on the host. What lies "
            f"between {_PLAN}; or give device_budget=, or gpu_margin_mem_ratio= for the states."
        )
    found = {name: given[name] for name in ("force_outputs_fp32", "device_budget", "chunk_size")}
    span, width, least = (given[n] for n in ("search_range_m", "hidden_dim", "min_chunk_size_m"))
    if (span, width, least) != (32, None, 32):
        found["chunk_search_range"] = int(span * _WIDTH)
        found["chunk_search_n_grids"] = max(1, int(span * _WIDTH) // (2 * (width or 1024)))
        found["min_chunk_size"] = int(least * _WIDTH)
    return {
        **found,
        "placement_policy": _POLICIES[policy, *fractions],
        "precision": chosen(call, "mixed_precision", given["mixed_precision"], _DTYPES),
        "mesh": given["zero_group"],
        "report": given["verbose"] or None,
    }


class GeminiDDP(base.WrappedModule):
    """A model in chunks, in place; GeminiOptimizer takes its optimizer over. docs/originals.md has the arguments."""

    @takes(**MODEL)
    def __init__(self, module: nn.Module, **given: Any) -> None:
        super().__init__(module, **_management("GeminiDDP", given))


class GeminiOptimizer(base.WrappedOptimizer):
    """The optimizer of a GeminiDDP: `backward(loss)`, `step`, `zero_grad`, `state_dict`, `load_state_dict`."""

    @takes(**_OPTIMIZER)
    def __init__(self, optim: torch.optim.Optimizer, module: GeminiDDP, **given: Any) -> None:
        super().__init__(module, optim, **given)

    def get_grad_norm(self) -> float:
        """The 2-norm of the gradients, unscaled and unclipped."""
        return self.engine.grad_norm()

    def clip_grad_by_norm(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clips the gradients of the next step; gives their norm."""
        return self.engine.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_by_value(self, clip_value: float) -> None:
        """Clamps every element of the gradients."""
        self.engine.clip_grad_value_(clip_value)


class GeminiPlugin:
    """What a Booster makes of a model: GeminiDDP and GeminiOptimizer, with the arguments of both."""

    @takes(**{name: _PLUGIN[name] for name in dict.fromkeys([*_ORDER.split(), *_PLUGIN])})
    def __init__(self, **given: Any) -> None:
        chosen("GeminiPlugin", "precision", given["precision"], _PRECISIONS)
        self.optimizer_arguments = {name: given.pop(name) for name in _OPTIMIZER if name in given}
        self.model_arguments = {"mixed_precision": given.pop("precision"), **given}
        _management("GeminiPlugin", self.model_arguments)


_GATHER = Only(True, "a checkpoint has whole tensors")
_PREFIX = Only(None, "give it with the path")
_ASYNC = Only(False, "saving waits for the disk")
_SHARD = Only(False, "model.engine.save(folder) writes everything in parts")
_SIZE = Only(1024, "without shard it says nothing")
_CPU = {"map_location": "cpu", "weights_only": True}


class Booster:
    """boost, backward, and files."""

    @takes(
        device=Only(None, "CUDA is used if it is there"),
        mixed_precision=Only(None, "the plugin says it, GeminiPlugin(precision=...)"),
        plugin=None,
    )
    def __init__(self, plugin: GeminiPlugin) -> None:
        if not isinstance(plugin, GeminiPlugin):
            raise ValueError(f"Booster(plugin={plugin!r}): expected a GeminiPlugin().")
        self.plugin = plugin

    @takes(optimizer=None, criterion=None, dataloader=None, lr_scheduler=None)
    def boost(self, model: nn.Module, optimizer: Any, **rest: Any) -> tuple[Any, ...]:
        """The model and the optimizer wrapped; criterion, loader and schedule as they are."""
        wrapped = GeminiDDP(model, **self.plugin.model_arguments)
        if optimizer is not None:
            optimizer = GeminiOptimizer(optimizer, wrapped, **self.plugin.optimizer_arguments)
        return wrapped, optimizer, *rest.values()

    def backward(self, loss: torch.Tensor, optimizer: GeminiOptimizer) -> None:
        """`optimizer.backward(loss)`."""
        optimizer.backward(loss)

    def no_sync(self, model: GeminiDDP, optimizer: Any = None) -> Any:
        """Refused."""
        text = "Booster.no_sync: gradients are summed over the ranks in every backward, and add up"
        raise gs.GeminiError(f"{text} until the step; leave no_sync out")

    # ---- files; all ranks call these ----

    @takes(
        shard=False, gather_dtensor=_GATHER, prefix=_PREFIX, size_per_shard=1024, use_safetensors=False,
        use_async=_ASYNC,
    )  # fmt: skip
    def save_model(
        self, model: GeminiDDP, checkpoint: Any, shard: bool, size_per_shard: int, use_safetensors: bool
    ) -> None:  # fmt: skip
        """The fp32 masters and buffers: a file that rank 0 writes, or with `shard` and use_safetensors=True a Hugging
        Face folder that all ranks write, with files of `size_per_shard` MB at most."""
        if model.engine is None:
            raise gs.GeminiError("the model is not managed yet: boost it with its optimizer first")
        if shard:
            if not use_safetensors:
                call = "Booster.save_model(shard=True, use_safetensors=False)"
                raise ValueError(f"{call}: a folder has safetensors: give use_safetensors=True")
            model.engine.save_pretrained(checkpoint, max_shard_size=f"{size_per_shard}MB")
            return
        state = model.state_dict(only_rank_0=True)
        _write(model.engine, checkpoint, state, _save_tensors if use_safetensors else torch.save)

    def load_model(self, model: GeminiDDP, checkpoint: Any, strict: bool = True) -> None:
        """What save_model has saved, on every rank: a file of torch.save, a safetensors file, or a folder.

        Names that a safetensors file has once for tied weights count for all of them.
        """
        path = Path(checkpoint)
        if not path.is_dir() and path.suffix not in (".safetensors", ".json"):
            model.load_state_dict(torch.load(path, **_CPU), strict)
            return
        state = _load_tensors(path)
        names = list(model.module.named_parameters(remove_duplicate=False))
        values = {id(parameter): state[name] for name, parameter in names if name in state}
        tied = {name: values[id(p)] for name, p in names if id(p) in values}
        model.load_state_dict({**tied, **state}, strict)

    @takes(
        shard=_SHARD, gather_dtensor=_GATHER, prefix=_PREFIX, size_per_shard=_SIZE, use_async=_ASYNC
    )
    def save_optimizer(self, optimizer: GeminiOptimizer, checkpoint: Any) -> None:
        """Moments, steps, groups and the loss scale in a file, in the form of torch.optim.AdamW."""
        _write(optimizer.engine, checkpoint, optimizer.state_dict(only_rank_0=True), torch.save)

    def load_optimizer(self, optimizer: GeminiOptimizer, checkpoint: Any) -> None:
        """What save_optimizer has saved, on every rank, or the state of a torch.optim.AdamW."""
        optimizer.load_state_dict(torch.load(checkpoint, **_CPU))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: Any) -> None:
        """The schedule's own state; rank 0 writes."""
        if base.place()[0] == 0:
            torch.save(lr_scheduler.state_dict(), checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: Any) -> None:
        """What save_lr_scheduler has saved."""
        lr_scheduler.load_state_dict(torch.load(checkpoint, weights_only=True))


def _write(engine: gs.Engine, checkpoint: Any, state: Any, save: Callable[[Any, Any], Any]) -> None:
    """Rank 0 writes a file, which is whole or not there. What fails there is raised on every rank."""
    path, error = Path(checkpoint), None
    if "://" in str(checkpoint):
        raise gs.GeminiError(f"{checkpoint} is no file of a file system: save to one and copy it")
    if engine.ranks.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as folder:
                draft = Path(folder) / path.name
                save(state, draft)
                with draft.open("rb") as file:
                    os.fsync(file.fileno())
                draft.replace(path)
        except Exception as raised:
            error = raised
    text = engine.ranks.gather(f"writing {path.name}", error and str(error))[0]
    if text is not None:
        raise gs.GeminiError(f"writing {path.name}: rank 0: {text}") from error


def _safetensors() -> Any:
    try:
        import safetensors.torch as files
    except ImportError as error:
        install = "pip install 'gemini-strategy[weights]'"
        raise gs.GeminiError(f"a safetensors file needs the package: {install}") from error
    return files


def _save_tensors(state: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file; tied weights are in it once."""
    first = {value.data_ptr() or id(value): name for name, value in reversed(state.items())}
    _safetensors().save_file({name: state[name].contiguous() for name in first.values()}, path)


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Of a safetensors file, of the index of several, or of a folder with either."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        path = index if index.is_file() else path / "model.safetensors"
    files = {path.name}
    if path.suffix == ".json":
        files = set(json.loads(path.read_text())["weight_map"].values())
    found: dict[str, torch.Tensor] = {}
    for name in files:
        found |= _safetensors().load_file(path.parent / name)
    return found
