"""What the documentation says is run: its programs as printed, its commands as far as a CPU can, and its facts that a
program can look up.

Every fence of README.md, CONTRIBUTING.md, benchmarks/log.md and docs/*.md names its language: python, sh, or text for
what is not run. A python fence is a program of its own, and so is a diff fence, which shows the lines that Gemini
adds: it is run with them. What its reader is supposed to have stands in its first lines,
`# given: model (a torch.nn.Module); loader (of its inputs)`, and GIVEN says what stands for it here;
`# torchrun --nproc-per-node=2 train.py` there starts it on two ranks.
No program sees a GPU: the engine's host device takes its place. Each has a folder and a process of its own, forked
from one that has imported torch, the package and the library that the program trains with; one of each kind of command
is started as a person starts it. A command that names a script runs the program above it that begins with this name.
What stands after `<!-- prints -->` is what the fence above it prints, estimates at their full size.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import gemini_strategy as gs
from gemini_strategy import cli
from gemini_strategy.report.reporting import STATS
from helpers.forked import Forks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
LOG = ROOT / "benchmarks" / "log.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", LOG, *sorted((ROOT / "docs").rglob("*.md"))]

# What the reader of a program has, by what its first lines say. The programs themselves are not changed.
GIVEN = {
    "model (a torch.nn.Module)": """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 1))
""",
    "loader (of its inputs)": """
import torch
loader = torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=8)
""",
    "batches (of its inputs)": """
import torch
batches = [torch.randn(8, 64) for _ in range(8)]
""",
    "its optimizer and engine": """
import torch
import gemini_strategy as gs
if "RANK" in os.environ:
    torch.distributed.init_process_group()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = gs.manage(model, optimizer, device_budget="1MB")
""",
    "module (a LightningModule)": """
import lightning
import torch
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 1))
    def training_step(self, batch):
        return self.layers(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
module = Module()
""",
    "llama-8b (the folder written above)": """
from transformers import LlamaConfig
LlamaConfig(
    dtype="bfloat16",
    hidden_size=4096,
    intermediate_size=14336,
    num_key_value_heads=8,
    vocab_size=128256,
).save_pretrained("llama-8b")
""",
    "qwen-14b (the folder written above)": """
from transformers import Qwen2Config
Qwen2Config(
    dtype="bfloat16",
    hidden_size=5120,
    intermediate_size=13824,
    num_hidden_layers=48,
    num_attention_heads=40,
    num_key_value_heads=8,
    vocab_size=152064,
).save_pretrained("qwen-14b")
""",
    "llama-7b (the folder written above)": """
from transformers import LlamaConfig
LlamaConfig(dtype="bfloat16").save_pretrained("llama-7b")
""",
    "my-model (a folder of save_pretrained)": """
import os
from transformers import AutoModelForCausalLM, LlamaConfig
if not os.path.exists("my-model"):
    AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )).save_pretrained("my-model")
""",
    "batches (of token ids)": """
import torch
batches = list(torch.randint(0, 64, (4, 2, 16)))
""",
    "loader (of token ids)": """
import torch
loader = torch.utils.data.DataLoader(torch.randint(0, 64, (8, 16)), batch_size=2)
""",
    "model (a causal LM of transformers)": """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
))
""",
    "rows (with input_ids and labels)": """
import torch
rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 64, (8, 16))]
""",
    "tokenizer (of transformers)": """
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
words = {"<pad>": 0, "<eos>": 1, **{str(i): i for i in range(2, 64)}}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="2")),
    pad_token="<pad>", eos_token="<eos>",
)
""",
    "dataset (rows with input_ids)": """
from datasets import Dataset
dataset = Dataset.from_dict({"input_ids": [[2 + i % 62 for i in range(j, j + 16)] for j in range(32)]})
""",
}
# What no test has is a GPU. A program in which the pattern is found gets what stands behind it first.
NO_GPU = {
    r"torch\.cuda\.set_device": """
import torch
torch.cuda.set_device = lambda device: None  # the host device has no number
""",
    r"\bTrainingArguments\b|\bSFTConfig\b|Accelerator\b": """
from transformers import TrainingArguments
os.environ["ACCELERATE_USE_CPU"] = "true"
own = TrainingArguments.__post_init__
def choose_cpu(self):
    self.use_cpu = True
    own(self)
TrainingArguments.__post_init__ = choose_cpu
""",
}


@dataclass(frozen=True)
class Fence:
    page: Path
    line: int
    language: str
    text: str
    given: tuple[str, ...]
    ranks: int
    is_printed: bool  # by the fence before it

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def fences(page: Path) -> Iterator[Fence]:
    found = re.finditer(
        r"(^<!-- prints -->\n)?^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    for match in found:
        language, text = match[2], match[3]
        if language == "diff":
            assert re.fullmatch(r"(?:(?:[ +] .*)?\n)+", text), f"{page.name}: {text}"
            language, text = "python", re.sub(r"^[ +] ", "", text, flags=re.MULTILINE)
        first = re.match(r"(?:# .*\n)*", text)
        assert first is not None
        given = " ".join(re.findall(r"^# given: (.*)$", first[0], re.MULTILINE)).split("; ")
        ranks = re.search(r"^# torchrun --nproc-per-node=(\d+) train\.py$", first[0], re.MULTILINE)
        yield Fence(
            page,
            page.read_text()[: match.start(2)].count("\n") + 1,
            language,
            text,
            tuple(filter(None, given)),
            0 if ranks is None else int(ranks[1]),
            match[1] is not None,
        )


FENCES = [fence for page in PAGES for fence in fences(page)]
PROGRAMS = [fence for fence in FENCES if fence.language == "python"]
PRINTED = {before: fence.text for before, fence in itertools.pairwise(FENCES) if fence.is_printed}


def started(command: Fence) -> Fence | None:
    """The program that it starts: the last one above it that begins with the name of its script."""
    scripts = re.findall(r"(?<=\s)\w+\.py\b", command.text)
    above = [
        program
        for program in PROGRAMS
        if program.page == command.page and program.line < command.line
        if any(program.text.startswith(f"# {script}\n") for script in scripts)
    ]
    return above[-1] if above else None


STARTED = {
    command: program
    for command in FENCES
    if command.language == "sh" and (program := started(command)) is not None
}
# By Python alone, and by torchrun: the first programs.
REAL = [
    next(p for p in PROGRAMS if p not in STARTED.values() and bool(p.ranks) is many)
    for many in (False, True)
]
COMMANDS = [
    (fence, command)
    for fence in FENCES
    if fence.language == "sh"
    for line in re.sub(r"\\\n *", "", fence.text).splitlines()
    for command in [line.partition("#")[0].strip()]
    if command
]


def test_every_fence_is_of_a_kind_that_is_known() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert text.count("\n```") == 2 * len(FENCES)
    assert "<!-- needs" not in text  # a reader would not see it
    assert len(re.findall(r"^(?:  )?# given: ", text, re.MULTILINE)) == sum(
        fence.text.count("# given: ") for fence in FENCES
    )
    assert text.count("<!-- prints") == sum(fence.is_printed for fence in FENCES) == len(PRINTED)
    for fence in FENCES:
        assert fence.language in ("python", "sh", "text"), fence
        assert set(fence.given) <= set(GIVEN), fence
        assert fence.is_printed <= (fence.language == "text"), fence
    assert {name for fence in FENCES for name in fence.given} == set(GIVEN)
    assert len(STARTED) >= 4


def write_program(fence: Fence, path: Path) -> None:
    stands_for = [code for pattern, code in NO_GPU.items() if re.search(pattern, fence.text)]
    stands_for += [GIVEN[name] for name in fence.given]
    path.write_text("import os\n" + "".join(stands_for) + "\n" + fence.text)


ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
# What takes seconds to import, by a word in the program: one process that forks has it for all of them.
LIBRARIES = {
    "lightning": ("lightning.pytorch",),
    "trl": ("transformers", "accelerate", "datasets", "peft", "trl"),
    "transformers": ("transformers", "accelerate", "datasets", "peft"),
    "": (),
}


class Servers:
    """The processes that fork, by what they have imported; each is started when it is first asked for."""

    def __init__(self) -> None:
        self._forks: dict[tuple[str, ...], Forks] = {}

    def run(self, fence: Fence, program: str, folder: Path, words: list[str], ranks: int) -> str:
        """What `python words` prints there; with ranks, in as many processes."""
        modules = next(names for word, names in LIBRARIES.items() if word in program)
        if modules not in self._forks:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in ENVIRONMENT.items():
                    patch.setenv(name, value)
                self._forks[modules] = Forks(
                    (), (*modules, "helpers.program"), has_had_engine=False
                )
        (ended,) = self._forks[modules].run(
            *("helpers.program:run", str(folder), words, ranks),
            timeout=240.0,
            environment=ENVIRONMENT,
        )
        assert ended.error is None and ended.exit_code == 0, f"{fence}\n{ended.how}\n{ended.output}"
        return str(ended.value)

    def close(self) -> None:
        for forks in self._forks.values():
            forks.close()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


def run_in(folder: Path, fence: Fence, *words: str) -> str:
    """Runs Python with `words` there, without a GPU; its standard output."""
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{fence}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def assert_printed(fence: Fence, printed: str) -> None:
    """It is what the page shows under the fence."""
    got, shown = (
        [line.rstrip() for line in t.strip().splitlines()] for t in (printed, PRINTED[fence])
    )
    assert got == shown, f"{fence}: the page shows something else than\n{printed}"


@pytest.mark.parametrize("fence", [p for p in PROGRAMS if p not in STARTED.values()], ids=str)
def test_program(fence: Fence, tmp_path: Path, servers: Servers) -> None:
    write_program(fence, tmp_path / "train.py")
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={fence.ranks}"]
    if fence in REAL:
        printed = run_in(tmp_path, fence, *(launcher if fence.ranks else ()), "train.py")
    else:
        program = (tmp_path / "train.py").read_text()
        printed = servers.run(fence, program, tmp_path, ["train.py"], fence.ranks)
    if fence in PRINTED:
        assert_printed(fence, printed)


def torch_names(program: str) -> Iterator[str]:
    """What it asks of torch by dots, without what it imports by name."""
    tree = ast.parse(program)
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        is_imported = any(text.startswith(f"{name}.") for name in imported - {"torch"})
        if re.fullmatch(r"torch(\.\w+)+", text) and not is_imported:
            yield text


def test_names_are_there_without_other_imports() -> None:
    """The process that forks has imported modules of torch that the program would then not have to import."""
    names = sorted({name for p in PROGRAMS for name in torch_names(p.text)})
    assert len(names) > 10
    program = "import sys, torch, gemini_strategy\nfor name in sys.argv[1:]: eval(name)"
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def targets(*words: str) -> None:
    """make knows these targets; nothing is made."""
    done = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def run_program_above(fence: Fence, words: list[str], folder: Path, servers: Servers) -> None:
    """The command, as printed, with the last program before it as its script."""
    script = next(word for word in words if word.endswith(".py"))
    write_program(STARTED[fence], folder / script)
    starts = {
        "gemini-strategy": ["-m", "gemini_strategy"],
        "torchrun": ["-m", "torch.distributed.run"],
    }
    first = next(f for f, c in COMMANDS if f in STARTED and c.startswith(words[0]))
    start = [*starts[words[0]], *words[1:]]
    if fence == first or words[0] == "torchrun":
        run_in(folder, fence, *start)
    else:
        servers.run(fence, (folder / script).read_text(), folder, start, 0)


@pytest.mark.parametrize(("fence", "command"), COMMANDS, ids=str)
def test_command(
    fence: Fence,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    servers: Servers,
) -> None:
    words = shlex.split(command)
    while "=" in words[0]:
        words.pop(0)
    if fence.given:
        monkeypatch.chdir(tmp_path)
        for name in fence.given:
            exec(GIVEN[name])
    if fence in STARTED:
        run_program_above(fence, words, tmp_path, servers)
        return
    if words[:2] == ["gemini-strategy", "estimate"]:
        if fence in PRINTED:
            capsys.readouterr()
            assert cli.main(words[1:]) in (0, 1), fence
            assert_printed(fence, capsys.readouterr().out)
            return
        words[words.index("--tokens") + 1] = "2x16"  # the folder has a small model
        assert cli.main(words[1:]) == 0, fence
        return
    if words[:2] == ["gemini-strategy", "profile"]:
        monkeypatch.chdir(tmp_path)
        words[words.index("--ranks") + 1] = "1"
        assert cli.main(words[1:]) == 0, fence
        assert all((tmp_path / word).is_file() for word in words if word.startswith("rates."))
        return
    if words[0] == "make":
        targets(*words[1:])
        return
    if words[0] == "gemini-strategy":
        words[:1] = ["python", "-m", "gemini_strategy"]
    assert words[0] in ("python", ".venv/bin/python"), f"{fence}: no test for {command}"
    if words[1:4] == ["-m", "gemini_strategy", "run"]:
        values = ("--device-budget", "--host-budget", "--policy")
        own = range(4, len(words))
        program = next(i for i in own if words[i][0] != "-" and words[i - 1] not in values)
        words = words[:program]  # what follows is the program's
    elif words[1] == "-m":
        assert words[2] == "pytest", f"{fence}: no test for {command}"
        assert (ROOT / words[3]).is_file(), f"{fence}: {command}"
        return
    # A benchmark's options are read from left to right, and --help ends it before it does anything.
    done = subprocess.run(
        [sys.executable, *words[1:], "--help"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{fence}: {done.stderr}"
    for option in (word for word in words if word.startswith("--")):
        assert option in done.stdout, f"{fence}: {option} is no option of {words[1]}"


def test_targets_that_the_text_names() -> None:
    named = {
        target
        for page in PAGES
        for target in re.findall(r"`make\s([a-z][a-z-]*)[^`]*`", page.read_text())
    }
    assert {"demo", "test", "test-gpu"} <= named
    targets(*sorted(named))


def test_ci_runs_what_the_readme_says() -> None:
    commands = [command for fence, command in COMMANDS if fence.page == README]
    said = [command for command in commands if command.startswith("make ")]
    runs = re.findall(r"^timed (make [\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert said == ["make demo", "make test"] == runs[:2]


def test_readme_is_short_and_lines_are_not_long() -> None:
    assert len(README.read_text().splitlines()) <= 180
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            is_table = line.startswith("|")
            assert is_table or len(line) <= 100, f"{page.name}:{number}: {len(line)} columns"


@pytest.mark.parametrize("name", ["design.md", "limits.md"])
def test_page_is_short(name: str) -> None:
    assert len((ROOT / "docs" / name).read_text().splitlines()) <= 150


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", prose):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_environment_variables() -> None:
    """Those that the code asks for are documented, and no others."""
    source = [*(ROOT / "gemini_strategy").rglob("*.py"), *(ROOT / "csrc").rglob("*.c")]
    calls = r'(?:getenv\(|environ\.get\(|environ\[)"(GEMINI_\w+)"'
    asked = {name for path in source for name in re.findall(calls, path.read_text())}
    text = "\n".join(page.read_text() for page in PAGES)
    build = set(re.findall(r"GEMINI_\w+", (ROOT / "setup.py").read_text()))
    named = set(re.findall(r"GEMINI_\w+", text))
    assert asked <= named
    assert named <= asked | build


def test_measured_table() -> None:
    """README's table is what the kept lines give."""
    done = subprocess.run(
        [sys.executable, "benchmarks/table.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    table = re.search(r"<!-- measured -->\n(.*)<!-- /measured -->", README.read_text(), re.DOTALL)
    assert table is not None
    assert table[1] == done.stdout, "python benchmarks/table.py --write"
    assert len(done.stdout.splitlines()) == 2 + 5


def test_headline() -> None:
    """A loop such as README's has the bits of HybridAdam without an engine, and torch's AdamW differs by rounding."""

    def train(optimizer_class: type, is_managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1)
        model = torch.nn.Sequential(*layers)
        optimizer = optimizer_class(model.parameters(), lr=1e-3, weight_decay=0.01)
        engine = None
        clip = getattr(optimizer, "clip_grad_norm_", None)
        if is_managed:
            engine = gs.manage(model, optimizer, device_budget="3MB", device="cpu")
            clip = engine.clip_grad_norm_
        for _ in range(20):
            for _ in range(4):
                (model(torch.randn(64, 256)).square().mean() / 4).backward()
            if clip is not None:
                clip(1.0)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if engine is not None:
            engine.close()
        return list(model.parameters())

    ours = train(torch.optim.AdamW, True)
    assert all(torch.equal(a, b) for a, b in zip(ours, train(gs.HybridAdam, False), strict=True))
    torchs = train(torch.optim.AdamW, False)
    most = max((a - b).abs().max().item() for a, b in zip(ours, torchs, strict=True))
    # torch orders Adam's operations differently: some roundings of weights below 0.1, each 4e-9 at most, add up.
    assert 0 < most < 1e-6


def test_picture() -> None:
    """docs/speed.svg is what the kept lines give."""
    done = subprocess.run(
        [sys.executable, "benchmarks/picture.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    shown = (ROOT / "docs" / "speed.svg").read_text()
    assert shown == done.stdout, "python benchmarks/picture.py --write"


def test_table_of_what_fits() -> None:
    """README's rows and columns are the script's, and its first cell is what the estimate says."""
    program = """
import what_fits
row = what_fits.ROWS[0]
print(what_fits.head(), end="")
print(what_fits.cell(what_fits.model(row), *what_fits.MACHINES[0]))
print(*(row.what for row in what_fits.ROWS), sep="\\n")
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT / "benchmarks",
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, cell, *names = done.stdout.splitlines()
    table = re.search(r"<!-- fits -->\n(.*)<!-- /fits -->", README.read_text(), re.DOTALL)
    assert table is not None
    shown = [[part.strip() for part in row.split("|")] for row in table[1].splitlines()]
    way_out = "python benchmarks/what_fits.py --write"
    assert table[1].startswith(f"{first}\n{second}\n"), way_out
    assert [row[1] for row in shown[2:]] == names, way_out
    assert shown[2][2] == cell, way_out


def test_texts_that_the_recipes_quote() -> None:
    """What its tables say that an error or a report has, an error or a report has."""
    folders = (("gemini_strategy", "*.py"), ("csrc", "*.c"))
    files = [path for folder, kind in folders for path in (ROOT / folder).rglob(kind)]
    source = "\n".join(path.read_text() for path in files)
    source = re.sub(r'"\s+f?"', "", source).replace(
        '\\"', '"'
    )  # literals that follow each other are one
    page = (ROOT / "docs" / "recipes.md").read_text()
    heads = ("the text has", "row", "what binds")
    tables = [re.search(rf"^\| {head} \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.M) for head in heads]
    quoted = [
        text
        for table in tables
        if table is not None
        for row in table[1].splitlines()
        for text in re.findall("`([^`]+)`", row.split("|")[1])
    ]
    assert len(quoted) >= 22
    assert [text for text in quoted if text not in source] == []


def test_figures_that_the_text_names() -> None:
    """The table in docs/tuning.md has each key of engine.stats() once, in its order, group after group."""
    page = (ROOT / "docs" / "tuning.md").read_text()
    table = re.search(r"^\| `engine\.stats\(\)` \|.*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    rows = table[0].strip().splitlines()[2:]
    cells = [row.split("|")[1].strip() for row in rows]
    keys = [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]
    assert [cell.strip("*") for cell in cells if "`" not in cell] == list(STATS)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")
    for _ in range(3):
        model(torch.randn(2, 8)).sum().backward()
        engine.step()
        engine.zero_grad()
    stats, counted = engine.stats(), engine._runtime.core.stats()
    engine.close()
    # For a test, and for the meter of steps; nothing else is kept back.
    assert {*counted} - {*keys} == {"leases_walked", "planned_compute_seconds"}
    on_cuda_only = "total_peak_bytes"
    assert keys == [key for group in STATS.values() for key in group]
    assert list(stats) == [key for key in keys if key != on_cuda_only]


def test_demo_begins_with_its_own_words() -> None:
    """What it imports says nothing: no note of another package stands before the first line of `make demo`."""
    done = subprocess.run(
        [sys.executable, "examples/finetune.py", "--help"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: finetune.py")
    assert done.stderr == ""
