"""The optimizers' names, with the originals' arguments in the originals' order; each is gemini_strategy's own Adam."""

from __future__ import annotations

from typing import Any

import gemini_strategy as gs
from gemini_strategy.wrapper import refuse

_NVME = (
    0.0,
    "moments are on the host or on the device, there is no file tier yet; give host_budget= and device_budget= what "
    "there is",
)


def _refuse_nvme(call: str, given: dict[str, Any]) -> None:
    given["nvme_offload_fraction"] = float(given["nvme_offload_fraction"])
    no_folder = (None, "there is no file tier yet; leave it out")
    refuse(call, given, {"nvme_offload_fraction": _NVME, "nvme_offload_dir": no_folder})


def HybridAdam(  # noqa: N802 (the original is a class)
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    nvme_offload_fraction: float = 0.0,
    nvme_offload_dir: str | None = None,
) -> gs.HybridAdam:
    """A gemini_strategy.HybridAdam.

    Raises:
        ValueError: nvme_offload_fraction is not 0.
    """
    _refuse_nvme("HybridAdam", dict(locals()))
    return gs.HybridAdam(model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction)


def CPUAdam(  # noqa: N802
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw_mode: bool = True,
    nvme_offload_fraction: float = 0.0,
    nvme_offload_dir: str | None = None,
) -> gs.CPUAdam:
    """A gemini_strategy.CPUAdam; arguments and errors as HybridAdam's."""
    _refuse_nvme("CPUAdam", dict(locals()))
    return gs.CPUAdam(model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction)


def FusedAdam(  # noqa: N802
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adamw_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> gs.HybridAdam:
    """A gemini_strategy.HybridAdam, whose kernel on CUDA is fused.

    Raises:
        ValueError: amsgrad=True, or set_grad_none=False.
    """
    fixed = {
        "amsgrad": (False, "Adam and AdamW only"),
        "set_grad_none": (True, "zero_grad(set_to_none=False) zeroes gradients"),
    }
    refuse("FusedAdam", locals(), fixed)
    return gs.HybridAdam(params, lr, betas, eps, weight_decay, adamw_mode, bias_correction)
