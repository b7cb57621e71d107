"""The manifest of a checkpoint folder: which tensors are in it, where each element lies, and what is beside them.

One line with the format, the length and the SHA-256 of what follows; then JSON. It is written last, so a folder with a
manifest is whole, and it says all that is needed to load: no pickle is read.

Invariants
    1. Nothing of a manifest is used before its hash, its types and the places of its pieces have been checked.
    2. A file is in the folder itself, is an ordinary file and has the length that the manifest says.
    3. The pieces of a tensor are its elements, each once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemini_strategy.checkpoint.folder import MANIFEST
from gemini_strategy.errors import GeminiError

_FORMAT = "gemini-checkpoint-1"
_FILE = re.compile(r"__\d+_0\.distcp")
_MOST_MANIFEST = 1 << 30  # bytes
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


@dataclass(frozen=True)
class Piece:
    """Some of a tensor's elements: the n from `first` on, in the order of its memory, at `offset` bytes of a file."""

    file: str
    offset: int
    first: int
    n: int
    crc: int  # CRC-32 of the bytes


@dataclass(frozen=True)
class Stored:
    """A tensor in a folder. `order`: its dimensions, the slowest first, as its elements follow one another."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Manifest:
    """What a folder has.

    Attributes:
        folder: where it is.
        tensors: by name.
        rest: what is beside them, as the writer gave it (JSON).
        digest: the SHA-256 of all of it.

    Raises:
        GeminiError: it is damaged, or no manifest of this format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / MANIFEST
        with _opened(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_MANIFEST:
                raise GeminiError(f"{path} is larger than any manifest")
            head, _, body = file.read().partition(b"\n")
        try:
            kind, length, digest = head.decode("ascii").split(" ")
        except ValueError:
            raise GeminiError(f"{path} is no manifest of a checkpoint") from None
        if kind != _FORMAT:
            raise GeminiError(
                f"{path} is of the format {kind!r}, and this version reads {_FORMAT!r}"
            )
        if len(body) != int(length) or hashlib.sha256(body).hexdigest() != digest:
            raise GeminiError(
                f"{path} is damaged: it has {len(body)} bytes of {length}, or they were changed; load another "
                "checkpoint"
            )
        self.digest = digest
        self._files: dict[str, Any] = {}
        self._read: dict[tuple[str, torch.device], torch.Tensor] = {}
        try:
            content = json.loads(body)
            self._sizes: dict[str, int] = dict(content["files"])
            self.rest: dict[str, Any] = content["rest"]
            self.tensors = {
                name: _stored(name, code, self._sizes) for name, code in content["tensors"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GeminiError(f"{path}: {type(error).__name__}: {error}") from None

    def open_files(self) -> None:
        """What is read from now on is what was there now, also when another checkpoint gets the folder's name.

        Raises:
            GeminiError: a file is missing, no ordinary file, or of another length.
        """
        for name, size in self._sizes.items():
            file = self._files[name] = _opened(self.folder / name)
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise GeminiError(
                    f"{self.folder / name} has {found} bytes, and the checkpoint was saved with {size}"
                )

    def read(self, stored: Stored, first: int, n: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(first element, values) of each piece that has any of the n elements from `first` on; flat, whole pieces.

        Several threads may read at once.

        Raises:
            GeminiError: the bytes of a piece are not those that were saved.
        """
        width = stored.dtype.itemsize
        for piece in stored.pieces:
            if piece.first >= first + n or piece.first + piece.n <= first:
                continue
            data = bytearray(piece.n * width)
            found = _read_at(self._files[piece.file].fileno(), data, piece.offset)
            if found != len(data) or zlib.crc32(data) != piece.crc:
                raise GeminiError(
                    f"{self.folder / piece.file} is damaged: the {len(data)} bytes at {piece.offset} are not those "
                    "that were saved; load another checkpoint"
                )
            yield piece.first, torch.frombuffer(data, dtype=stored.dtype)

    def close(self) -> None:
        self._read.clear()
        for file in self._files.values():
            file.close()

    def whole(self, name: str) -> torch.Tensor:
        """A copy of a tensor."""
        return self.whole_of(self.tensors[name])

    def once(self, name: str, device: torch.device) -> torch.Tensor:
        """A tensor there, the same one each time."""
        if (name, device) not in self._read:
            self._read[name, device] = self.whole(name).to(device)
        return self._read[name, device]

    def whole_of(self, stored: Stored) -> torch.Tensor:
        """The same; its elements lie in the order in which they were saved."""
        flat = self.run_of(stored, 0, stored.numel)
        inverse = [stored.order.index(d) for d in range(len(stored.shape))]
        return flat.view([stored.shape[d] for d in stored.order]).permute(inverse)

    def run_of(self, stored: Stored, first: int, n: int) -> torch.Tensor:
        """The n elements from `first` on, in the order in which they were saved."""
        flat = torch.empty(n, dtype=stored.dtype, device="cpu")
        for begin, values in self.read(stored, first, n):
            skip = max(first - begin, 0)
            values = values[skip : first + n - begin]
            at = begin + skip - first
            flat[at : at + values.numel()] = values
        return flat


def _read_at(file: int, data: bytearray, offset: int) -> int:
    """Fills `data`, as far as there are bytes; how many."""
    rest, n = memoryview(data), 0
    while rest and (found := os.preadv(file, [rest], offset + n)):
        n, rest = n + found, rest[found:]
    return n


def _opened(path: Path) -> Any:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise GeminiError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise GeminiError(f"{path} is no ordinary file")
    return os.fdopen(descriptor, "rb")


def _stored(name: str, code: dict[str, Any], sizes: dict[str, int]) -> Stored:
    dtype = _DTYPES[code["dtype"]]
    shape, order = tuple(code["shape"]), tuple(code["order"])
    pieces = tuple(Piece(*fields) for fields in code["pieces"])
    numbers = [*shape, *order, *(x for p in pieces for x in (p.offset, p.first, p.n, p.crc))]
    if any(type(x) is not int or x < 0 for x in numbers) or sorted(order) != [*range(len(shape))]:
        raise ValueError(f"{name} has no such shape, order or pieces")
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.first):
        if piece.first != end or piece.n < 1:
            raise ValueError(f"{name} lacks elements from {end} on, or has some twice")
        end += piece.n
        if not _FILE.fullmatch(piece.file):
            raise ValueError(f"{name}: {piece.file!r} is no name of a file here")
        if piece.offset + piece.n * dtype.itemsize > sizes[piece.file]:
            raise ValueError(f"{name}: {piece.file} ends before its bytes do")
    if end != math.prod(shape):
        raise ValueError(f"{name} has {end} of {math.prod(shape)} elements")
    return Stored(dtype, shape, order, tuple(sorted(pieces, key=lambda piece: piece.first)))


def kind_of(code: dict[str, Any]) -> tuple[torch.dtype, tuple[int, ...]]:
    """Dtype and shape of a tensor's entry."""
    return _DTYPES[code["dtype"]], tuple(code["shape"])


def write(
    folder: Path, sizes: dict[str, int], tensors: dict[str, dict[str, Any]], rest: dict[str, Any]
) -> None:
    """Writes the manifest of a folder, the files of which are there.

    Args:
        folder: where.
        sizes: of the files, in bytes.
        tensors: by name what `Stored` is made of: dtype, shape, order, and pieces as lists of Piece's fields.
        rest: what is beside them.
    """
    for name, code in tensors.items():
        found, numel = sum(piece[3] for piece in code["pieces"]), math.prod(code["shape"])
        if found != numel:
            raise GeminiError(f"ranks have written {found} of the {numel} elements of {name}")
    content = {"files": sizes, "tensors": tensors, "rest": rest}
    body = json.dumps(content, separators=(",", ":")).encode()
    if len(body) > _MOST_MANIFEST:
        raise GeminiError(
            f"what is beside the tensors (extra) has {len(body)} bytes, more than {_MOST_MANIFEST}: keep large data in "
            "tensors"
        )
    head = f"{_FORMAT} {len(body)} {hashlib.sha256(body).hexdigest()}\n".encode()
    with open(folder / MANIFEST, "xb") as file:
        file.write(head + body)
        file.flush()
        os.fsync(file.fileno())
