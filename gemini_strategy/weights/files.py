"""Weights in safetensors files: which names there are, and their values piece by piece.

Invariants
    1. No more than one piece of a tensor is in memory at a time, and of a mapped file no more than _MAPPED bytes stay
       in this process: pages that were read count as its memory until the file is closed.
    2. `pieces` reads nothing outside the elements that it is asked for but the rest of the rows they begin and end in.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gemini_strategy.errors import GeminiError
from gemini_strategy.ranks.ranks import fingerprint

_PIECE = 4 << 20  # elements
_MAPPED = 16 << 20  # bytes
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BEGIN = 1 << 10  # elements that tell a tensor from others
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise GeminiError(
            f"weights={str(path)!r}: reading it needs the package safetensors, which is not installed: "
            "pip install 'gemini-strategy[weights]'"
        ) from None
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except Exception as error:
        raise GeminiError(f"{path} cannot be read as a safetensors file: {error}") from None


def _find_files(path: Path) -> list[Path]:
    """The files that hold the weights: of a file, an index, or a Hugging Face folder."""
    if path.is_dir():
        for name in (_SINGLE, _INDEX):
            if (path / name).is_file():
                return _find_files(path / name)
        found = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin"))
        has = f"it has {', '.join(found[:4])}" if found else "it has no weights"
        raise GeminiError(
            f"weights={str(path)!r}: the folder has neither {_SINGLE} nor {_INDEX} ({has}): give the path of a "
            "safetensors file, or save the model with save_pretrained()"
        )
    if not path.is_file():
        raise GeminiError(
            f"weights={str(path)!r}: there is no such file or folder; a model of a hub has to be downloaded before "
            "(huggingface_hub.snapshot_download gives its folder)"
        )
    if path.suffix != ".json":
        return [path]
    try:
        shards = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise GeminiError(
            f"{path} is no index of safetensors files: it has no weight_map"
        ) from None
    files = [path.parent / shard for shard in sorted(shards)]
    for file in files:
        if not file.is_file():
            raise GeminiError(f"{path} names {file.name}, which is not beside it")
    return files


class WeightFiles:
    """The tensors of one safetensors file, or of all shards of a folder.

    Attributes:
        path: as it was given.
        shapes: of each tensor, by name, in the order of the files.
        dtypes: of each tensor, by name; None: one that torch may not have.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        for file in _find_files(self.path):
            with _safe_open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    self._file_of[name] = file
                    whole = tensors.get_slice(name)
                    self.shapes[name] = tuple(whole.get_shape())
                    self.dtypes[name] = _DTYPES.get(whole.get_dtype())
        self._open: tuple[Path, Any] | None = None
        self._read_bytes = 0

    def pieces(
        self, name: str, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of the tensor's elements [begin, end), in order, flat, in the file's dtype."""
        shape = self.shapes[name]
        numel = math.prod(shape)
        end = numel if end is None else end
        if begin >= end:
            return
        row = numel // shape[0] if shape else 1
        rows = max(_PIECE // row, 1)
        for top in range(begin // row, -(-end // row), rows):
            values = self._rows(name, top, min(top + rows, -(-end // row))).reshape(-1)
            first = max(begin - top * row, 0)
            yield top * row + first, values[first : end - top * row]

    def tensor(self, name: str) -> torch.Tensor:
        """The whole of a (small) tensor, in memory of its own."""
        shape = self.shapes[name]
        if not math.prod(shape):
            return self._rows(name, 0, shape[0]).clone()
        return torch.cat([piece for _, piece in self.pieces(name)]).reshape(shape)

    def fingerprint(self, name: str) -> str:
        """Tells the tensor from others by how it begins."""
        end = min(math.prod(self.shapes[name]), _BEGIN)
        return ", ".join(fingerprint(values) for _, values in self.pieces(name, 0, end))

    def close(self) -> None:
        self._open = None
        self._read_bytes = 0

    def _rows(self, name: str, top: int, bottom: int) -> torch.Tensor:
        file = self._file_of[name]
        if self._open is None or self._open[0] != file or self._read_bytes >= _MAPPED:
            self.close()
            self._open = (file, _safe_open(file))
        tensors = self._open[1]
        try:
            has_rows = bool(self.shapes[name])
            values = tensors.get_slice(name)[top:bottom] if has_rows else tensors.get_tensor(name)
        except Exception as error:
            raise GeminiError(f"{name} cannot be read from {file}: {error}") from None
        self._read_bytes += values.nbytes
        return values
