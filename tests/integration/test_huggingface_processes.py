"""What `gemini-strategy run` was told reaches the processes that come of a program, and nothing else changes for them.

Here processes are started as programs start them: whether a Python finds anything when it begins is what is tested.
"""

import ast
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemini_strategy.huggingface import programs
from gemini_strategy.huggingface.install import _ACTS
from gemini_strategy.inherited import VARIABLE, told

ROOT = Path(__file__).resolve().parents[2]
STARTUP = ROOT / "gemini_strategy" / "huggingface" / "startup"
RUN = (sys.executable, "-m", "gemini_strategy", "run", "--device-budget", "90KB")
QUIET = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

TRAIN = """
import torch
from accelerate import Accelerator

def train():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        accelerator.backward(model(torch.randn(2, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    train()
"""
LINE = " trains Sequential; device budget: 90.00 kB\n"
NOTHING = "gave no model to a Trainer"


def started(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([environment.pop("first", ""), str(ROOT)]).strip(os.pathsep)
    return subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **QUIET, **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def program(folder: Path, text: str, name: str = "program.py") -> str:
    (folder / name).write_text(text)
    return name


# ---- how a Python begins ----


def begun(folder: Path, text: str, prefix: str = sys.prefix, *others: Path) -> Any:
    """What a Python that a run has started prints, as JSON."""
    said = {"prefix": prefix, "package": str(ROOT / "gemini_strategy"), "marks": [], "plugin": {}}
    first = os.pathsep.join(map(str, (STARTUP, *others)))
    done = started(folder, sys.executable, "-c", text, first=first, **{VARIABLE: json.dumps(said)})
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


def test_a_python_that_trains_nothing_imports_nothing(tmp_path: Path) -> None:
    text = "import sys; seen = sorted(sys.modules), sys.path; import json; print(json.dumps(seen))"
    modules, paths = begun(tmp_path, text)
    plain = started(tmp_path, sys.executable, "-c", text)
    plain_modules, plain_paths = json.loads(plain.stdout)
    assert set(modules) - set(plain_modules) <= {"sitecustomize"}
    assert paths == plain_paths


def test_the_next_sitecustomize_is_run_too(tmp_path: Path) -> None:
    program(tmp_path, "import sys; sys.is_run = __name__, list(sys.path)", "sitecustomize.py")
    text = "import sys, sitecustomize as s, json; print(json.dumps([sys.is_run, s.__file__]))"
    (name, paths), file = begun(tmp_path, text, sys.prefix, tmp_path)
    assert name == "sitecustomize" and file == str(tmp_path / "sitecustomize.py")
    assert str(STARTUP) not in paths


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_python_of_another_environment_is_left_alone(is_ours: bool, tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    program(tmp_path, "", "accelerate/__init__.py")
    program(tmp_path, "class Accelerator: pass", "accelerate/accelerator.py")
    text = """
import json, sys
try:
    import accelerate.accelerator
    found = "gemini_strategy" in sys.modules
except Exception as error:  # a stand-in has nothing to derive from
    found = "gemini_strategy" in sys.modules
print(json.dumps(found))
"""
    prefix = sys.prefix if is_ours else "/usr"
    assert begun(tmp_path, text, prefix) is is_ours


def test_any_python_3_can_read_the_file() -> None:
    source = (STARTUP / "sitecustomize.py").read_text()
    ast.parse(source, feature_version=(3, 4))
    names = {n.names[0].name for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import)}
    assert names == {"os", "sys", "json", "importlib.util", "sitecustomize"}


def test_it_waits_for_the_modules_in_which_classes_are_replaced() -> None:
    before = list(sys.path), list(sys.meta_path), dict(sys.modules)
    sys.modules["sitecustomize"] = sys  # which it looks behind
    try:
        assert set(runpy.run_path(str(STARTUP / "sitecustomize.py"))["MODULES"]) == set(_ACTS)
    finally:
        sys.path[:], sys.meta_path[:] = before[:2]
        del sys.modules["sitecustomize"]
        sys.modules.update({k: v for k, v in before[2].items() if k == "sitecustomize"})


# ---- programs ----


def test_all_that_comes_of_a_program_trains_under_the_budget(tmp_path: Path) -> None:
    """A child, a spawned process with a spawned worker of its own, and what takes the program's place."""
    program(tmp_path, TRAIN, "train.py")
    text = """
import multiprocessing, os, subprocess, sys
import train

def spawned():
    train.train()
    loader = train.torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")
    assert len(list(loader)) == 4

if __name__ == "__main__":
    subprocess.run([sys.executable, "train.py"], check=True)
    child = multiprocessing.get_context("spawn").Process(target=spawned)
    child.start()
    child.join()
    assert child.exitcode == 0
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    os.execvpe("env", ["env", sys.executable, "train.py"], os.environ)
"""
    done = started(tmp_path, *RUN, program(tmp_path, text))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE) == len(done.stderr.splitlines()) == 3, done.stderr


def test_a_console_script_starts_ranks(tmp_path: Path) -> None:
    program(tmp_path, TRAIN, "train.py")
    text = f"#!{sys.executable}\nimport sys\nfrom torch.distributed.run import main\nsys.exit(main())\n"
    (tmp_path / "bin").mkdir()
    (tmp_path / program(tmp_path, text, "bin/launch")).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    words = ("--report", "launch", "--nproc-per-node=2", "train.py")
    done = started(tmp_path, *RUN, *words, PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(LINE.replace(";", ", with 2 ranks;")) == 1
    assert done.stderr.count("Gemini: the result") == 1


def test_a_run_in_a_run(tmp_path: Path) -> None:
    """The inner one is told its own, and both know that something has trained."""
    program(tmp_path, TRAIN, "train.py")
    inner = (*RUN[:-1], "80KB", "train.py")
    done = started(tmp_path, *RUN, "sh", "-c", 'exec "$@"', "sh", *inner)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(LINE.replace("90", "80")) and NOTHING not in done.stderr


def test_a_program_that_becomes_one_that_trains_nothing(tmp_path: Path) -> None:
    text = "import os; os.execlp('sh', 'sh', '-c', 'ls /proc/$PPID/exe; exit 0')"
    done = started(tmp_path, *RUN, program(tmp_path, text), TMPDIR=str(tmp_path))
    assert done.returncode == 1 and NOTHING in done.stderr
    assert done.stdout == f"/proc/{done.stdout.split('/')[2]}/exe\n"
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]  # no marks are left


# ---- beside a process ----

BESIDE = f"""
import os, runpy, signal, sys
programs = runpy.run_path({programs.__file__!r})

def end(status):
    print("ended", status, flush=True)
    return status

with programs["staying"](end):
"""


@pytest.mark.parametrize(
    ("body", "said", "status"),
    [
        ("os.execlp('sh', 'sh', '-c', 'exit 5')", "ended 5\n", 5),
        ("os.execle('/bin/sh', 'sh', '-c', 'echo $A', {'A': 'b'})", "b\nended 0\n", 0),
        ("os.execlp('sh', 'sh', '-c', 'kill -TERM $$')", "ended -15\n", -signal.SIGTERM),
        ("os.execlp('sh', 'sh', '-c', 'kill -KILL $$')", "ended -9\n", -signal.SIGKILL),
        ("os.execlp('sh', 'sh', '-c', 'kill -TERM $PPID; exec sleep 200')", "ended -15\n", -15),
        ("print(os.wait()[1]) if os.fork() else os.execlp('true', 'true')", "0\n", 0),
        (
            "\n    try: os.execlp('no-such', 'a')\n    except OSError as e: print(e.errno)",
            "2\n",
            0,
        ),
    ],
)
def test_a_program_in_its_place(body: str, said: str, status: int, tmp_path: Path) -> None:
    done = started(tmp_path, sys.executable, "-c", f"{BESIDE}    {body}")
    assert (done.stdout, done.returncode) == (said, status), done.stderr


def test_it_ends_with_the_process_it_runs_beside(tmp_path: Path) -> None:
    """However that ends: here it is killed."""
    body = "os.execlp('sh', 'sh', '-c', 'echo $$; kill -KILL $PPID; exec sleep 200')"
    done = started(tmp_path, sys.executable, "-c", f"{BESIDE}    {body}")  # waits for its output
    assert done.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{done.stdout.strip()}/cmdline").exists() or not (
        Path(f"/proc/{done.stdout.strip()}/cmdline").read_bytes()  # it is nobody's child yet
    )


def test_what_a_word_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Path(sys.executable).parent
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{here}{os.pathsep}/bin")
    scripts = {
        "mine": f"#!{sys.executable}\n",
        "other": "#!/elsewhere/bin/python3\n",
        "any": f"#!/usr/bin/env {Path(sys.executable).name}\n",
        "shell": "#!/bin/sh\n",
    }
    for name, text in scripts.items():
        program(tmp_path / "bin", text, name)
        (tmp_path / "bin" / name).chmod(0o755)
        is_python = name in ("mine", "any")
        assert programs.find(name) == (str(tmp_path / "bin" / name), is_python)
        # By its path it is a script that is meant for this Python, whatever it says.
        assert programs.find(f"bin/{name}")[1] == (name != "shell")
    program(tmp_path, "#!/usr/bin/env -S A=1 no-such run\n", "one.py")
    assert programs.find("one.py") == (str(tmp_path / "one.py"), True)
    assert programs.find("sh") == ("/bin/sh", False)
    program(tmp_path, "pass", "sh")  # a file of that name comes first
    assert programs.find("sh") == (str(tmp_path / "sh"), True)
    (tmp_path / "mine").mkdir()  # but not a folder, unless it is a program
    assert programs.find("mine")[0] == str(tmp_path / "bin" / "mine")
    program(tmp_path, "pass", "mine/__main__.py")
    assert programs.find("mine") == (str(tmp_path / "mine"), True)
    for word in ("nothing", "bin/nothing", "/dev/null"):
        with pytest.raises(FileNotFoundError):
            programs.find(word)


def test_outside_of_runs_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, "", "no JSON", "[]"):
        if text is None:
            monkeypatch.delenv(VARIABLE, raising=False)
        else:
            monkeypatch.setenv(VARIABLE, text)
        assert told() == {}
