"""Who may import whom in the package: down only, module by module and folder by folder."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import gemini_strategy as gs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "gemini_strategy"

# Folders, and modules outside of them, from the bottom up. What stands on one line does not know the others on it.
LAYERS = [
    ["_C", "_version", "errors"],
    ["_torch"],
    ["inherited", "sizes", "choices", "roots", "weakly"],
    ["arguments"],
    ["precision"],
    ["memory", "report", "ranks", "parameters", "step"],
    ["machine", "optim", "weights"],
    ["tools"],
    ["settings", "state", "close", "checkpoint"],
    ["agreement"],
    ["runtime"],
    ["engine"],
    ["management", "estimates"],
    [""],
    ["originals"],
    ["huggingface", "lightning", "elixir", "colossalai"],
    ["cli"],
    ["__main__"],
]


def dotted(path: Path) -> str:
    """The module in a file, as the package counts it: "" is the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {*FILES, "_C"}


def home(module: str) -> str:
    """What LAYERS has a module under: its folder, or itself."""
    return module.partition(".")[0]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, also in functions, but what only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if not is_for_types(node):
            yield node
            yield from nodes(node)


def imports(path: Path) -> set[str]:
    """The package's modules that a file imports, wherever the import stands in it."""
    names = set()
    for node in nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.relative_to(ROOT)}:{node.lineno}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    ours = {name for name in names if name.split(".")[0] == "gemini_strategy"}
    # `from gemini_strategy.errors import GeminiError` means the module, `from gemini_strategy import state` too.
    found = set()
    for name in ours:
        module = name.partition(".")[2]
        while module not in MODULES:
            module = module.rpartition(".")[0]
        found.add(module)
    return found


IMPORTS = {module: imports(path) - {module} for module, path in FILES.items()}


def test_every_module_has_a_layer() -> None:
    declared = [name for layer in LAYERS for name in layer]
    assert sorted(declared) == sorted({home(module) for module in MODULES})


@pytest.mark.parametrize("module", FILES, ids=lambda module: module or "gemini_strategy")
def test_imports_point_down(module: str) -> None:
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for other in IMPORTS[module]:
        is_family = home(other) == home(module)
        assert is_family or level[home(other)] < level[home(module)], f"{module} imports {other}"


def test_tools_are_imported_by_the_command_and_for_a_picture_alone() -> None:
    """The command names its modules in a table; test_import_is_light has that none comes with the package."""
    users = {module for module, others in IMPORTS.items() if "tools" in map(home, others)}
    assert {module for module in users if home(module) != "tools"} == {"engine"}
    assert "gemini_strategy.tools.profile" in FILES["cli"].read_text()


OLD_PATHS = {"colossalai", "elixir"}
ORIGINALS = [module for module in FILES if home(module) == "originals"]


def test_the_package_does_not_know_the_originals() -> None:
    """But for the import paths of old, and the strategy's old name, which an import of the adapter registers."""
    users = {module: others for module, others in IMPORTS.items() if home(module) != "originals"}
    known = {
        m: {o for o in others if home(o) in {"originals", *OLD_PATHS}}
        for m, others in users.items()
    }
    paths = {path: {"originals", f"originals.{path}"} for path in OLD_PATHS}
    assert {m: o for m, o in known.items() if o} == {"lightning": {"originals.strategy"}, **paths}
    for module in set(users) - OLD_PATHS:
        tree = ast.parse(FILES[module].read_text())
        words = {
            getattr(node, key, None) for node in ast.walk(tree) for key in ("id", "attr", "name")
        }
        found = {word for word in words if re.search("colossal|elixir|zero_?init", str(word), re.I)}
        assert not found or module == "lightning", f"{module}: {found}"


@pytest.mark.parametrize("module", ORIGINALS)
def test_the_originals_use_what_any_program_may(module: str) -> None:
    """Of the package what `import gemini_strategy as gs` offers, and of no object a private name."""
    tree = ast.parse(FILES[module].read_text())
    assert {home(other) for other in IMPORTS[module]} <= {"", "originals"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module != "gemini_strategy", f"{module}:{node.lineno}: write gs.name"
            assert not any(alias.name.startswith("_") for alias in node.names)
        if isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            assert of != "gs" or node.attr in gs.__all__, f"{module}:{node.lineno}: gs.{node.attr}"
            is_own = of == "self" or not node.attr.startswith("_") or node.attr.startswith("__")
            assert is_own, f"{module}:{node.lineno}: {of}.{node.attr}"


def test_no_imports_in_a_circle() -> None:
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
