"""The table of absent tensors: entries come and go while threads and finalizers work on it, too."""

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from gemini_strategy.parameters import absent, doors


class _Home(absent.Home):
    name = "w"


class _LastWish(_Home):
    """Makes another tensor when it goes, as the end of an engine may: of the same size, so at the same address."""

    def __init__(self, made: list[torch.Tensor]) -> None:
        self.made = made

    def __del__(self) -> None:
        self.made.append(_tensor(_Home()))


def _tensor(home: absent.Home) -> torch.Tensor:
    return absent.tensor(home, (2, 3), (3, 1), torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    doors.install()
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_finalizers_make_tensors_while_others_are_dropped() -> None:
    """What they make has its home, and the next sweep finds nothing half done."""
    made: list[torch.Tensor] = []
    dropped = [_tensor(_LastWish(made)) for _ in range(50)]
    del dropped
    absent.drop_unused()
    assert len(made) == 50
    assert all(absent.home_of(t).name == "w" for t in made)
    absent.drop_unused()
    assert all(absent.home_of(t).name == "w" for t in made)


def test_threads_make_and_drop_tensors() -> None:
    """Each thread's tensors keep their homes while the others sweep."""
    sys.setswitchinterval(1e-6)
    errors: list[Exception] = []

    def work() -> None:
        kept: list[torch.Tensor] = []
        try:
            for _ in range(500):
                kept = [*kept[-4:], _tensor(_Home())]
                absent.drop_unused()
                for tensor in kept:
                    absent.home_of(tensor)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
