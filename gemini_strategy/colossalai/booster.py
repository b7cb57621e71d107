"""Booster and GeminiPlugin of 0.5: boost, backward, and checkpoints that keep every bit."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemini_strategy.arguments import Arguments
from gemini_strategy.checkpoint import one_file
from gemini_strategy.checkpoint.folder import local
from gemini_strategy.checkpoint.together import together
from gemini_strategy.colossalai.gemini import GeminiDDP, GeminiOptimizer, management
from gemini_strategy.errors import GeminiError
from gemini_strategy.precision import LOSS_SCALING
from gemini_strategy.weights.files import WeightFiles
from gemini_strategy.wrapper import is_first_rank, refuse

_PARALLEL = "a model larger than a GPU is trained by moving chunks, with data parallelism alone; leave it out"
_MODEL_CODE = "choose the kernels in the model (attn_implementation=, torch.compile of its blocks)"
_FIXED: dict[str, tuple[Any, str]] = {
    "tp_size": (1, _PARALLEL),
    "extra_dp_size": (1, "give zero_group=, a DeviceMesh of two dimensions: replicas, shards"),
    "enable_all_optimization": (False, _MODEL_CODE),
    "enable_fused_normalization": (False, _MODEL_CODE),
    "enable_flash_attention": (False, _MODEL_CODE),
    "enable_sequence_parallelism": (False, _PARALLEL),
    "enable_jit_fused": (False, _MODEL_CODE),
    "enable_sequence_overlap": (False, _PARALLEL),
}
_IO: dict[str, tuple[Any, str]] = {
    "gather_dtensor": (True, "a checkpoint has whole tensors"),
    "prefix": (None, "give it with the path"),
    "use_async": (False, "saving waits for the disk"),
}


class GeminiPlugin:
    """What a Booster makes of a model: GeminiDDP and GeminiOptimizer, with the arguments of both.

    Args:
        precision: "fp16" or "bf16": weights in it, fp32 masters, autocast.
        gpu_margin_mem_ratio, initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis,
        max_scale, max_norm, norm_type: as GeminiOptimizer has them.

    The others are GeminiDDP's, and those of Shardformer, which are refused. What neither knows is a TypeError.

    Raises:
        ValueError: an argument is refused, by name, with the way out.
    """

    def __init__(
        self,
        chunk_config_dict: None = None,
        chunk_init_device: None = None,
        placement_policy: str = "auto",
        enable_gradient_accumulation: bool = False,
        max_prefetch: int = 0,
        shard_param_frac: float = 1.0,
        offload_optim_frac: float = 0.0,
        offload_param_frac: float = 0.0,
        warmup_non_model_data_ratio: float = 0.8,
        steady_cuda_cap_ratio: float = 0.9,
        precision: str = "fp16",
        master_weights: bool = True,
        pin_memory: bool = True,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_m: int = 32,
        hidden_dim: int | None = None,
        min_chunk_size_m: float = 32,
        memstats: None = None,
        gpu_margin_mem_ratio: float | None = None,
        initial_scale: float = 2**16,
        min_scale: float = 1,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        tp_size: int = 1,
        extra_dp_size: int = 1,
        enable_all_optimization: bool = False,
        enable_fused_normalization: bool = False,
        enable_flash_attention: bool = False,
        enable_sequence_parallelism: bool = False,
        enable_jit_fused: bool = False,
        enable_sequence_overlap: bool = False,
        enable_async_reduce: bool = True,
        use_fp8: bool = False,
        fp8_communication: bool = False,
        scatter_after_inference: bool = True,
        zero_group: Any = None,
        verbose: bool = False,
        chunk_size: int | str | None = None,
        device_budget: int | float | str | None = None,
    ) -> None:
        given = dict(locals())
        del given["self"]
        refuse("GeminiPlugin", given, _FIXED)
        Arguments("GeminiPlugin", given).check_choice("precision", ("fp16", "bf16"))
        names = (*LOSS_SCALING, "gpu_margin_mem_ratio", "max_norm", "norm_type")
        self.optimizer_arguments = {name: given[name] for name in names}
        others = {*names, *_FIXED, "precision"}
        self.model_arguments = {name: given[name] for name in given if name not in others}
        self.model_arguments["mixed_precision"] = given["precision"]
        management("GeminiPlugin", {"extra_dp_group": None, **self.model_arguments})


class Booster:
    """boost, backward, and files.

    Args:
        plugin: a GeminiPlugin.
        device, mixed_precision: None; the plugin has them.
    """

    def __init__(
        self, device: None = None, mixed_precision: None = None, plugin: GeminiPlugin | None = None
    ) -> None:
        why = "the plugin says it, GeminiPlugin(precision=...)"
        fixed = {"mixed_precision": (None, why), "device": (None, "CUDA is used if it is there")}
        refuse("Booster", locals(), fixed)
        if not isinstance(plugin, GeminiPlugin):
            raise ValueError(f"Booster(plugin={plugin!r}): expected a GeminiPlugin().")
        self.plugin = plugin

    def boost(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: Any = None,
        lr_scheduler: Any = None,
    ) -> tuple[GeminiDDP, GeminiOptimizer | None, Any, Any, Any]:
        """The model and the optimizer wrapped; criterion, loader and schedule as they are."""
        wrapped = GeminiDDP(model, **self.plugin.model_arguments)
        taken = None
        if optimizer is not None:
            taken = GeminiOptimizer(optimizer, wrapped, **self.plugin.optimizer_arguments)
        return wrapped, taken, criterion, dataloader, lr_scheduler

    def backward(self, loss: torch.Tensor, optimizer: GeminiOptimizer) -> None:
        """`optimizer.backward(loss)`."""
        optimizer.backward(loss)

    def no_sync(self, model: GeminiDDP, optimizer: Any = None) -> Any:
        """Refused by a GeminiError: gradients are summed over the ranks in every backward."""
        raise GeminiError(
            "Booster.no_sync: gradients are summed over the ranks in every backward, and add up until the step; leave "
            "no_sync out"
        )

    # ---- files; all ranks call these ----

    def save_model(
        self,
        model: GeminiDDP,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Saves the fp32 masters and buffers.

        Args:
            checkpoint: a file that rank 0 writes, or with `shard` a Hugging Face folder that all ranks write.
            shard: a folder of safetensors files, of `size_per_shard` MB at most; needs use_safetensors=True.
            use_safetensors: a safetensors file instead of one that torch.load reads.
            gather_dtensor, prefix, use_async: True, None, False.
        """
        refuse("Booster.save_model", locals(), _IO)
        engine = model.engine
        if engine is None:
            raise GeminiError("the model is not managed yet: boost it with its optimizer first")
        if shard:
            if not use_safetensors:
                raise ValueError(
                    "Booster.save_model(shard=True, use_safetensors=False): files of a folder are safetensors: give "
                    "use_safetensors=True"
                )
            engine.save_pretrained(checkpoint, max_shard_size=f"{size_per_shard}MB")
            return
        state = engine.model_state_dict(rank0_only=True)
        _write(engine, checkpoint, state, _save_tensors if use_safetensors else one_file.write)

    def load_model(
        self, model: GeminiDDP, checkpoint: str | os.PathLike[str], strict: bool = True
    ) -> None:
        """Loads what save_model has saved, on every rank: a file of torch.save, a safetensors file, or a folder.

        Names that a safetensors file has once for tied weights count for all of them.
        """
        path = Path(checkpoint)
        if path.is_dir() or path.suffix in (".safetensors", ".json"):
            files = WeightFiles(path)
            state = {name: files.tensor(name) for name in files.shapes}
            files.close()
            state = _with_ties(model.module, state)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state, strict)

    def save_optimizer(
        self,
        optimizer: GeminiOptimizer,
        checkpoint: str | os.PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Saves moments, steps, groups and the loss scale in a file, in the form of torch.optim.AdamW."""
        reason = "engine.save(folder) writes everything in parts, model.engine.save(folder)"
        fixed = {
            **_IO,
            "shard": (False, reason),
            "size_per_shard": (1024, "without shard it says nothing"),
        }
        refuse("Booster.save_optimizer", locals(), fixed)
        state = optimizer.state_dict(only_rank_0=True)
        _write(optimizer.engine, checkpoint, state)

    def load_optimizer(
        self, optimizer: GeminiOptimizer, checkpoint: str | os.PathLike[str]
    ) -> None:
        """Loads what save_optimizer has saved, on every rank, or the state of a torch.optim.AdamW."""
        optimizer.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True))

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """The schedule's own state; rank 0 writes."""
        if is_first_rank():
            torch.save(lr_scheduler.state_dict(), checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | os.PathLike[str]) -> None:
        """What save_lr_scheduler has saved."""
        lr_scheduler.load_state_dict(torch.load(checkpoint, weights_only=True))


def _write(
    engine: Any,
    checkpoint: str | os.PathLike[str],
    state: dict[str, Any],
    save: Callable[[Any, Path], None] = one_file.write,
) -> None:
    """Rank 0 writes a file, which is whole or not there. What fails there is raised on every rank."""
    path = local(checkpoint)
    is_first = engine.ranks.rank == 0
    together(engine.ranks, f"writing {path.name}", lambda: save(state, path) if is_first else None)


def _save_tensors(state: dict[str, torch.Tensor], path: Path) -> None:
    """A safetensors file; tied weights are in it once."""
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise GeminiError(
            f"{path}: writing it needs safetensors: pip install 'gemini-strategy[weights]'; or give "
            "use_safetensors=False"
        ) from error
    first = {value.data_ptr() or id(value): name for name, value in reversed(state.items())}
    tensors = {name: state[name].contiguous() for name in first.values()}
    one_file.whole(path, lambda draft: save_file(tensors, str(draft)))


def _with_ties(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """With every name of a parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = dict(state)
    for tied in names.values():
        known = next((name for name in tied if name in state), None)
        for name in tied if known is not None else ():
            found.setdefault(name, state[known])
    return found
