"""A model's files in a folder that has other things too: a Trainer's output folder has its checkpoints in it.

`engine.save_pretrained` replaces a folder as a whole. So it writes beside the files, and these are renamed over the old
ones when all of them are on the disk.
"""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from gemini_strategy import Engine, engine_of
from gemini_strategy.checkpoint.together import together

_DRAFT = ".model"
# Of save_pretrained's arguments those that ask for nothing else than what is done here. All ranks write.
_UNDERSTOOD = {"self", "save_directory", "is_main_process", "max_shard_size", "save_function"}
_WEIGHTS = re.compile(r"(adapter_model|model)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


def keeping_masters(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained` of transformers or peft, for scripts that know nothing of masters: it does not round them, not
    even where the model came in 16 bits, and needs no copy of the model.

    Of a model whose weights are their masters it is as it was. Where it is asked for more than is done here, a model
    that came in fp32 is written so all the same (parameters/leaving.py).
    """

    @functools.wraps(plain)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **given: Any) -> Any:
        engine = engine_of(self)
        if engine is None or not any(slot.has_low for slot in engine._runtime.slots):
            return plain(self, save_directory, *args, **given)
        signature = inspect.signature(plain)
        asked = signature.bind(self, save_directory, *args, **given).arguments
        asked |= asked.pop("kwargs", {})
        usual = {name: p.default for name, p in signature.parameters.items()}
        usual["safe_serialization"] = True
        beyond = {n for n, v in asked.items() if v is not usual.get(n) and v != usual.get(n)}
        beyond -= _UNDERSTOOD
        if beyond:
            if asked.get("state_dict") is None and _is_rounded(engine):
                warnings.warn(
                    f"save_pretrained({', '.join(sorted(beyond))}): the weights are rounded to {engine.precision}; "
                    "without these arguments their fp32 masters are saved",
                    stacklevel=2,
                )
            return plain(self, save_directory, *args, **given)
        save_into(engine, Path(save_directory), self, asked.get("max_shard_size", "50GB"))
        return None

    return save_pretrained


def _is_rounded(engine: Engine) -> bool:
    return any(s.has_low and s.outer_dtype is s.dtype for s in engine._runtime.slots)


def save_into(
    engine: Engine,
    folder: Path,
    module: nn.Module | None = None,
    max_shard_size: int | str = "50GB",
) -> None:
    """The engine's model as a Hugging Face model in `folder`: fp32 masters, and the dtype in config.json.

    All ranks call it. Files of the same kind, of a model or of adapters, are replaced; all else stays.

    Args:
        engine: of the model.
        folder: made if it is not there.
        module: a part of the model; None: the model.
        max_shard_size: of one file.

    Raises:
        GeminiError: it cannot be written, on which rank and why; the old files are as they were.
    """
    draft = folder / _DRAFT
    engine.save_pretrained(draft, max_shard_size=max_shard_size, module=module)

    def publish() -> None:
        if engine.ranks.rank == 0:
            new = {path.name for path in draft.iterdir()}
            kinds = {found[1] for found in map(_WEIGHTS.fullmatch, new) if found}
            _move(draft, folder)
            for old in folder.iterdir():  # other shards of an older model
                found = _WEIGHTS.fullmatch(old.name)
                if old.name not in new and found and found[1] in kinds:
                    old.unlink()

    together(engine.ranks, f"saving {folder}", publish)


def _move(source: Path, target: Path) -> None:
    """What is in one folder goes into another, over files of the same names; the first is gone then."""
    target.mkdir(exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _move(entry, target / entry.name)
        else:
            entry.replace(target / entry.name)
    source.rmdir()
