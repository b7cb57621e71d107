"""Folders as Hugging Face has them: each rank writes its part of the weights into files whose heads are there already.

Invariants
    1. The host holds one piece of a tensor more than the engine does. Where the bytes of a file are in another order
       than those in memory, or are computed from several tensors, it holds these tensors, on each rank.
    2. Nothing changes before the folder is whole (folder.py). What an older one has beside a model, the new one has.
    3. The ranks meet after each stretch (together.py), so an error on one rank ends the saving on all.
    4. A value that was finite is finite in the file.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from gemini_strategy.checkpoint import folder
from gemini_strategy.checkpoint.contents import Field, Model
from gemini_strategy.checkpoint.records import write_at
from gemini_strategy.checkpoint.tensor_files import Entry, TensorFile, index_of, split
from gemini_strategy.checkpoint.together import in_stretches, together
from gemini_strategy.errors import GeminiError
from gemini_strategy.parameters.slot import Slot
from gemini_strategy.report.progress import Done, progress
from gemini_strategy.weights.origins import origins, stand_in
from gemini_strategy.weights.transformers import Output, is_adapted, keeps_fp32, outputs

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

_PIECE = 1 << 22  # elements
_MODEL = re.compile(
    r"(adapter_)?model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|"
    r"(generation_|adapter_)?config\.json"
)
_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class _Group:
    """Tensors of files that are made of tensors of the state, together."""

    output: Output
    sources: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        """In the files."""
        return sum(self.output.tensors[name].nbytes for name in self.names)


class _Plan:
    """What is written where; the same on every rank.

    Attributes:
        outputs: with the files of each.
        direct: (output, name in the file, name in the state): the bytes of one tensor, rounded.
        groups: the others.
        dtype: of the parameters in the files; None: there are none.
    """

    def __init__(
        self, runtime: Runtime, module: nn.Module, dtype: torch.dtype | None, most: int
    ) -> None:
        if isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):  # compiled
            module = inner
        model = Model(runtime, module)
        self._check_quantized(module, model)
        if model.others and not is_adapted(module):
            raise GeminiError(
                f"{next(iter(model.others))} is no tensor, and safetensors holds nothing else: engine.save(folder) "
                "saves it"
            )
        self._kept = keeps_fp32(module, dtype) if dtype is not None else None
        self._dtype = dtype
        self.sources: dict[str, Slot | torch.Tensor] = {}
        self._stands: dict[str, torch.Tensor] = {}
        for name in model.names:
            if name in model.others:  # of a quantized base, and no adapter's
                continue
            first = model.aliases.get(name, name)
            source = model.slots[first] if first in model.slots else model.tensors[first]
            plain = _plain(name)
            self.sources[plain] = source
            if first != name:
                self._stands[plain] = self._stands[_plain(first)]
            else:
                kind = self.dtype_of(plain)
                self._stands[plain] = stand_in(plain, tuple(source.shape), kind)
        self.outputs: list[tuple[Output, list[TensorFile]]] = []
        self.direct: list[tuple[Output, str, str]] = []
        self.groups: list[_Group] = []
        for output in outputs(module, self._stands):
            entries = [Entry(n, tuple(t.shape), t.dtype) for n, t in output.tensors.items()]
            whole = max(sum(entry.n_bytes for entry in entries), 1)
            size = most if output.stem == "model" else whole  # adapters are one file
            self.outputs.append((output, split(output.stem, entries, size, output.others)))
            self._assign(output)
        dtypes = {
            self.dtype_of(name)
            for name, source in self.sources.items()
            if isinstance(source, Slot) and source.dtype.is_floating_point
        }
        self.dtype = dtype or (functools.reduce(torch.promote_types, dtypes) if dtypes else None)

    def _check_quantized(self, module: nn.Module, model: Model) -> None:
        found = [name for name, slot in model.slots.items() if slot.is_raw]
        if found and not is_adapted(module):
            raise GeminiError(
                f"{found[0]} is quantized, and what its class adds to files is not written here: "
                "gemini_strategy.engine_of(model).close(), then save the model as its quantizing package does"
            )

    def dtype_of(self, name: str) -> torch.dtype:
        """Of a tensor of the state, in files."""
        source = self.sources[name]
        if isinstance(source, torch.Tensor):
            return source.dtype
        own = Field((name,), source, "master").dtype
        if self._dtype is None or not own.is_floating_point:
            return own
        assert self._kept is not None
        return torch.float32 if self._kept(name) else self._dtype

    def part_bytes(self, name: str) -> int:
        """Of a tensor of the state, in files: what is written of it where rank 0 is."""
        source = self.sources[name]
        n = source.numel() if isinstance(source, torch.Tensor) else source.part()[1]
        return n * self.dtype_of(name).itemsize

    def _assign(self, output: Output) -> None:
        """Whose bytes each tensor of the files is; those that share a source belong together."""
        groups: list[tuple[set[str], list[str]]] = []
        for name, tensor in output.tensors.items():
            found = origins(tensor)
            if not found:
                raise GeminiError(
                    f"{name} is made of none of the model's tensors: engine.close(dtype=torch.float32), then "
                    "model.save_pretrained()"
                )
            source = next(iter(found))
            if len(found) == 1 and tensor is self._stands[source]:
                whole = self.sources[source]
                if isinstance(whole, torch.Tensor) or whole.is_row_major:  # it lies as in a file
                    self.direct.append((output, name, source))
                    continue
            joined = (set(found), [name])
            for group in [each for each in groups if each[0] & found]:
                joined = (joined[0] | group[0], group[1] + joined[1])
                groups.remove(group)
            groups.append(joined)
        order = list(self.sources)
        for sources, names in groups:
            inner = tuple(sorted(sources, key=order.index))
            self.groups.append(_Group(output, inner, tuple(names)))

    def digest(self) -> str:
        """The same for the same files."""
        told = repr([(output.folder, files) for output, files in self.outputs])
        return hashlib.sha256(told.encode()).hexdigest()


class _Files:
    """This rank's hold of the files; `done` is told of the bytes that it has written."""

    def __init__(self, path: Path, plan: _Plan, done: Done) -> None:
        if not path.is_dir():
            raise GeminiError(
                f"{path.parent} is not the same folder on all ranks: save where every host can write"
            )
        self._done = done
        self._open: dict[Path, int] = {}
        self._begins: dict[tuple[str, str], tuple[Path, int]] = {}
        for output, files in plan.outputs:
            for file in files:
                where = path / output.folder / file.path
                for name, begin in file.begins().items():
                    self._begins[output.folder, name] = where, begin

    def put(self, output: Output, name: str, first: int, values: torch.Tensor) -> None:
        """The elements of a tensor from `first` on; `values` is on the CPU and contiguous."""
        if values.numel() == 0:
            return
        path, begin = self._begins[output.folder, name]
        if path not in self._open:
            self._open[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        data = memoryview((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))
        write_at(self._open[path], data, begin + first * values.itemsize)
        self._done(values.nbytes)

    def finish(self) -> None:
        """The bytes are on the disk afterwards."""
        for descriptor in self._open.values():
            os.fsync(descriptor)

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def save_pretrained(
    runtime: Runtime, target: Path, dtype: torch.dtype | None, most: int, module: nn.Module
) -> Path:
    """See Engine.save_pretrained; most: bytes of a file.

    Returns:
        The folder.
    """
    runtime.check_open()
    ranks = runtime.ranks
    what = f"saving {target}"

    def prepare() -> _Plan:
        runtime.recover()
        runtime.check_assigned()
        runtime.core.drain()
        return _Plan(runtime, module, dtype, most)

    plan = together(ranks, what, prepare)
    ranks.agree({"the tensors to be written": plan.digest()}, what)
    draft = together(ranks, what, lambda: _begin(target) if ranks.rank == 0 else None)
    try:
        path = Path(ranks.gather(what, None if draft is None else str(draft.path))[0])
        together(ranks, what, lambda: _create(path, plan) if draft is not None else None)
        _write(runtime, what, path, plan)

        def publish() -> None:
            if draft is not None:
                _finish(path, target, plan)
                draft.publish()

        together(ranks, what, publish)
    finally:
        if draft is not None:
            draft.close()
    return target


def _begin(target: Path) -> folder.Draft:
    """The folder to write into, if that may become `target`."""
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise GeminiError(f"{target} is there already and is no folder: give another name")
    if target.is_dir():
        if folder.is_checkpoint(target):
            raise GeminiError(f"{target} is a checkpoint of engine.save: give another name")
        for entry in target.iterdir():
            is_adapter = entry.is_dir() and (entry / _ADAPTER).is_file()
            if entry.is_symlink() or not (entry.is_file() or is_adapter):
                raise GeminiError(
                    f"{target} has {entry.name}, which is no file, and the folder is replaced as a whole: give the "
                    "model a folder of its own"
                )
    return folder.Draft(target, lambda path: None)


def _create(path: Path, plan: _Plan) -> None:
    for output, files in plan.outputs:
        (path / output.folder).mkdir(exist_ok=True)
        for file in files:
            file.create(path / output.folder)


def _write(runtime: Runtime, what: str, path: Path, plan: _Plan) -> None:
    """The bytes of all tensors."""
    ranks = runtime.ranks
    total = sum(plan.part_bytes(source) for _, _, source in plan.direct)
    total += sum(group.n_bytes for group in plan.groups)
    with progress("Gemini: saving", total, ranks.rank) as done:
        files = together(ranks, what, lambda: _Files(path, plan, done))
        try:
            in_stretches(ranks, what, _direct(runtime, files, plan))
            for group in plan.groups:
                values = {name: _whole(plan, name) for name in group.sources}  # a collective
                put = functools.partial(_put_group, files, plan, group, values)
                together(ranks, what, put if ranks.rank == 0 else lambda: None)
                del values, put
            together(ranks, what, files.finish)
        finally:
            files.close()


def _direct(
    runtime: Runtime, files: _Files, plan: _Plan
) -> Iterator[tuple[int, Callable[[], None]]]:
    """The writing of what needs no other rank, with its bytes."""
    for output, name, source in plan.direct:
        n_bytes = math.prod(plan.sources[source].shape) * plan.dtype_of(source).itemsize
        put = functools.partial(files.put, output, name)
        yield n_bytes, functools.partial(_put_own, runtime, plan, source, put)


def _put_own(
    runtime: Runtime, plan: _Plan, name: str, put: Callable[[int, torch.Tensor], None]
) -> None:
    """This rank's part of a tensor of the state; of several replicas of a shard one writes it."""
    source, dtype, ranks = plan.sources[name], plan.dtype_of(name), runtime.ranks
    if isinstance(source, torch.Tensor):
        if ranks.rank == 0:
            put(0, source.to("cpu").contiguous())
        return
    if ranks.replica.rank:
        return
    field = Field((name,), source, "master")
    begin, n = source.part()
    for first in range(begin, begin + n, _PIECE):
        values = field.read(first, min(_PIECE, begin + n - first))
        put(first, _rounded(values, dtype, name))


def _whole(plan: _Plan, name: str) -> torch.Tensor:
    """A tensor of the state; on rank 0 alone."""
    source = plan.sources[name]
    return source.to("cpu") if isinstance(source, torch.Tensor) else source.read_master(0)


def _put_group(files: _Files, plan: _Plan, group: _Group, values: dict[str, torch.Tensor]) -> None:
    made = group.output.convert(
        {name: _rounded(whole, plan.dtype_of(name), name) for name, whole in values.items()}
    )
    for name in group.names:
        want, got = group.output.tensors[name], made.get(name)
        if got is None or (got.shape, got.dtype) != (want.shape, want.dtype):
            raise GeminiError(
                f"{name} cannot be computed from {', '.join(group.sources)} alone: "
                "gemini_strategy.engine_of(model).close(), then model.save_pretrained()"
            )
        files.put(group.output, name, 0, got.contiguous())


def _rounded(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    rounded = values.to(dtype)
    if rounded is values or not values.numel() or all(map(math.isfinite, rounded.aminmax())):
        return rounded  # counting takes as much memory again
    n_lost = int(rounded.isinf().sum()) - int(values.isinf().sum())
    if n_lost:
        raise GeminiError(
            f"{name}: {n_lost} of its elements are beyond the range of {dtype} ({torch.finfo(dtype).max:g}): save it "
            "with torch.bfloat16 or torch.float32"
        )
    return rounded


def _finish(path: Path, target: Path, plan: _Plan) -> None:
    """Configurations, the index, and what the folder had besides a model; all of it on the disk."""
    for output, files in plan.outputs:
        output.describe(path / output.folder, plan.dtype)
        if len(files) > 1:
            (path / f"{output.stem}.safetensors.index.json").write_text(index_of(files))
    for entry in target.iterdir() if target.is_dir() else ():
        if _MODEL.fullmatch(entry.name) or (path / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, path / entry.name, copy_function=_link)
        else:
            _link(entry, path / entry.name)
    for entry in path.rglob("*"):
        folder.sync(entry)


def _link(source: str | Path, target: str | Path) -> None:
    """The same file under another name; a copy where the file system has no such names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _plain(name: str) -> str:
    """The name without what torch.compile adds."""
    return name.replace("_orig_mod.", "")
