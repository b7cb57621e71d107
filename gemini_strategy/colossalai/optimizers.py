"""The optimizers' names, with the originals' arguments in the originals' order; each is gemini_strategy's own Adam."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gemini_strategy as gs
from gemini_strategy.wrapper import refuse

_NO_FILES = {
    "nvme_offload_fraction": (
        0.0,
        "moments are on the host or on the device, there is no file tier yet; give host_budget= and device_budget= "
        "what there is",
    ),
    "nvme_offload_dir": (None, "there is no file tier yet; leave it out"),
}


def _adam(made: type[Any]) -> Callable[..., Any]:
    def adam(
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> Any:
        """gemini_strategy's own optimizer of this name.

        Raises:
            ValueError: nvme_offload_fraction is not 0.
        """
        fraction = {"nvme_offload_fraction": float(nvme_offload_fraction)}
        refuse(made.__name__, locals() | fraction, _NO_FILES)
        return made(model_params, lr, betas, eps, weight_decay, adamw_mode, bias_correction)

    adam.__name__ = adam.__qualname__ = made.__name__
    return adam


HybridAdam = _adam(gs.HybridAdam)
CPUAdam = _adam(gs.CPUAdam)


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
