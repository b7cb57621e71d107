"""Optimizers: Adam as the engine computes it, and the user's optimizer while its model is managed."""

from gemini_strategy.optim.adam import CPUAdam, HybridAdam, cast_model_, grad_norm

__all__ = ["CPUAdam", "HybridAdam", "cast_model_", "grad_norm"]
