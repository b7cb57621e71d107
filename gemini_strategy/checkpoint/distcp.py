"""The metadata by which torch.distributed.checkpoint and Lightning's tools read a checkpoint folder.

The layout is the one that Lightning's FSDP strategy writes: the keys are those of {"model": ..., "optimizer_0": ...},
and `meta.pt` has what is no tensor of them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini_strategy import _torch

META = "meta.pt"
_METADATA = ".metadata"


@dataclass(frozen=True)
class Part:
    """A record of a tensor: a box of it; without a box, of an object."""

    file: str
    offset: int
    length: int
    offsets: tuple[int, ...] | None = None
    sizes: tuple[int, ...] | None = None


def prepare() -> None:
    """Imports what `write` uses, which may take a second: here, and not in a thread beside the training.

    Raises:
        ImportError: this torch lacks it.
    """
    _torch.storage_info()


def write(
    folder: Path,
    paths: Mapping[str, tuple[str, ...]],
    kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    parts: Mapping[str, list[Part]],
) -> None:
    """Writes `.metadata`, durable.

    Args:
        paths: of each key, where it is in the nested state.
        kinds: dtype and shape of the tensors.
        parts: of tensors and objects.
    """
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    record = _torch.storage_info()
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for key, own in parts.items():
        if key not in kinds:
            entries[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = record(own[0].file, own[0].offset, own[0].length)
            continue
        dtype, shape = kinds[key]
        chunks = []
        for index, part in enumerate(own):
            offsets, sizes = torch.Size(part.offsets or ()), torch.Size(part.sizes or ())
            chunks.append(ChunkStorageMetadata(offsets, sizes))
            storage[MetadataIndex(key, offsets, index)] = record(
                part.file, part.offset, part.length
            )
        properties = TensorProperties(dtype=dtype)
        entries[key] = TensorStorageMetadata(properties, torch.Size(shape), chunks)
    metadata = Metadata(entries, planner_data=dict(paths), storage_data=storage)
    with open(folder / _METADATA, "xb") as file:
        pickle.dump(metadata, file)
        file.flush()
        os.fsync(file.fileno())


def write_meta(folder: Path, meta: Any) -> None:
    """Writes `meta.pt`, durable."""
    with open(folder / META, "xb") as file:
        torch.save(meta, file)
        file.flush()
        os.fsync(file.fileno())
