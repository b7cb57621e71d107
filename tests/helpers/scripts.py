"""Programs as text, run as `python` would run them without the seconds in which it imports torch.

Invariants
    1. `run` is a fork of a process that has imported torch and the package, and what else is asked for, but has had no
       engine; it lives as long as the tests. What torch's libraries read once, OMP_NUM_THREADS among it, is theirs.
    2. `run_to_the_end` is for how programs end: each ends as its interpreter does, which takes modules apart, where
       what helpers/program.py runs leaves without that.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from helpers.forked import Forks

__all__ = ["run", "run_to_the_end"]

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
LONGEST = 100  # seconds of one program

_FORKING = """
import gc, os, signal, sys
{imports}
gc.freeze()  # no collection of a fork copies what was imported
codes = {{}}
for name, source in {programs!r}.items():
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm({longest})  # one that hangs is ended, and the others are run
        for stream in (1, 2):
            os.dup2(os.open(f"{{sys.argv[1]}}/{{name}}.{{stream}}", os.O_WRONLY | os.O_CREAT), stream)
        break
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
else:
    import json
    print(json.dumps(codes))
    sys.exit(0)
sys.argv[1:] = []
exec(compile(source, name, "exec"))
"""


@functools.cache
def _forks(imported: tuple[str, ...]) -> Forks:
    return Forks((), (*imported, "helpers.program"), has_had_engine=False)


def run(
    folder: Path,
    words: Iterable[object],
    *,
    imported: tuple[str, ...] = (),
    paths: Iterable[object] = (ROOT,),
    timeout: float = 250.0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """What stands after `python`, in this folder; so are the Pythons that it starts."""
    listed = list(map(str, words))
    (ended,) = _forks(imported).run(
        *("helpers.program:started", str(folder), listed, list(map(str, paths)), environment),
        timeout=timeout,
    )
    assert ended.value is not None, ended.how
    return subprocess.CompletedProcess(listed, *ended.value)


def run_to_the_end(
    folder: Path, programs: Mapping[str, str], imports: str, **environment: str
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Each program by its name, one after the other, in forks of one process that has done the imports."""
    driver = folder / "forking.py"
    text = _FORKING.format(imports=imports, programs=dict(programs), longest=LONGEST)
    driver.write_text(text)
    done = subprocess.run(
        [sys.executable, str(driver), str(folder)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=3 * LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: subprocess.CompletedProcess(
            [name], code, *((folder / f"{name}.{stream}").read_text() for stream in (1, 2))
        )
        for name, code in json.loads(done.stdout).items()
    }
