"""The house rules that a program can check: who may include whom, what leaves the shared object,
how long a file may be, and what importing the package must not do."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
TESTS_C = ROOT / "tests" / "c"
EQUIPMENT = ("chaos", "proof")  # folders there that no wheel has
PACKAGE = ROOT / "gemini_strategy"
CUDA_DRIVER = CSRC / "device" / "cuda" / "driver.h"

C_FILES = sorted(
    path
    for folder in (CSRC, *(TESTS_C / name for name in EQUIPMENT))
    for path in folder.rglob("*")
    if path.suffix in (".c", ".h", ".cu", ".cuh")
)
CORES_NAMES = TESTS_C / "chaos" / "library.c"  # defines functions of the core, which call the core
PY_FILES = sorted(
    path
    for folder in ("gemini_strategy", "tests", "examples", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
) + [ROOT / "setup.py"]

# The folders of csrc from the bottom up, each with those that its files may include beside their own. A
# subfolder counts as its folder. What is not named is forbidden: plans know no device, devices no plan.
BELOW = {
    "base": (),
    "arith": ("base",),
    "plan": ("base",),
    "device": ("base", "arith"),
    "comm": ("base", "arith", "device"),
    "memory": ("base", "arith", "plan", "device"),
    "engine": ("base", "arith", "plan", "device", "comm", "memory"),
    "torch": ("base", "arith", "plan", "device", "comm", "memory", "engine"),
    "binding": ("base", "arith", "plan", "device", "comm", "memory", "engine", "torch"),
    # In tests/c: nothing of csrc may include them.
    "chaos": ("base", "arith", "device"),
    "proof": ("base", "plan"),
}

LENGTHS = {".h": 150, ".cuh": 150, ".c": 700, ".cu": 400, ".py": 700}
TEST_LENGTH = 1200  # a test is read case by case


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def folder(path: Path) -> str:
    return path.relative_to(CSRC if CSRC in path.parents else TESTS_C).parts[0]


def code(path: Path) -> str:
    """The text without comments and string literals; lines stay where they are."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match.group())

    comments_and_strings = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\""
    return re.sub(comments_and_strings, blank, path.read_text(), flags=re.DOTALL)


def includes(path: Path) -> tuple[list[Path], list[str]]:
    """Our own headers, and the system's, that a file includes."""
    text = path.read_text()
    ours = re.findall(r'^\s*#include "([^"]+)"', text, re.MULTILINE)
    system = re.findall(r"^\s*#include <([^>]+)>", text, re.MULTILINE)
    homes = [TESTS_C if header.split("/")[0] in EQUIPMENT else CSRC for header in ours]
    return [home / header for home, header in zip(homes, ours, strict=True)], system


def test_every_folder_has_its_place() -> None:
    assert {folder(path) for path in C_FILES} == BELOW.keys()
    below: set[str] = set()
    for mine, others in BELOW.items():
        assert below.issuperset(others), f"{mine} is above what it may include"
        below.add(mine)


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_includes_point_down(path: Path) -> None:
    for header in includes(path)[0]:
        assert header.is_file(), f"{name(path)}: {header} (paths begin at csrc or tests/c)"
        mine, other = folder(path), folder(header)
        assert other in (mine, *BELOW[mine]), f"{name(path)} includes {name(header)}"


def circle(arrows: dict[Path, set[Path]]) -> list[Path]:
    """Some files each of which points to the next one, and the last to the first; [] if there are none."""
    left = {path: set(others) for path, others in arrows.items()}
    while leaves := {path for path, others in left.items() if not others & left.keys()}:
        for path in leaves:
            del left[path]
    walk: list[Path] = []
    while left and (not walk or walk[-1] not in walk[:-1]):
        walk.append(min(left[walk[-1]] & left.keys()) if walk else min(left))
    return walk[walk.index(walk[-1]) :] if walk else []


def test_includes_have_no_circles() -> None:
    found = circle({path: set(includes(path)[0]) for path in C_FILES})
    assert not found, " includes ".join(map(name, found))


def definitions(text: str) -> set[str]:
    """The functions and variables that a C file defines for others."""
    found = re.findall(
        r"^(?!static|extern|typedef)(?:__attribute__\(\(\w+\)\) )?(?:[A-Za-z_][\w \t*]*?[\s*])(gm_\w+)"
        r"(?:\([^;{}]*?\)\s*\n\{|(?:\[[^\]]*\])*\s*[=;])",
        text,
        re.MULTILINE,
    )
    return set(found)


def test_calls_have_no_circles() -> None:
    """A file that uses what another one defines is above it: reading can begin at the bottom."""
    files = [path for path in C_FILES if path.suffix == ".c" and path != CORES_NAMES]
    texts = {path: code(path) for path in files}
    defined = {path: definitions(text) for path, text in texts.items()}
    assert all(defined[path] for path in texts if path.name != "module.c")
    homes = {symbol: path for path, symbols in defined.items() for symbol in symbols}
    arrows = {}
    for path, text in texts.items():
        used = set(re.findall(r"\b\w+\b", text)) & homes.keys() - defined[path]
        arrows[path] = {homes[symbol] for symbol in used}
    found = circle(arrows)
    assert not found, " calls ".join(map(name, found))


def test_parts_of_the_engine_are_written_by_their_own_file() -> None:
    """`engine->pass.tick` is written in pass.c alone; others read it, or call what pass.c offers."""
    part = r"engine->(\w+)\.\w+(?:\.\w+)*"
    writes = rf"{part}\s*(?:[-+|&^]?=(?!=)|\+\+|--)|(?:\+\+|--){part}|atomic_(?:store|fetch_\w+|init)\(&{part}"
    written = set()
    for path in sorted((CSRC / "engine").glob("*.c")):
        for found in re.finditer(writes, code(path)):
            owner = next(filter(None, found.groups()))
            assert owner == path.stem, f"{name(path)} writes: {found.group()}"
            written.add(owner)
    assert len(written) > 10


def test_the_engines_lock_is_let_go_in_one_way() -> None:
    """gm_engine_unlock wakes the thread that writes a checkpoint, which may wait for the lock."""
    letting = "pthread_mutex_unlock(&engine->lock)"
    files = [name(path) for path in (ROOT / "csrc").rglob("*.c") if letting in path.read_text()]
    assert files == ["csrc/engine/engine.c"]


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_foreign_headers_have_one_home(path: Path) -> None:
    foreign = includes(path)[1]
    if folder(path) != "binding":
        assert "Python.h" not in foreign, name(path)
    if path.suffix != ".cu" and path.suffix != ".cuh":
        assert not [header for header in foreign if header.startswith("cuda_")], name(path)
    if "cuda.h" in foreign:
        assert path == CUDA_DRIVER
    assert not [header for header in foreign if re.match(r"(torch|ATen|c10)/", header)], name(path)
    if path.suffix == ".c" and CUDA_DRIVER in includes(path)[0]:
        text = code(path)
        raw = path.read_text()
        assert "#ifdef GM_WITH_CUDA" in text, name(path)
        assert raw.index("#ifdef GM_WITH_CUDA") < raw.index(
            f'#include "{CUDA_DRIVER.relative_to(CSRC)}"'
        ), name(path)


def test_shared_object_exports_only_what_others_call() -> None:
    built = sorted(PACKAGE.glob("_C*.so"))
    assert len(built) == 1, f"build it first (make build): {built}"
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", built[0]], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listed.splitlines()}
    # torch and ctypes find the allocator's functions by name.
    header = (CSRC / "torch" / "alloc.h").read_text()
    by_name = set(re.findall(r"^GM_TORCH_EXPORT [^;]*?(gm_torch_\w+)\(", header, re.MULTILINE))
    assert exported == {"PyInit__C", *by_name}


def test_what_serves_tests_alone_is_not_shipped() -> None:
    """Neither the chaos device nor a word of it; the proof of plans is in an asserted build, and in no other."""
    shipped = [path for path in C_FILES if CSRC in path.parents] + sorted(PACKAGE.rglob("*.py*"))
    for path in shipped:
        if path.suffix != ".pyc":
            assert "chaos" not in path.read_text().lower(), name(path)
    built = next(PACKAGE.glob("_C*.so")).read_bytes()
    assert b"chaos" not in built.lower()
    of_proof = b"weights of chunk %u are copied over while in use"
    assert of_proof.decode() in (TESTS_C / "proof" / "check.c").read_text()
    has_assertions = "import torch, gemini_strategy._C as c; print(c.BUILT_WITH_ASSERTIONS)"
    assert (of_proof in built) == bool(int(run_python(has_assertions)))


@pytest.mark.parametrize("path", C_FILES, ids=name)
def test_library_never_ends_the_process(path: Path) -> None:
    ends = re.findall(r"\b(?:_?exit|_Exit|quick_exit|abort|longjmp)\s*\([^\n]*", code(path))
    allowed = ["abort();"] if path.name == "base.c" else []  # gm_assert_failed
    assert ends == allowed, name(path)


@pytest.mark.parametrize("path", [p for p in C_FILES if folder(p) == "binding"], ids=name)
def test_gil_is_taken_back_wherever_it_is_released(path: Path) -> None:
    text = code(path)
    begins = len(re.findall(r"\bPy_BEGIN_ALLOW_THREADS\b", text))
    spans = re.findall(r"\bPy_BEGIN_ALLOW_THREADS\b(.*?)\bPy_END_ALLOW_THREADS\b", text, re.DOTALL)
    assert begins == len(spans) == len(re.findall(r"\bPy_END_ALLOW_THREADS\b", text)), name(path)
    spans += re.findall(r"(?<!define )\bGM_(?:NO|WITHOUT)_GIL\((.*?)\);", text, re.DOTALL)
    for span in spans:
        assert not re.search(r"\b(return|goto|Py\w+)\b", span), f"{name(path)}: {span}"


@pytest.mark.parametrize("path", C_FILES + PY_FILES, ids=name)
def test_file_says_what_it_is_and_stays_short(path: Path) -> None:
    text = path.read_text()
    if path.suffix == ".py":
        has_purpose = not text.strip() or text.startswith("#") or ast.get_docstring(ast.parse(text))
        assert has_purpose, f"{name(path)}: no purpose comment"
    else:
        assert text.startswith(f"/* {path.name} - "), f"{name(path)}: no purpose comment"
        if CSRC in path.parents:  # clang-format sees to code, not to comments
            longest = max(text.splitlines(), key=len)
            assert len(longest) <= 100, f"{name(path)}: {len(longest)} columns: {longest}"
    length = text.count("\n")
    is_test = "tests" in path.parts and path not in C_FILES
    limit = TEST_LENGTH if is_test else LENGTHS[path.suffix]
    # Whoever needs more room gives the reason, in a sentence that has these words, at the top.
    has_reason = "length budget" in " ".join(text[:4000].split())
    assert length <= limit or has_reason, f"{name(path)}: {length} lines"


def imported(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module.split(".")[0])
    return modules


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name)
def test_frameworks_stay_in_their_adapter(path: Path) -> None:
    modules = imported(path)
    if path.parent.name != "lightning":
        assert not modules & {"lightning", "pytorch_lightning", "lightning_fabric"}, name(path)
    # The second builds a model to be estimated.
    if (
        path.parent.name != "huggingface"
        and name(path) != "gemini_strategy/estimates/hugging_face.py"
    ):
        found = modules & {"transformers", "tokenizers", "peft", "accelerate", "trl", "datasets"}
        assert not found, name(path)


TEXT_FILES = [
    path
    for path in sorted(ROOT.rglob("*"))
    if path.is_file()
    and path.suffix in (".c", ".h", ".cu", ".cuh", ".py", ".pyi", ".md", ".toml", ".sh", ".txt", "")
    and not {".git", ".venv", "build", "dist", "results"} & set(path.relative_to(ROOT).parts)
    and not re.search(
        r"(^|/)(\.\w+_cache|\.hypothesis|__pycache__|[^/]*\.egg-info|shared)/", name(path)
    )
]


def test_no_words_that_do_not_belong() -> None:
    left_open = r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]) + r")\b"
    machine_paths = r"(?<![\w.}~-])/(?:home|root|work|opt|Users)/"
    for path in TEXT_FILES:
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.search(f"{left_open}|{machine_paths}", line)
            assert not found, f"{name(path)}:{number}: {line.strip()}"
    for path in [*C_FILES, *sorted(PACKAGE.rglob("*.py"))]:
        found = re.search(r"(?<!\.)\b(?:buckets?|partition\w*|iterations?)\b", path.read_text())
        assert not found, (
            f"{name(path)}: {found and found.group()} (see the words in docs/design.md)"
        )


def test_no_test_is_skipped_or_expected_to_fail() -> None:
    marks = re.compile(r"\b(?:pytest\.(?:skip|xfail|importorskip)|mark\.(?:skip\w*|xfail))\b")
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path != Path(__file__):
            assert not marks.search(path.read_text()), name(path)


def run_python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    """No torch before something is used. Then no CUDA context (it would break a later fork and take memory), no other
    package, no threads, and of torch nothing that takes long to import."""
    program = """
import sys, threading
import gemini_strategy
assert "torch" not in sys.modules
import torch
before = set(sys.modules)
for name in gemini_strategy.__all__:
    getattr(gemini_strategy, name)
assert not torch.cuda.is_initialized()
added = set(sys.modules) - before
ours = {"gemini_strategy", "torch", *sys.stdlib_module_names}
others = {name.partition(".")[0] for name in added} - ours
assert not others, others
slow = "_dynamo", "_inductor", "distributed.checkpoint", "distributed.fsdp", "distributed.tensor"
heavy = {name for name in added if name.startswith(tuple(f"torch.{part}" for part in slow))}
assert not heavy, heavy
assert threading.active_count() == 1
assert "gemini_strategy.engine" in sys.modules
assert not any(name.startswith("gemini_strategy.tools") for name in sys.modules)
"""
    run_python(program)


def test_stub_names_what_the_extension_has() -> None:
    declared = set()
    for node in ast.parse((PACKAGE / "_C.pyi").read_text()).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            declared.add(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            declared.add(node.name)
        if isinstance(node, ast.ClassDef):
            parts = [part.name for part in node.body if isinstance(part, ast.FunctionDef)]
            parts += [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
            declared |= {f"{node.name}.{part}" for part in parts if not part.startswith("__")}
    program = """
import torch, gemini_strategy._C as c
names = [n for n in dir(c) if not n.startswith("__")]
print(*names)
for name in names:
    if isinstance(getattr(c, name), type):
        print(*(f"{name}.{n}" for n in dir(getattr(c, name)) if not n.startswith("__")))
"""
    assert declared == set(run_python(program).split())
