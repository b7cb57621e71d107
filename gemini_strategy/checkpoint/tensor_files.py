"""Files in the safetensors format: which tensors go into which, where each begins, and the head that says so.

A file is the length of the head (8 bytes), the head in JSON, and the tensors' bytes, one after the other, row by row.
So the head is written first, and the bytes come in any order.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gemini_strategy.errors import GeminiError

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass
class TensorFile:
    """One file, before its tensors' bytes are there.

    Attributes:
        path: below the folder.
        entries: in the order of their bytes.
        notes: pairs of text that the head has besides.
    """

    path: str
    entries: list[Entry]
    notes: dict[str, str] = field(default_factory=dict)

    def head(self) -> bytes:
        """All before the first tensor.

        Raises:
            GeminiError: the format has no such dtype.
        """
        told: dict[str, object] = {"__metadata__": {"format": "pt", **self.notes}}
        end = 0
        for entry in self.entries:
            if entry.dtype not in _CODES:
                raise GeminiError(f"{entry.name} is {entry.dtype}, which safetensors cannot hold")
            begin, end = end, end + entry.n_bytes
            kind = {"dtype": _CODES[entry.dtype], "shape": entry.shape}
            told[entry.name] = {**kind, "data_offsets": [begin, end]}
        text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def begins(self) -> dict[str, int]:
        """The byte where each tensor begins, by name; "" is the end."""
        places = itertools.accumulate(
            (entry.n_bytes for entry in self.entries), initial=len(self.head())
        )
        return dict(zip([*(entry.name for entry in self.entries), ""], places, strict=True))

    def create(self, folder: Path) -> None:
        """Writes the head, and makes room for the rest."""
        with open(folder / self.path, "xb") as file:
            file.write(self.head())
            file.truncate(self.begins()[""])


def split(
    stem: str, entries: list[Entry], most: int, notes: dict[str, str] | None = None
) -> list[TensorFile]:
    """Files of at most `most` bytes, in the order of the entries; a larger tensor has one of its own.

    Wider elements come first in a file, so that every tensor is aligned to its elements.
    """
    parts: list[list[Entry]] = [[]]
    n_bytes = 0
    for entry in entries:
        if parts[-1] and n_bytes + entry.n_bytes > most:
            parts.append([])
            n_bytes = 0
        parts[-1].append(entry)
        n_bytes += entry.n_bytes
    files = []
    for number, part in enumerate(parts, 1):
        part.sort(key=lambda entry: -entry.dtype.itemsize)
        place = f"-{number:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        files.append(TensorFile(f"{stem}{place}.safetensors", part, dict(notes or {})))
    return files


def index_of(files: list[TensorFile]) -> str:
    """What model.safetensors.index.json says of several files."""
    entries = [entry for file in files for entry in file.entries]
    told = {
        "metadata": {
            "total_parameters": sum(math.prod(entry.shape) for entry in entries),
            "total_size": sum(entry.n_bytes for entry in entries),
        },
        "weight_map": {
            entry.name: Path(file.path).name for file in files for entry in file.entries
        },
    }
    return json.dumps(told, indent=2, sort_keys=True) + "\n"
