"""Collectives of the user's own on absent tensors: torch.distributed writes when its operation has returned.

Invariants
    1. What a collective writes is there before its bytes are written home: it is waited for, `async_op` or not. All
       ranks issue their collectives in one order, so no wait is for one that is yet to be issued.
    2. A message is waited for by nobody: its other side may be issued later. Sending reads; receiving is refused where
       what was opened has to be written home.
"""

from __future__ import annotations

from typing import Any

import torch

from gemini_strategy import _torch
from gemini_strategy._torch import tree_flatten
from gemini_strategy.errors import GuardError

_WORKS = "c10d::"  # they return a work to wait for
_TENSORS = "_c10d_functional::"  # they return tensors to wait for
_READS = ("c10d::send",)
_RECEIVES = ("c10d::recv_", "c10d::recv_any_source_")


def only_reads(op: str) -> bool:
    return op in _READS


def check(op: str, name: str) -> None:
    """Refuses to receive into a copy of what the parameter `name` has.

    Raises:
        GuardError: names the parameter and the way out.
    """
    if op in _RECEIVES:
        raise GuardError(
            f"{name}: {op}: what is received here would come after its bytes were written home: receive into a "
            "tensor of your own, and copy_() that"
        )


def wait(op: str, is_hasty: bool, written: list[torch.Tensor], result: Any) -> None:
    """The operation has returned `result`: lets it write its bytes into `written`.

    Args:
        is_hasty: some of them are to be there at once. Others are their lease's, which whoever waits for a work ends.
            Who waits for an absent tensor itself finds nothing to wait for, so then all are waited for here.
    """
    if op.startswith(_WORKS) and is_hasty:
        for item in tree_flatten(result)[0]:
            # NCCL gives none where it writes on the caller's stream, and torch crashes if that one is asked.
            work = _torch.unbox_work(item) if isinstance(item, torch.ScriptObject) else None
            if work is not None:
                work.wait()
    elif op.startswith(_TENSORS):
        for value in written:
            _torch.wait_tensor(value)
