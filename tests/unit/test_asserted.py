"""What `make check` relies on: a core built with assertions ends at a broken invariant, one built with the address
sanitizer at an access outside its memory; and a core for users at neither.

Each program runs in a process of its own, as it may not survive."""

from __future__ import annotations

import subprocess

import pytest

from gemini_strategy import _C
from helpers.scripts import run_to_the_end

Ended = dict[str, subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.core

# A sum whose highest limb is larger than any sum of squares makes it.
BROKEN_INVARIANT = """
from gemini_strategy import _C
n_bytes = len(_C.sumsq_merge(None, None))
_C.sumsq_value(bytes(n_bytes - 24) + bytes([255] * 8) + bytes(16))
"""

# One element behind an array of malloc's: malloc itself gives a few bytes more than it was asked for.
OUT_OF_BOUNDS = """
import ctypes
from gemini_strategy import _C
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
ctypes.memset(address := libc.malloc(64), 0, 64)
_C.sumsq_host(address, 0, 64 // 4 + 1, None)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    programs = {"broken": BROKEN_INVARIANT, "outside": OUT_OF_BOUNDS}
    return run_to_the_end(tmp_path_factory.mktemp("ended"), programs, "import torch")


def test_a_broken_invariant_ends_a_process_with_assertions(ended: Ended) -> None:
    done = ended["broken"]
    assert ("broken invariant at" in done.stderr) == bool(_C.BUILT_WITH_ASSERTIONS), done.stderr
    assert (done.returncode == 0) == (not _C.BUILT_WITH_ASSERTIONS), done.stderr


def test_an_access_out_of_bounds_ends_a_process_with_the_sanitizer(ended: Ended) -> None:
    done = ended["outside"]
    assert ("heap-buffer-overflow" in done.stderr) == bool(_C.BUILT_WITH_SANITIZER), done.stderr
    assert (done.returncode == 0) == (not _C.BUILT_WITH_SANITIZER), done.stderr
