"""Scripts that import Lightning without the second that torchmetrics takes for packages which they do not use."""

from __future__ import annotations

from pathlib import Path

__all__ = ["without_unused"]


def without_unused(folder: Path) -> str:
    """A folder below this one for PYTHONPATH, by which transformers and matplotlib are too old for torchmetrics."""
    found = folder / "lean"
    for name in ("transformers", "matplotlib"):
        about = found / f"{name}-0.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    return str(found)
