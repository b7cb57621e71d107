"""Saving: every rank writes its own part of the engine's state, straight from where it is, into a folder.

Invariants
    1. The host holds a few pieces more than the engine does: a piece is read, written and forgotten.
    2. Nothing changes before the folder is whole (folder.py): an error anywhere leaves the old one, and training goes
       on.
    3. The ranks meet before the first file, after each GiB of tensors and before the folder gets its name. So an error
       on one rank ends the saving on all, and no rank waits longer for another than that takes.
    4. One checkpoint of an engine is written at a time: the next one waits for it, and raises what it met.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini_strategy.checkpoint import distcp, entries, folder, manifest
from gemini_strategy.checkpoint.contents import Field, Model
from gemini_strategy.checkpoint.parts import Part, pieces, write_rest
from gemini_strategy.checkpoint.together import in_stretches, together
from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.managed import check_options
from gemini_strategy.ranks.ranks import Ranks
from gemini_strategy.report.progress import Done, progress

if TYPE_CHECKING:
    from gemini_strategy.runtime import Runtime

_OWN = re.compile(r"\.metadata|meta\.pt|manifest\.json|__\d+_\d+\.distcp")


@dataclass(frozen=True)
class Wanted:
    """What a checkpoint is to be.

    Attributes:
        target, extra, keep_last, frozen: see Engine.save.
        meta: what is in the file meta.pt; None: the loss scaler's state.
        with_optimizer: False: the model alone.
        replaces_files: an ordinary file of the target's name may be replaced, too.
    """

    target: Path
    extra: Any = None
    keep_last: int | None = None
    frozen: bool = True
    meta: Any = None
    with_optimizer: bool = True
    replaces_files: bool = False


def save(runtime: Runtime, wanted: Wanted) -> Path:
    """See Engine.save. Returns the checkpoint's folder."""
    writing = Writing(runtime, wanted)
    ranks, what, part = runtime.ranks, writing.what, writing.part
    try:
        total = sum(field.part_bytes for field in writing.fields)
        with progress("Gemini: saving", total, ranks.rank) as done:
            write = functools.partial(_write_field, runtime, part, done)
            work = ((field.n_bytes, functools.partial(write, field)) for field in writing.fields)
            in_stretches(ranks, what, work)

        def rest() -> dict[str, Any]:
            beside = write_rest(runtime, writing.model, part, wanted.extra, wanted.with_optimizer)
            own = {**part.finish(), "rest": beside}
            writing.write_meta(wanted.meta)
            return own

        writing.publish(ranks, together(ranks, what, rest))
    finally:
        writing.close()
    return writing.made


def _write_field(runtime: Runtime, part: Part, done: Done, field: Field) -> None:
    part.begin_field(field)
    for piece in pieces(runtime, field):
        part.put(piece, field.read(piece.first, piece.n))
        done(piece.n * field.dtype.itemsize)


class Writing:
    """A checkpoint of an engine, from the call to its end. All ranks make one, and close it.

    Args:
        runtime: of the model.
        wanted: what it is to be.

    Attributes:
        what: it is, for errors.
        model, fields: what there is to write.
        path: the folder to write into; made: what it becomes.
        part: of this rank.

    Raises:
        GeminiError: there can be none, on which rank and why.
    """

    def __init__(self, runtime: Runtime, wanted: Wanted) -> None:
        runtime.check_open()
        ranks = runtime.ranks
        target = wanted.target.resolve()
        self._runtime, self._target, self._keep_last = runtime, target, wanted.keep_last
        self.what = what = f"saving {target}"
        self.model, self.fields = together(ranks, what, lambda: _begin(runtime, wanted))
        ranks.agree({"frozen": wanted.frozen, **_numbers(runtime)}, what)
        self._draft = together(ranks, what, lambda: _draft(runtime, target, wanted))
        try:
            draft = self._draft
            place = None if draft is None else [str(draft.path), str(draft.target)]
            self.path, self.made = map(Path, ranks.gather(what, place)[0])
            self.part = together(ranks, what, lambda: self._part(ranks.rank))
        except BaseException:
            self._close_draft()
            raise

    def _part(self, rank: int) -> Part:
        if not self.path.is_dir():
            raise GeminiError(
                f"{self.path.parent} is not the same folder on all ranks: save where every host can write"
            )
        return Part(self.path / f"__{rank}_0.distcp")

    def write_meta(self, meta: Any) -> None:
        """The file meta.pt, where this rank puts the checkpoint together."""
        if self._draft is None:
            return
        if meta is None:
            scaler = self._runtime.scaler
            meta = {"scaler": None if scaler is None else scaler.state_dict()}
        distcp.write_meta(self.path, meta)

    def publish(self, ranks: Ranks, own: dict[str, Any]) -> None:
        """The folder is whole, and gets its name.

        Args:
            ranks: those of the engine, or their twins.
            own: what this rank has written: Part.finish(), and "rest".
        """
        everyone = ranks.gather(self.what, own)

        def work() -> None:
            if self._draft is None:
                return
            order = [field.key for field in self.fields]
            _write_manifest(self.path, everyone, self.model.names, order)
            self._draft.publish()
            if self._keep_last is not None:
                folder.point(self._target, self.made.name)
                folder.keep(self._target, self._keep_last)

        together(ranks, self.what, work)

    def close(self) -> None:
        """What has not been published is not kept."""
        try:
            self.part.close()
        finally:
            self._close_draft()

    def _close_draft(self) -> None:
        if self._draft is not None:
            self._draft.close()


def _begin(runtime: Runtime, wanted: Wanted) -> tuple[Model, list[Field]]:
    keep_last, frozen = wanted.keep_last, wanted.frozen
    if keep_last is not None and not (isinstance(keep_last, int) and keep_last >= 1):
        raise ValueError(f"keep_last={keep_last!r} must be an int of at least 1")
    if not frozen and not any(slot.has_moments for slot in runtime.slots):
        raise GeminiError(
            "engine.save(frozen=False): no parameter is trained, and nothing would be saved: leave frozen=False out"
        )
    runtime.end_saving()
    runtime.coming_step.check_save()
    is_adam = runtime.optimizer is not None and runtime.opaque is None
    for number, group in enumerate(runtime.optimizer.param_groups if is_adam else ()):
        check_options(number, group)
    if runtime.opaque is not None:
        runtime.opaque.settle()
    runtime.recover()
    runtime.check_assigned()
    runtime.core.drain()
    model = Model(runtime, frozen=frozen)
    found = list(model.fields(runtime, wanted.with_optimizer))
    found += entries.fields(runtime) if wanted.with_optimizer else ()
    return model, found


def _numbers(runtime: Runtime) -> dict[str, Any]:
    """What is the same on all ranks, or what they save is of no one step."""
    last = _last_step(runtime)
    scale = {} if runtime.scaler is None else {"the loss scale": runtime.scaler.scale}
    others = {
        f"the step of {slot.name}": slot.adam_step
        for slot in runtime.slots
        if slot.has_moments and slot.adam_step != last
    }
    return {"the last step": last, **scale, **others}


def _last_step(runtime: Runtime) -> int:
    return max((slot.adam_step for slot in runtime.slots), default=0)


def _draft(runtime: Runtime, target: Path, wanted: Wanted) -> folder.Draft | None:
    """Where rank 0 puts the checkpoint together."""
    if runtime.ranks.rank:
        return None
    distcp.prepare()
    claim = None
    if wanted.keep_last is not None:
        if folder.is_checkpoint(target):
            raise GeminiError(f"{target} is a checkpoint itself: keep a series in another folder")
        claim = folder.Claim(target)
        target = target / folder.series_name(target, _last_step(runtime))
    try:
        return folder.Draft(target, lambda old: objection(old, wanted.replaces_files), claim)
    except BaseException:
        if claim is not None:
            claim.release()
        raise


def objection(old: Path, replaces_files: bool) -> str | None:
    """Why what has the name may not be replaced: only what a saving has made goes."""
    if old.is_file() and replaces_files:
        return None
    if not old.is_dir() or not (folder.is_checkpoint(old) or (old / ".metadata").is_file()):
        return "is there already and is no checkpoint folder"
    names = sorted(path.name for path in old.iterdir() if not _OWN.fullmatch(path.name))
    return f"is a checkpoint with {names[0]!r} of somebody else in it" if names else None


def _write_manifest(
    path: Path, everyone: list[dict[str, Any]], names: list[str], keys: list[str]
) -> None:
    """Of all ranks' parts one folder: the manifest last. `keys`: of fields, in order."""
    stored: dict[str, dict[str, Any]] = {}
    parts: dict[str, list[distcp.Part]] = {}
    paths: dict[str, tuple[str, ...]] = {}
    for own in everyone:
        for name, code in own["stored"].items():
            stored.setdefault(name, {**code, "pieces": []})["pieces"] += code["pieces"]
        for key, found in own["boxes"].items():
            parts.setdefault(key, []).extend(distcp.Part(*one) for one in found)
            paths[key] = tuple(own["paths"][key])
    stored = {key: stored[key] for key in dict.fromkeys([*keys, *stored]) if key in stored}
    rest = dict(everyone[0]["rest"])
    if "entries" in rest:
        del rest["entries"]
        rest["optimizer"]["entries"] = {
            n: e for own in everyone for n, e in own["rest"]["entries"].items()
        }
    same: dict[str, str] = {}  # keys for tools, by the tensors' names
    for alias, name in rest["aliases"].items():
        same[f"model.{alias}"] = f"model.{name}"
        parts[f"model.{alias}"] = parts[f"model.{name}"]
        paths[f"model.{alias}"] = ("model", alias)
    same |= {f"model.{name}": f"other: {name}" for name in names if f"other: {name}" in stored}
    order = [f"model.{name}" for name in names]  # as the model has them
    order += [*stored, *parts]
    parts = {key: parts[key] for key in dict.fromkeys(order) if key in parts}
    named = [(key, same.get(key, key)) for key in parts]
    kinds = {key: manifest.kind_of(stored[name]) for key, name in named if name in stored}
    distcp.write(path, paths, kinds, parts)
    rest["ranks"] = [{key: own["rest"][key] for key in ("extra", "random")} for own in everyone]
    del rest["extra"], rest["random"]
    sizes = {name: size for own in everyone for name, size in own["files"].items()}
    manifest.write(path, sizes, stored, rest)
