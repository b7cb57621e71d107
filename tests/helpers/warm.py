"""Importing this trains a managed model for a step, for the processes that are forked afterwards.

The first engine of a process registers its kernels with torch and compiles small pieces, which takes longer than most
tests. The random numbers stay as they were. Nothing is trained where torch has a device: its backward would start
threads, which a fork lacks. What is there by then is left out of every collection: one in a fork would walk all that
was imported, and by that copy most of its pages.
"""

from __future__ import annotations

import gc

import torch
from torch import nn

import gemini_strategy as gs

__all__: list[str] = []


def _train() -> None:
    with torch.random.fork_rng(devices=()):
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        engine = gs.manage(
            model,
            gs.HybridAdam(model.parameters()),
            precision="bf16-mixed",
            device="cpu",
            placement_policy="cpu",
            chunk_size=4096,
        )
        engine.backward(engine.model(torch.ones(3, 4)).float().sum())
        engine.clip_grad_norm_(1.0)
        engine.optimizer.step()
        engine.close()


if not torch.cuda.is_available():
    _train()
gc.collect()
gc.freeze()
