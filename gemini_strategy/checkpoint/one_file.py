"""One ordinary file, as torch.save writes it, from a checkpoint with stand-ins: streamed, whole or not there.

Invariants
    1. The host holds one piece more than before: torch.save leaves room for every tensor and writes none of them, and
       the bytes follow, piece by piece.
    2. What has the given name is whole at every moment: the old file or checkpoint folder until the rename, the new
       file after it (folder.py). Before the rename the bytes are on the disk (fsync), after it the name is.
    3. The archive is what torch.save makes of the same values, checksums included.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import types
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gemini_strategy import _torch
from gemini_strategy.checkpoint import folder
from gemini_strategy.checkpoint.save import objection
from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters import stand_in
from gemini_strategy.report.progress import Done, progress

MOST_BYTES = 1 << 24  # of a piece
# An entry of a ZIP archive's directory: mark, checksum, three lengths.
_CENTRAL = struct.Struct("<4s12xI8x3H12x")
_CENTRAL_MARK = b"PK\x01\x02"
_BEHIND_MARK = b"PK\x07\x08"  # of what stands behind a record: the mark, the checksum, the sizes

Pieces = Callable[[], Iterator[torch.Tensor]]  # flat, one after another


def is_local(path: Any) -> bool:
    """Whether it is a path, and no address of another file system."""
    return isinstance(path, str | os.PathLike) and "://" not in str(path) and "::" not in str(path)


def write(checkpoint: Any, path: Path) -> None:
    """Writes what torch.save(checkpoint, path) would.

    Args:
        checkpoint: anything that torch.save takes; what is a stand-in in it is read piece by piece.
        path: a local file; its folder is made if it is not there.

    Raises:
        OSError: it cannot be written, with the path; the old file is as it was.
        GuardError: a stand-in's value has changed.
        GeminiError: the path is a folder that is no checkpoint, or another process saves there.
    """
    whole(path, lambda draft: _write_archive(checkpoint, draft))


def whole(path: Path, make: Callable[[Path], None]) -> None:
    """A file that is whole or not there (invariant 2), whatever is in it.

    Args:
        path: a local file; its folder is made if it is not there.
        make: writes it, under the name that it is given.

    Raises:
        OSError: it cannot be written, with the path; the old file is as it was.
        GeminiError: the path is a folder that is no checkpoint, or another process saves there.
    """
    reason = objection(path, replaces_files=True) if path.is_dir() else None
    if reason is not None:
        raise GeminiError(f"{path} {reason}: give another name, or remove it")
    claim = folder.Claim(path)
    try:
        folder.clear(path)
        draft = folder.other_name(path, "saving")
        try:
            make(draft)
            folder.sync(draft)
            folder.put(draft, path)
        except BaseException as error:
            folder.remove(draft)
            if isinstance(error, OSError):
                text = f"cannot write the checkpoint: {error}"
                raise OSError(error.errno, text, str(path)) from error
            raise
    finally:
        claim.release()


def _write_archive(checkpoint: Any, draft: Path) -> None:
    with open(draft, "x+b") as file:
        found = _write_skeleton(checkpoint, file)
        _fill(file, found)
        found.clear()  # its class has it, too


def _write_skeleton(checkpoint: Any, file: BinaryIO) -> dict[str, Pieces]:
    """Everything but the bytes of tensors; gives those by the name of their record."""
    found: dict[str, Pieces] = {}
    rooms: dict[stand_in.StandIn, torch.Tensor] = {}
    homes: dict[int, stand_in.StandIn] = {}  # by the storage of their rooms
    made: list[Any] = []
    mode = _torch.FakeTensorMode()

    class Pickler(pickle.Pickler):
        """What torch derives its own from: it says there which storage goes to which record."""

        def __init_subclass__(cls) -> None:
            own = cls.__dict__["persistent_id"]

            def persistent_id(self: Any, value: Any) -> Any:
                said = own(self, value)
                if said is not None:
                    storage = getattr(value, "_untyped_storage", value)
                    home = homes.get(_torch.storage_id(storage))
                    pieces = _pieces_of(storage) if home is None else _pieces_behind(home)
                    found.setdefault(f"data/{said[2]}", pieces)
                    # torch.save makes another "cpu" for each room; pickle writes one string once.
                    said = tuple(sys.intern(s) if isinstance(s, str) else s for s in said)
                return said

            cls.persistent_id = persistent_id  # type: ignore[method-assign]
            made.append(cls)

        def reducer_override(self, value: Any) -> Any:
            home = stand_in.home(value)
            if home is None or value.dtype is not home.dtype:
                return NotImplemented
            if home not in rooms:
                with mode:
                    rooms[home] = torch.empty(home.numel, dtype=home.dtype, device="cpu")
                homes[_torch.storage_id(rooms[home].untyped_storage())] = home
            with mode:
                room = rooms[home].as_strided(value.shape, value.stride(), value.storage_offset())
            return room.requires_grad_(value.requires_grad).__reduce_ex__(2)

    module = types.SimpleNamespace(__name__="pickle", Pickler=Pickler)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(checkpoint, file, pickle_module=module)
    # A class lives until Python looks for cycles, and would keep what it has seen.
    for cls in made:
        del cls.persistent_id
    rooms.clear()
    homes.clear()
    return found


def _pieces_behind(home: stand_in.StandIn) -> Pieces:
    return lambda: home.pieces(MOST_BYTES // home.dtype.itemsize)


def _pieces_of(storage: Any) -> Pieces:
    values = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return lambda: (piece.cpu() for piece in values.split(MOST_BYTES))


def _fill(file: BinaryIO, found: dict[str, Pieces]) -> None:
    """Puts the bytes and their checksums where they belong."""
    file.flush()
    with zipfile.ZipFile(file) as archive:
        records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        end = archive.start_dir
        file.seek(end)
        places: dict[str, int] = {}  # of the entries in the directory
        for name in records:
            mark, _, *lengths = _CENTRAL.unpack(file.read(_CENTRAL.size))
            if mark != _CENTRAL_MARK:
                raise RuntimeError(f"{name} has no entry where torch.save's archive should have it")
            places[name] = end
            end += _CENTRAL.size + sum(lengths)
            file.seek(end)
    total = sum(records[name].file_size for name in found)
    with progress("Gemini: saving", total, rank=0) as done:  # one rank alone writes a file
        for name, pieces in found.items():
            _fill_record(file, records[name], places[name], pieces, done)


def _fill_record(
    file: BinaryIO, info: zipfile.ZipInfo, place: int, pieces: Pieces, done: Done
) -> None:
    """Of one tensor; place: of its entry in the directory."""
    file.seek(info.header_offset + 26)
    file.seek(sum(struct.unpack("<2H", file.read(4))), os.SEEK_CUR)
    start, crc = file.tell(), 0
    for piece in pieces():
        data = memoryview(piece.view(torch.uint8).numpy())
        crc = zlib.crc32(data, crc)
        file.write(data)
        done(len(data))
    if file.tell() != start + info.file_size:
        raise RuntimeError(f"{info.filename} has {file.tell() - start} bytes for {info.file_size}")
    number = struct.pack("<I", crc)
    if info.flag_bits & 8:
        mark = file.read(4)
        if mark != _BEHIND_MARK:
            raise RuntimeError(f"{info.filename} ends elsewhere than torch.save's archive says")
        file.write(number)
    else:
        file.seek(info.header_offset + 14)
        file.write(number)
    file.seek(place + 16)
    file.write(number)
