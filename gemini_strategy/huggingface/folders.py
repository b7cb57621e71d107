"""A model's files in a folder that has other things too: a Trainer's output folder has its checkpoints in it.

`engine.save_pretrained` replaces a folder as a whole. So it writes beside the files, and these are renamed over the old
ones when all of them are on the disk.
"""

from __future__ import annotations

import re
from pathlib import Path

from gemini_strategy import Engine
from gemini_strategy.checkpoint.together import together

__all__ = ["save_into"]

_DRAFT = ".model"
_WEIGHTS = re.compile(
    r"((adapter_)?model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?"
)


def save_into(engine: Engine, folder: Path) -> None:
    """The engine's model as a Hugging Face model in `folder`: fp32 masters, and the dtype in config.json.

    All ranks call it. Weights of an older model there are replaced, all else stays.

    Raises:
        GeminiError: it cannot be written, on which rank and why; the old files are as they were.
    """
    draft = folder / _DRAFT
    engine.save_pretrained(draft)

    def publish() -> None:
        if engine.ranks.rank == 0:
            new = {path.name for path in draft.iterdir()}
            for old in folder.iterdir():
                if old.name not in new and _WEIGHTS.fullmatch(old.name):
                    old.unlink()
            _move(draft, folder)

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
