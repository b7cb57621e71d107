"""What cannot be done right under a budget, each refused by its name and with the way out."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.names import check_name

_PLUGINS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
}
_SWITCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


_ONE_PLACE = (
    "rank 0 alone gets what several ranks put together: save into a folder that all hosts can write"
)


def check_plugins(given: dict[str, Any]) -> None:
    """Before an Accelerator is made: arguments and environment ask for no other way to spread a model.

    Raises:
        GeminiError: they do.
    """
    for name, what in _PLUGINS.items():
        if given.get(name) is not None:
            raise _other(f"Accelerator({name}=...)", what)
    for name, what in _SWITCHES.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise _other(f"{name} in the environment", what)


def _other(where: str, what: str) -> GeminiError:
    return GeminiError(
        f"{where} asks for {what}, and Gemini spreads the model by itself: leave it out, or run without Gemini "
        "(`accelerate launch` without a config file of that kind; several processes share the model)"
    )


def check_accelerator(accelerator: Any) -> None:
    """What an Accelerator turned out to be.

    Raises:
        GeminiError: its kind of parallelism, its precision or its communication cannot be honoured.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise _other(f"this Accelerator's distributed_type {kind}", kind)
    if accelerator.device.type not in ("cpu", "cuda"):
        raise GeminiError(
            f"this Accelerator computes on {accelerator.device}: Gemini computes on CUDA GPUs and on CPUs"
        )
    if accelerator.mixed_precision not in ("no", "bf16", "fp16"):
        raise GeminiError(
            f"mixed_precision={accelerator.mixed_precision!r} is not supported under Gemini: use 'no', 'bf16' or "
            "'fp16'"
        )
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.total_size not in (1, parallel.dp_replicate_size):
        raise _other("Accelerator(parallelism_config=...)", "several kinds of parallelism")
    hook = getattr(accelerator.ddp_handler, "comm_hook", None)
    if hook is not None and getattr(hook, "value", hook) != "no":
        raise GeminiError(
            f"DistributedDataParallelKwargs(comm_hook={hook}): there is no DistributedDataParallel under Gemini, and "
            "gradients are summed exactly: leave it out"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise GeminiError("ProjectConfiguration(save_on_each_node=True): " + _ONE_PLACE)
    scaling = accelerator.scaler_handler
    if scaling is not None and not scaling.enabled:
        raise GeminiError(
            "GradScalerKwargs(enabled=False): fp16 gradients need a loss scale: leave it out"
        )


def check_arguments(args: Any, *, has_optimizer: bool = False) -> None:
    """TrainingArguments, before anything is loaded; `has_optimizer`: `optim` will not be used.

    Raises:
        GeminiError: an optimizer or a way of training that cannot be honoured.
    """
    optim = str(getattr(args.optim, "value", args.optim))
    if not has_optimizer:
        check_name(optim, f"TrainingArguments(optim={optim!r})")
    for name, what in (("deepspeed", "DeepSpeed"), ("fsdp", "FSDP")):
        if getattr(args, name, None):
            raise _other(f"TrainingArguments({name}=...)", what)
    if getattr(args, "save_on_each_node", False):
        raise GeminiError("TrainingArguments(save_on_each_node=True): " + _ONE_PLACE)
    if getattr(args, "fp16_full_eval", False):
        raise GeminiError(
            "TrainingArguments(fp16_full_eval=True) is not supported under Gemini: use bf16_full_eval=True"
        )


def check_model(model: nn.Module) -> None:
    """A model that accelerate has spread or offloaded has weights that nobody here sees.

    Raises:
        GeminiError: the model has weights elsewhere, or lies on several devices.
    """
    what = type(model).__name__
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            if getattr(each, "offload", False):
                raise GeminiError(
                    f"{what}: the weights of {name or 'the model'} are offloaded by accelerate (device_map), and only "
                    "its hooks know where they are: load the model without device_map, Gemini places the weights"
                )
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise GeminiError(
            f"{what} lies on {len(devices)} devices (device_map): load it without device_map, Gemini places the weights"
        )
