"""docs/support.md: it is printed from the table, and each test that the table names is there to run."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection

import pytest

from helpers.support import ADAPTERS, FEATURES, PACKAGES, PAGE, ROOT, cells, page, pins


def _collected(paths: Collection[str]) -> set[str]:
    """What `make test` runs of these files, as pytest names it, parametrized tests by their function too."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not gpu", *sorted(paths)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {line for line in done.stdout.splitlines() if "::" in line}
    return found | {name.partition("[")[0] for name in found}


def test_the_page_is_what_the_table_gives() -> None:
    assert PAGE.read_text() == page(), "python tests/helpers/support.py --write"


def _here(request: pytest.FixtureRequest) -> set[str]:
    """What this run of pytest has collected itself, likewise."""
    items = (item for item in request.session.items if item.get_closest_marker("gpu") is None)
    found = {item.nodeid for item in items}
    return found | {name.partition("[")[0] for name in found}


def test_every_cell_names_a_test(request: pytest.FixtureRequest) -> None:
    named = {cell.node for feature in FEATURES for cell in cells(feature).values()}
    missing = named - _here(request)
    if missing:  # this is a run of a part of them
        missing -= _collected({node.partition("::")[0] for node in missing})
    assert not missing, f"no such tests: {sorted(missing)}"


def test_every_adapter_is_known_and_shown() -> None:
    assert all(set(row) <= set(ADAPTERS) and row for row in FEATURES.values())
    assert {name for row in FEATURES.values() for name in row} == set(ADAPTERS)


def test_the_versions_are_those_that_the_tests_have() -> None:
    """Of torch without the "+cpu" of a build."""
    here = {name: importlib.metadata.version(name).partition("+")[0] for name in PACKAGES}
    assert here == {name: pins()[name] for name in PACKAGES}


def test_lower_bounds_are_the_oldest_versions_that_the_tests_have() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    bounds = dict(re.findall(r"([\w-]+)>=([\d.]+)", " ".join(extras["huggingface"])))
    oldest = pins("oldest.txt")
    assert bounds and bounds.keys() <= oldest.keys()
    for name, bound in bounds.items():
        assert oldest[name].startswith(f"{bound}."), name
