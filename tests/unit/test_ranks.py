"""The ranks of a run: who they are, what they agree on, what travels between them, and what a failure looks like."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gemini_strategy as gs
from gemini_strategy.ranks import ranks as ranks_module
from gemini_strategy.ranks.ranks import Group, Ranks, _groups_of
from helpers.ranks import run_ranks, values

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
SHORT = 4.0


def raised(call: Any, *args: Any) -> str:
    """The words of what a call raised."""
    with pytest.raises(gs.GeminiError) as found:
        call(*args)
    return str(found.value)


# ---- who they are --------------------------------------------------------------------------------


def test_groups_are_rows_and_columns() -> None:
    assert _groups_of(0, (1, 1)) == (Group(0, (0,)), Group(0, (0,)))
    assert _groups_of(2, (1, 3)) == (Group(2, (0, 1, 2)), Group(0, (2,)))
    assert _groups_of(2, (3, 1)) == (Group(0, (2,)), Group(2, (0, 1, 2)))
    assert _groups_of(4, (2, 3)) == (Group(1, (3, 4, 5)), Group(1, (1, 4)))


def test_one_rank_says_nothing() -> None:
    one = Ranks()
    assert (one.rank, one.size, one.local_rank, one.local_size) == (0, 1, 0, 1)
    assert one.shard == one.replica == Group(0, (0,))
    assert one.gather("x", {"a": 1}) == [{"a": 1}]
    one.agree({"a": 1})
    x = torch.arange(3)
    one.assemble(x, 0, 3, "x")
    one.share(x, 0, 3, "x")
    assert one.communicators(torch.device("cpu")) == {}
    one.abort("no reason")
    one.check()
    one.close()
    one.close()


def test_arguments_by_name() -> None:
    with pytest.raises(ValueError, match="timeout=0"):
        Ranks(timeout=0)
    with pytest.raises(gs.GeminiError, match="torch.distributed is not initialised"):
        Ranks("anything")


def test_torchrun_without_a_group_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with pytest.warns(UserWarning, match="this process trains alone"):
        assert Ranks().size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ranks()


def check_meshes(rank: int, size: int) -> None:
    """Four ranks on two hosts, as far as they can tell."""
    here = ranks_module._host()
    ranks_module._host = lambda: [*here, str(rank % 2)]
    every = (0, 1, 2, 3)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for given, is_sharded, shard, replica in (
        (None, True, every, (rank,)),
        (None, False, (rank,), every),
        (dist.group.WORLD, True, every, (rank,)),
        (mesh, True, ((0, 1), (2, 3))[rank // 2], ((0, 2), (1, 3))[rank % 2]),
        (mesh, False, (rank,), every),
    ):
        ranks = Ranks(given, PATIENT, is_sharded=is_sharded)
        assert (ranks.rank, ranks.size, ranks.members) == (rank, size, every)
        assert (ranks.shard.members, ranks.replica.members) == (shard, replica)
        assert ranks.shard.members[ranks.shard.rank] == rank
        assert ranks.replica.members[ranks.replica.rank] == rank
        assert (ranks.local_rank, ranks.local_size) == (rank // 2, 2)
        made = ranks.communicators(torch.device("cpu"))
        assert made["gather_rate"] == made["reduce_rate"] == 0.0
        for core, group in ((made["shard_comm"], shard), (made["replica_comm"], replica)):
            assert (core is None) == (len(group) == 1)
            if core is not None:
                x = torch.full((8,), 2.0**rank)
                core.all_reduce(x.data_ptr(), 8, 0, 0, 0)
                assert x.tolist() == [sum(2.0**r for r in group)] * 8
        ranks.close()
    for shape, names in (((2, 2), ("shard", "replicate")), ((4,), ("replicate",))):
        other = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        with contextlib.closing(Ranks(other, PATIENT, is_sharded=False)) as ranks:
            assert ranks.shard.size == 1 and ranks.replica.size == 4
        with pytest.raises(gs.GeminiError, match="the first of two is the replicas"):
            Ranks(other, PATIENT)
    part = mesh["shard"]  # each half by itself
    ranks = Ranks(part, PATIENT)
    assert ranks.gather("names", rank) == list(ranks.members) == [rank // 2 * 2, rank // 2 * 2 + 1]
    ranks.close()
    odd = dist.new_group([1, 3])
    if rank % 2:
        ranks = Ranks(odd, PATIENT)
        assert (ranks.members, ranks.rank, ranks.shard.members) == ((1, 3), rank // 2, (0, 1))
        assert ranks.gather("names", rank) == [1, 3]
        ranks.close()
    else:
        with pytest.raises(gs.GeminiError, match=f"rank {rank} is not in the group given as mesh="):
            Ranks(odd, PATIENT)
        with pytest.raises(TypeError, match="mesh must be a DeviceMesh"):
            Ranks(3, PATIENT)


def test_meshes(tmp_path: Path) -> None:
    values(run_ranks(4, tmp_path, check_meshes))


# ---- what travels --------------------------------------------------------------------------------


def check_values(rank: int, size: int) -> None:
    ranks = Ranks(timeout=PATIENT)
    assert ranks.gather("numbers", [rank, 1.5, None]) == [[r, 1.5, None] for r in range(size)]
    long = [str(r) * (700 * r) for r in range(size)]  # some fit a frame, others do not
    assert ranks.gather("long ones", long[rank]) == long
    nan = float("nan")
    ranks.agree({"a": 1, "b": "text", "c": nan, "d": None, "e": 0.1})
    for numel in (0, 1, 2, size, 1000, 1023):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            share = -(-numel // size)
            first = min(rank * share, numel)
            n = min(share, numel - first)
            whole = (torch.arange(numel) % 251).to(dtype)
            got = torch.full_like(whole, 255)
            got[first : first + n] = whole[first : first + n]
            ranks.assemble(got, first, n, "a field")
            assert torch.equal(got, whole)
            for root in range(size):
                got = torch.full_like(whole, 255)
                got[first : first + n] = whole[first : first + n]
                before = got.clone()
                ranks.assemble(got, first, n, "a field", root)
                assert torch.equal(got, whole if rank == root else before)
            got = whole.clone() if rank == 0 else torch.full_like(whole, 255)
            want = got.clone()
            want[first : first + n] = whole[first : first + n]
            ranks.share(got, first, n, "the first weights")
            assert torch.equal(got, want)
            ranks.share(got, 0, numel, "a buffer")
            assert torch.equal(got, whole)
    other = Ranks(timeout=PATIENT)  # beside the first, with the same members
    assert other.gather("both", rank) == ranks.gather("both", rank)
    other.close()
    assert ranks.gather("still", rank) == list(range(size))
    ranks.close()
    ranks.close()
    with pytest.raises(gs.GeminiError, match="closed"):
        ranks.gather("late")


def test_values(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_values))  # of three: test_failures


def check_hybrid_assembly(rank: int, size: int) -> None:
    """Only the shard group that has the root has anything to do."""
    mesh = dist.init_device_mesh("cpu", (2, 2))
    ranks = Ranks(mesh, PATIENT)
    x = torch.zeros(6)
    first = 4 * ranks.shard.rank
    n = 2 if ranks.shard.rank else 4
    x[first : first + n] = 10.0 + rank
    before = x.clone()
    ranks.assemble(x, first, n, "a field", 3)
    assert torch.equal(x, torch.tensor([12.0] * 4 + [13.0] * 2) if rank == 3 else before)
    ranks.assemble(x, first, n, "a field")
    low = rank // 2 * 2
    assert x.tolist() == [10.0 + low] * 4 + [11.0 + low] * 2
    ranks.close()


def test_hybrid_assembly(tmp_path: Path) -> None:
    values(run_ranks(4, tmp_path, check_hybrid_assembly))


# ---- disagreement and failure --------------------------------------------------------------------


def check_disagreement(rank: int, size: int) -> list[str]:
    ranks = Ranks(timeout=PATIENT)
    texts = []
    for fields in (
        {"same": 1, "chunk_size": 10 + (rank == 1), "policy": str(rank)},
        {"same": 1} if rank else {"same": 1, "only rank 0": 0.5},
        {"rates": float("nan") if rank == 2 else 1.0},
        {"a text": "x" * 5000 + str(rank // 2)},
    ):
        texts.append(raised(ranks.agree, fields))
    ranks.agree({"same": 1})  # a difference is no failure of the group
    ranks.close()
    return texts


def test_disagreement_names_the_first_field_on_every_rank(tmp_path: Path) -> None:
    texts = values(run_ranks(3, tmp_path, check_disagreement))
    assert texts[0] == texts[1] == texts[2]
    assert "differ in chunk_size: 10 on ranks 0, 2, 11 on rank 1;" in texts[0][0]
    assert "differ in only rank 0: 0.5 on rank 0, nothing on ranks 1, 2;" in texts[0][1]
    assert "differ in rates: 1.0 on ranks 0, 1, NaN on rank 2;" in texts[0][2]
    assert "differ in a text" in texts[0][3]


def check_places(rank: int, size: int) -> None:
    ranks = Ranks(timeout=PATIENT)
    what = "exp_avg of layer.weight" if rank == 1 else "agreement on the step"
    text = raised(ranks.gather, what)
    assert "agreement on the step on ranks 0, 2, exp_avg of layer.weight on rank 1" in text
    again = raised(ranks.gather, "anything")
    assert again == text and ranks.has_failed
    ranks.close()


def check_sizes(rank: int, size: int) -> None:
    ranks = Ranks(timeout=PATIENT)
    text = raised(ranks.assemble, torch.zeros(4 + (rank == 2)), 0, 4, "a field")
    assert "a field: the ranks differ in its elements" in text and "rank 2" in text
    ranks.close()
    ranks = Ranks(timeout=PATIENT)
    text = raised(ranks.assemble, torch.zeros(6), 2 * rank + (rank == 1), 2, "a field")
    assert "a field: rank 1 has elements from 3 on, expected 2" in text
    ranks.close()
    ranks = Ranks(timeout=PATIENT)
    assert "ranks have 3 of 6 elements" in raised(ranks.assemble, torch.zeros(6), rank, 1, "f")
    ranks.close()


def check_abort(rank: int, size: int) -> None:
    ranks = Ranks(timeout=PATIENT)
    if rank == 1:
        ranks.give_up("manage", KeyError("layer.weight"))
        assert "rank 1 has ended this run" in raised(ranks.check)
    else:
        text = raised(ranks.gather, "something")
        assert f"something, rank {rank} of {size}" in text
        assert "rank 1 said: manage: KeyError: 'layer.weight'" in text
    ranks.close()


def check_abort_reaches_communicators(rank: int, size: int) -> None:
    ranks = Ranks(timeout=PATIENT)
    shard = ranks.communicators(torch.device("cpu"))["shard_comm"]
    x = torch.ones(size * 16)
    if rank == 2:
        time.sleep(0.5)
        ranks.abort("the batch was bad")
    else:
        with pytest.raises(gs.GeminiDeviceError) as found:
            shard.all_gather(x.data_ptr(), 64, 0)
        text = str(ranks.explained(found.value))
        assert "all_gather number 1" in text and "rank 2 said: the batch was bad" in text
        raised(ranks.check)
    ranks.close()


def check_interrupt(rank: int, size: int, share: bool) -> None:
    """It comes when the ranks have told each other what is to travel, and what comes next is not that."""
    ranks = Ranks(timeout=PATIENT)
    x = torch.zeros(32 * size)
    args = (x, 0, x.numel(), "a field") if share else (x, 32 * rank, 32, "a field")
    call = ranks.share if share else ranks.assemble
    if rank == 1:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ranks_module, "_piece", _interrupt)
            call(*args)
        assert "a field: KeyboardInterrupt on this rank" in raised(ranks.gather, "the next value")
    else:
        with contextlib.suppress(gs.GeminiError):  # what rank 0 shares has reached rank 2
            call(*args)
        raised(ranks.gather, "another value")
    ranks.close()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def check_missing(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(2.5 * SHORT)
        return
    text = raised(lambda: Ranks(timeout=SHORT))
    assert "control group" in text and "rank 1 did not come within 4 s" in text


def check_next_try(rank: int, size: int) -> None:
    """One that did not come, or came too late for the others, meets them when they try again."""
    if rank != 1:
        for _ in range(2):
            assert "rank 1 did not come" in raised(lambda: Ranks(timeout=SHORT / 4))
    dist.barrier()
    ranks = Ranks(timeout=PATIENT)
    assert ranks.gather("rank", rank) == list(range(size))
    ranks.close()


def check_failures(rank: int, size: int) -> None:
    check_next_try(rank, size)
    check_places(rank, size)
    check_sizes(rank, size)
    check_abort(rank, size)
    check_abort_reaches_communicators(rank, size)
    check_interrupt(rank, size, share=False)
    check_interrupt(rank, size, share=True)
    check_values(rank, size)  # none of it has hurt the group that the user has
    check_missing(rank, size)


def test_failures(tmp_path: Path) -> None:
    values(run_ranks(3, tmp_path, check_failures))


def check_rank_that_goes(rank: int, size: int, how: str) -> str:
    ranks = Ranks(timeout=PATIENT if how == "killed" else SHORT)
    if rank == 1:
        match how:
            case "killed":
                os.kill(os.getpid(), 9)
            case "silent":
                time.sleep(3 * SHORT)
                os._exit(0)
    kept: list[Any] = []

    def ask() -> None:
        local = Group(0, (0,))  # in a frame that the failure comes through, as activations are
        kept.append(weakref.ref(local))
        ranks.gather("a value")

    found = raised(ask)
    gc.collect()
    assert kept[0]() is None, "what has failed holds the frames that asked it"
    assert raised(ranks.gather, "another") == found  # the same words ever after
    return found


@pytest.mark.parametrize("how", ["killed", "silent"])
def test_rank_that_goes(how: str, tmp_path: Path) -> None:
    ended = run_ranks(3, tmp_path, check_rank_that_goes, how)
    for text in values([ended[0], ended[2]]):
        assert "a value" in text and "rank 1 said nothing" in text


PROGRAM = """
import os, sys, torch.distributed as dist
from gemini_strategy.ranks.ranks import Ranks
folder = sys.argv[1]
other = os.fork()
rank = int(other == 0)
if rank == 1:
    os.dup2(os.open(folder + "/said", os.O_WRONLY | os.O_CREAT), 2)
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ranks = Ranks(timeout=900.0)
if rank == 1:
    raise RuntimeError("bad data in batch 7")
try:
    ranks.gather("a value")
except RuntimeError as error:
    print(error)
print("rank 1 ended with", os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_process_that_ends_by_an_exception_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "bad data in batch 7" in (tmp_path / "said").read_text()
    assert done.returncode == 0, done.stderr
    assert "rank 1 ended with 1\n" in done.stdout
    assert "rank 1 said: its process ended by RuntimeError: bad data in batch 7" in done.stdout


@pytest.mark.parametrize(("last", "waits"), [(None, 3), (RuntimeError("bad data"), 1)])
def test_process_that_ends_lets_others_read_what_it_shows(
    monkeypatch: pytest.MonkeyPatch, last: Exception | None, waits: int
) -> None:
    """Unless it ends by an error: whoever waits for it is to know that at once."""
    said: list[str] = []

    class Open:
        _pid = os.getpid()

        def _is_under_way(self) -> bool:
            said.append("under way?")
            return len(said) < 3

        def abort(self, reason: str) -> None:
            said.append(reason)

    monkeypatch.setattr(ranks_module, "_open", [Open()])
    monkeypatch.setattr(ranks_module, "_LAST_SECONDS", 3600.0)
    monkeypatch.setattr(sys, "last_value", last, raising=False)
    ranks_module._leave()
    reason = "its process ended" + (f" by RuntimeError: {last}" if last else "")
    assert said == ["under way?"] * waits + [f"{reason}, with the engine open"]
