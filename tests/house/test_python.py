"""The house rules of Python: torch's private names stand in one place, and no function is too long to be read."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gemini_strategy"
PY_FILES = sorted(
    path
    for folder in ("gemini_strategy", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
) + [ROOT / "setup.py"]

# What torch's modules are called where they are imported.
TORCH = {"torch", "nn", "dist"}
# Modules of torch whose names are not public, besides those that begin with an underscore.
NOT_PUBLIC = ("torch.fx.experimental",)
LINES = 80  # of a function's statements, without its arguments and its docstring


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    hidden = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return hidden or dotted.startswith(NOT_PUBLIC)


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text; "" for what is no chain of names."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def torch_names(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a file asks of torch by name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            if dotted(node).partition(".")[0] in TORCH:
                yield node.lineno, dotted(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (start + alias.name).startswith("torch."):
                    yield node.lineno, start + alias.name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name)
def test_private_names_of_torch_have_one_home(path: Path) -> None:
    found = [f"{line}: {what}" for line, what in torch_names(path) if is_private(what)]
    assert not found or path == PACKAGE / "_torch.py", f"{name(path)}: {found}"


def refusal(before: str) -> str:
    """What importing something of the package raises after this program."""
    program = f"""
import torch
{before}
try:
    from gemini_strategy import manage
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_torch_without_a_name_is_refused_by_both() -> None:
    text = refusal("del torch._C._storage_address, torch._C._dispatch_keys")
    assert "lacks torch._C._storage_address, torch._C._dispatch_keys" in text
    assert text.startswith("torch 2.")


def test_a_name_whose_module_is_not_imported_is_looked_for_too(tmp_path: Path) -> None:
    package = tmp_path / "distributed" / "checkpoint"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "filesystem.py").write_text("class _StoragePrefix: pass\n")
    text = refusal(f"torch.__path__.insert(0, {str(tmp_path)!r})")
    assert "lacks torch.distributed.checkpoint.filesystem._StorageInfo, by which" in text


def statements(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last one."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


@pytest.mark.parametrize("path", PY_FILES, ids=name)
def test_no_function_is_long(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = statements(node)
            assert lines <= LINES, f"{name(path)}:{node.lineno}: {node.name} has {lines} lines"


# ---- what runs where Python drops an exception ----

# Python runs these wherever an object dies or a process ends, also between torch's C++ and its caller, and drops what a
# signal's handler raises in them. The containers of `weakref` have a callback in Python, too: weakly.py has none.
DROPPING = {"__del__", "weakref.finalize"}
DROPPING |= {f"weakref.{kind}" for kind in ("WeakSet", "WeakMethod")}
DROPPING |= {f"weakref.{kind}Dictionary" for kind in ("WeakKey", "WeakValue")}
# Where there is no other way: nothing of the caller's comes after the end of a process; and torch's pool of a device is
# ended by torch, in Python, when the last engine there is closed or collected.
MAY_DROP = {
    ("ranks/ranks.py", "atexit.register"),
    ("checkpoint/background.py", "atexit.register"),
    ("report/measured.py", "atexit.register"),
    ("lightning/trainer_ranks.py", "atexit.register"),
    ("memory/torch_memory.py", "weakref.finalize"),
}


def droppers(tree: ast.AST) -> Iterator[str]:
    """What a file has of this kind."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            yield node.name
        elif isinstance(node, ast.ImportFrom) and node.module in ("weakref", "atexit"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and dotted(node) in {*DROPPING, "atexit.register"}:
            yield dotted(node)
        elif isinstance(node, ast.Call) and dotted(node.func) == "weakref.ref":
            called = [ast.unparse(argument) for argument in node.args[1:]]
            if called and not called[0].endswith(".append"):  # of a list: it is C
                yield f"weakref.ref with {called[0]}"


def test_nothing_runs_where_python_drops_what_it_raises() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), what)
        for path in PACKAGE.rglob("*.py")
        for what in droppers(ast.parse(path.read_text()))
    }
    assert found == MAY_DROP
    text = (
        "import weakref\nfrom weakref import WeakSet\nweakref.ref(a, b)\nweakref.ref(a, c.append)"
    )
    assert list(droppers(ast.parse(text))) == ["weakref.WeakSet", "weakref.ref with b"]


def test_the_core_drops_no_exception_of_python() -> None:
    """A destructor says what it cannot raise in one place: where a transport is closed that is written in Python."""
    told = [
        path.name
        for path in (ROOT / "csrc").rglob("*.c")
        for _ in range(path.read_text().count("PyErr_WriteUnraisable("))
    ]
    assert told == ["comm.c"]
