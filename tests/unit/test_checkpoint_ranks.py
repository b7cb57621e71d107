"""engine.save and engine.load on several ranks: the same bits for any number of them, then and now."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gemini_strategy as gs
from gemini_strategy import close
from gemini_strategy.checkpoint import background, records
from gemini_strategy.checkpoint import manifest as manifests
from gemini_strategy.checkpoint import together as meetings
from helpers.forked import Ended, Forks, values
from helpers.saving import Gate, contents
from helpers.sharded import Exact, ExactCase

SIZES = (1, 2, 3)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks((Path(__file__).parent,), (Path(__file__).stem,)) as forks:
        yield forks


def run(forks: Forks, job: Any, *args: Any, ranks: int) -> list[Any]:
    return values(forks.run(f"{__name__}:{job.__name__}", *args, ranks=ranks, timeout=120.0))


def engine_of(seed: int, **how: Any) -> gs.Engine:
    torch.manual_seed(seed)
    model = Exact()
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    how = {"precision": "bf16-true", "chunk_size": 4096, "timeout": 60.0} | how
    return gs.manage(model, optimizer, device="cpu", **how)


def train(engine: gs.Engine, steps: range) -> None:
    case = ExactCase(engine.ranks.rank, engine.ranks.size)
    for step in steps:
        engine.backward(case.loss(engine.model, case.batch(step)))
        engine.clip_grad_norm_(1.0)
        engine.step()
        engine.zero_grad()


def digest(engine: gs.Engine) -> str:
    """Of all that a step uses but random numbers."""
    return hashlib.sha256(pickle.dumps(_plain(engine.state_dict()))).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.contiguous()
        return (
            str(value.dtype),
            tuple(value.shape),
            value.view(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return [(k, _plain(v)) for k, v in value.items()]
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def save_job(*args: Any) -> tuple[str, str, list[float]]:
    """(digest when saved, two steps later, the next random numbers)."""
    rank, folder, how = args if len(args) == 3 else (0, *args)
    engine = engine_of(3, **how)
    train(engine, range(3))
    torch.manual_seed(50 + rank)
    engine.save(folder, {"rank": rank})
    saved, numbers = digest(engine), torch.rand(3).tolist()
    train(engine, range(3, 5))
    return saved, digest(engine), numbers


def load_job(*args: Any) -> tuple[str, str, list[float], Any]:
    """The same of an engine that has loaded, and this rank's `extra`."""
    rank, folder, how = args if len(args) == 3 else (0, *args)
    engine = engine_of(4, **how)
    train(engine, range(1))
    torch.manual_seed(rank)
    extra = engine.load(folder)
    loaded, numbers = digest(engine), torch.rand(3).tolist()
    train(engine, range(3, 5))
    return loaded, digest(engine), numbers, extra


def without_frozen_job(*args: Any) -> tuple[str, str]:
    """(digest at saving or loading, two steps later) of a model that is frozen in part."""
    folder, is_saved = args[-2:]
    torch.manual_seed(3)
    model = Exact()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 2 == 0)
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, precision="bf16-true", chunk_size=4096, device="cpu")
    train(engine, range(2 if is_saved else 1))
    if is_saved:
        engine.save(folder, frozen=False)
    else:
        engine.load(folder)
    now = digest(engine)
    train(engine, range(2, 4))
    return now, digest(engine)


def small_chunk_job(rank: int, folder: str) -> None:
    """Under a plan a chunk that no update changes stays gathered, until it is loaded: on all ranks alike."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    model[1].requires_grad_(False)  # 544 bytes: ranks 2 and 3 have nothing of it
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    how: Any = {"precision": "bf16-true", "placement_policy": "cpu", "chunk_size": 4096}
    engine = gs.manage(model, optimizer, device="cpu", **how)
    for step in range(8):
        engine.backward(model(torch.ones(2, 16)).float().square().mean())
        engine.step()
        engine.zero_grad()
        if step == 4:
            assert engine.stats()["planned"]
            engine.save(folder)
            engine.load(folder)
    engine.close()


def test_ranks_without_a_part_of_a_chunk_load_it_too(forks: Forks, tmp_path: Path) -> None:
    run(forks, small_chunk_job, str(tmp_path / "saved"), ranks=4)


@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 3)])
def test_what_is_frozen_may_be_left_out(
    there: int, here: int, forks: Forks, tmp_path: Path
) -> None:
    """A model loads what was trained, and goes on with its own of what is frozen."""
    folder = str(tmp_path / "saved")
    saved = run(forks, without_frozen_job, folder, True, ranks=there)
    assert set(run(forks, without_frozen_job, folder, False, ranks=here)) == set(saved)
    names = set(manifests.Manifest(Path(folder)).tensors)
    frozen = {f"model.{n}" for i, (n, _) in enumerate(Exact().named_parameters()) if i % 2}
    assert frozen and not frozen & names


@pytest.mark.parametrize("there", SIZES)
def test_any_number_of_ranks(there: int, forks: Forks, tmp_path: Path) -> None:
    """Saved by so many ranks it loads on any number, and trains on as they do."""
    saved = run(forks, save_job, str(tmp_path / "saved"), {}, ranks=there)
    want, later, _ = saved[0]
    assert {own[:2] for own in saved} == {(want, later)}
    hows = [{}, {"placement_policy": "cpu", "chunk_size": 8192}, {"placement_policy": "cuda"}]
    for here, how in zip(SIZES, hows, strict=True):
        loaded = run(forks, load_job, str(tmp_path / "saved"), how, ranks=here)
        for rank, (now, then, numbers, extra) in enumerate(loaded):
            assert (now, then) == (want, later), (here, rank)
            assert extra == {"rank": rank if here == there else 0}
            torch.manual_seed(rank)
            kept = torch.rand(3).tolist()
            assert numbers == (saved[rank][2] if here == there else kept), (here, rank)


def mesh_job(rank: int, folder: str, shape: Any) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", shape)
    is_there = Path(folder).exists()
    engine = engine_of(4 if is_there else 3, mesh=mesh)
    if is_there:
        engine.load(folder)
    else:
        train(engine, range(3))
        engine.save(folder)
    return digest(engine)


def test_replicas(forks: Forks, tmp_path: Path) -> None:
    """Of several replicas one writes, and all read."""
    want = run(forks, mesh_job, str(tmp_path / "saved"), (2, 2), ranks=4)
    sizes = [p.stat().st_size for p in sorted((tmp_path / "saved").glob("*.distcp"))]
    assert len(sizes) == 4 and max(sizes[2:]) < min(sizes[:2]) / 2  # random numbers alone
    for shape in ((1, 4), (4, 1)):
        assert set(run(forks, mesh_job, str(tmp_path / "saved"), shape, ranks=4)) == set(want)
    assert run(forks, load_job, str(tmp_path / "saved"), {}, ranks=1)[0][0] == want[0]


def test_torchs_tools_read_it(forks: Forks, tmp_path: Path) -> None:
    """What three ranks have written in parts is put together as one rank's."""
    for ranks in (1, 3):
        run(forks, save_job, str(tmp_path / f"of{ranks}"), {}, ranks=ranks)
        dcp_to_torch_save(tmp_path / f"of{ranks}", tmp_path / f"of{ranks}.pt")
    one, three = (torch.load(tmp_path / f"of{n}.pt", weights_only=False) for n in (1, 3))
    assert _plain(one) == _plain(three)
    assert torch.isfinite(one["model"]["terms.5.p"]).all()


# ---- in the background ----


class Renormed(nn.Module):
    """Writes its own table in its forward. `a` is read first, before the writer waits."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(13, 1, bias=False)
        self.table = nn.Embedding(9, 13, max_norm=0.5)
        self.b = nn.Linear(13, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(torch.arange(9))
        return (self.a(x) + self.b(x)).sum()


def background_job(
    rank: int, folder: str, how: dict[str, Any], share: float | None
) -> tuple[str, str, list[int]]:
    """(digest at the call, after three more steps, copies); without room for them the writer is not slowed."""
    engine = engine_of(3, **how)
    train(engine, range(3))
    at_the_call = digest(engine)
    torch.manual_seed(50 + rank)
    engine.save(f"{folder}/front", {"rank": rank})
    patch = pytest.MonkeyPatch()
    gate = Gate(patch)
    if share is not None:
        patch.setattr(background, "_SHARE", share)
        gate.open()
    torch.manual_seed(50 + rank)
    saving = engine.save(f"{folder}/back", {"rank": rank}, background=True)
    for step in range(3, 6):
        gate.allow(rank)  # so the ranks are at different pieces
        train(engine, range(step, step + 1))
    gate.open()
    saving.wait()
    patch.undo()
    later = digest(engine)
    engine.close()
    return at_the_call, later, [saving.copied_bytes, saving.most_bytes]


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ({}, None),
        ({"placement_policy": "cpu"}, 0.0),
        ({"enable_distributed_storage": False}, None),
    ],
    ids=["slowed", "no room for copies", "replicas"],
)
def test_ranks_train_on_while_they_write(
    how: dict[str, Any], share: float | None, forks: Forks, tmp_path: Path
) -> None:
    """The same bytes as in the foreground, and the same training; no rank waits for another's writer."""
    told = run(forks, background_job, str(tmp_path), how, share, ranks=2)
    assert len({own[:2] for own in told}) == 1
    assert contents(tmp_path / "back") == contents(tmp_path / "front")
    assert run(forks, load_job, str(tmp_path / "back"), {}, ranks=2)[0][0] == told[0][0]
    for rank, (_, _, (copied, most)) in enumerate(told):
        has_written = rank == 0 or "enable_distributed_storage" not in how  # of replicas one does
        assert (copied > 0) == has_written or share is not None
        assert most <= copied
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "front"]


def writes_job(rank: int, folder: str, who: str) -> list[str]:
    """Between the call and the writing a module writes its weight, or somebody writes one."""
    torch.manual_seed(3)
    model = Renormed()
    engine = gs.manage(model, gs.HybridAdam(model.parameters()), device="cpu")
    with engine.full_parameter(model.table.weight) as values:
        values.fill_(3.0)
    engine.save(f"{folder}/front")
    patch = pytest.MonkeyPatch()
    gate = Gate(patch)
    saving = engine.save(f"{folder}/back", background=True)
    before = engine.model_state_dict()
    if who == "module":
        model(torch.zeros(1))
    else:
        with torch.no_grad():
            model.b.bias.fill_(4.0)
    after = engine.model_state_dict()
    gate.open()
    saving.wait()
    patch.undo()
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize("who", ["module", "tensor"])
def test_ranks_write_weights_meanwhile(who: str, forks: Forks, tmp_path: Path) -> None:
    for changed in run(forks, writes_job, str(tmp_path), who, ranks=2):
        assert changed == ["table.weight" if who == "module" else "b.bias"]
    assert contents(tmp_path / "back") == contents(tmp_path / "front")


def background_error_job(rank: int, folder: str, who: int) -> tuple[str, str, bool]:
    """(what wait says, what the next save says, whether the one after it works)."""
    engine = engine_of(3)
    train(engine, range(2))
    patch = pytest.MonkeyPatch()
    gate = Gate(patch)
    error = OSError(28, "No space left on device", f"__{rank}_0.distcp")
    saving = engine.save(folder, background=True)
    train(engine, range(2, 3))
    gate.open(error if rank == who else None)
    saving.join()
    told = []
    for act in (lambda: engine.save(folder), saving.wait):
        try:
            act()
        except gs.GeminiError as error:
            told.append(str(error))
    patch.undo()
    assert not list(Path(folder).parent.iterdir())
    engine.ranks.gather("looked")
    train(engine, range(3, 4))
    engine.save(folder, background=True).wait()
    return told[0], told[1], (Path(folder) / "manifest.json").exists()


@pytest.mark.parametrize("who", [0, 1])
def test_an_error_of_one_writer(who: int, forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    text = f"rank {who}: [Errno 28] No space left on device: '__{who}_0.distcp'"
    for first, second, works in run(
        forks, background_error_job, str(tmp_path / "run" / "saved"), who, ranks=2
    ):
        assert text in first and text in second and works


def background_dying_job(rank: int, folder: str) -> str:
    engine = engine_of(3, timeout=5.0)
    train(engine, range(2))
    if rank == 1:
        patch = pytest.MonkeyPatch()
        patch.setattr(records.RecordFile, "finish", lambda self: os._exit(7))
    saving = engine.save(folder, background=True)
    try:
        saving.wait()
    except gs.GeminiError as error:
        return str(error)
    return "none"


def test_a_rank_dies_while_its_writer_writes(forks: Forks, tmp_path: Path) -> None:
    """The other rank's writer has an error, and the old checkpoint is whole."""
    target = tmp_path / "saved"
    want = run(forks, save_job, str(target), {}, ranks=2)[0][0]
    ended = forks.run(f"{__name__}:background_dying_job", str(target), ranks=2)
    assert ended[1].exit_code == 7
    assert ended[0].value is not None and "rank 1" in ended[0].value, ended[0].how
    assert run(forks, load_job, str(target), {}, ranks=1)[0][0] == want


def leaving_job(rank: int, folder: str) -> str:
    """What rank 1 is told when rank 0 leaves by an error, while rank 1's writer cannot go on before that."""
    engine = engine_of(3, timeout=1000.0)
    train(engine, range(2))
    patch = pytest.MonkeyPatch()
    patch.setattr(close, "PATIENCE", 0.1)
    gate = Gate(patch)
    saving = engine.save(folder, background=True)
    try:
        if rank == 0:
            gate.open()
            with pytest.raises(ValueError), engine:
                raise ValueError("of rank 0")
            return ""
        with pytest.raises(gs.GeminiError) as found:
            engine.ranks.gather("what rank 0 never comes to")
        return str(found.value)
    finally:
        gate.open()
        saving.join()
        patch.undo()


def test_an_error_of_one_rank_does_not_wait_for_the_others_writers(
    forks: Forks, tmp_path: Path
) -> None:
    assert "ValueError: of rank 0" in run(forks, leaving_job, str(tmp_path / "saved"), ranks=2)[1]
    assert not (tmp_path / "saved").exists()


# ---- errors --------------------------------------------------------------------------------------


def failing_job(rank: int, folder: str, who: int, what: str) -> tuple[str, str, str, bool]:
    """(the error, digest before and after, whether a later save works); rank `who` has the error."""
    patch = pytest.MonkeyPatch()
    engine = engine_of(3)
    train(engine, range(2))
    before = digest(engine)
    if rank == who:
        if what == "write":
            n = [0]
            real = records.RecordFile.add

            def add(self: Any, value: torch.Tensor) -> Any:
                n[0] += 1
                if n[0] == 7:
                    raise OSError(28, "No space left on device", self.name)
                return real(self, value)

            patch.setattr(records.RecordFile, "add", add)
        elif what == "fsync":
            patch.setattr(records.RecordFile, "finish", _no_space)
        elif what == "folder":
            patch.setattr(Path, "is_dir", lambda self: False)
        elif what == "manifest":
            patch.setattr(manifests, "write", _no_space)
    patch.setattr(meetings, "_STRETCH", 1000)
    try:
        engine.save(folder)
        error = "none"
    except gs.GeminiError as raised:
        error = str(raised)
    patch.undo()
    after = digest(engine)
    assert not list(Path(folder).parent.iterdir())
    engine.ranks.gather("looked")
    train(engine, range(2, 3))
    engine.save(folder)
    return error, before, after, (Path(folder) / "manifest.json").exists()


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device", "somewhere")


@pytest.mark.parametrize(
    ("who", "what", "text"),
    [
        (1, "write", "No space left on device: '__1_0.distcp'"),
        (2, "fsync", "No space left on device"),
        (1, "folder", "is not the same folder on all ranks"),
        (0, "manifest", "No space left on device"),
    ],
)
def test_an_error_on_one_rank(who: int, what: str, text: str, forks: Forks, tmp_path: Path) -> None:
    """All raise, with that rank's number; nothing is left; training and the next save go on."""
    folder = tmp_path / "run"
    folder.mkdir()
    for error, before, after, works in run(
        forks, failing_job, str(folder / "saved"), who, what, ranks=3
    ):
        assert text in error and f"rank {who}: " in error
        assert before == after and works


def other_step_job(rank: int, folder: str) -> str:
    """Rank 1 has counted a step that the others have not."""
    engine = engine_of(3)
    train(engine, range(2))
    slot = next(slot for slot in engine._runtime.slots if slot.has_state)
    slot.adam_step += rank == 1
    try:
        engine.save(folder)
    except gs.GeminiError as error:
        return str(error)
    return "none"


def test_ranks_at_other_steps(forks: Forks, tmp_path: Path) -> None:
    for error in run(forks, other_step_job, str(tmp_path / "saved"), ranks=3):
        assert "the ranks differ in the last step: 2 on ranks 0, 2, 3 on rank 1" in error
    assert not (tmp_path / "saved").exists()


def damaged_job(rank: int, folder: str) -> tuple[str, str, str]:
    engine = engine_of(4)
    before = digest(engine)
    try:
        engine.load(folder)
        error = "none"
    except gs.GeminiError as raised:
        error = str(raised)
    return error, before, digest(engine)


def test_damage_that_one_rank_reads(forks: Forks, tmp_path: Path) -> None:
    """No rank loads anything; all name the file and the rank."""
    run(forks, save_job, str(tmp_path / "saved"), {}, ranks=2)
    manifest = manifests.Manifest(tmp_path / "saved")
    last = manifest.tensors["model.terms.5.p"].pieces[-1]
    path = tmp_path / "saved" / last.file
    whole = bytearray(path.read_bytes())
    whole[last.offset + 4 * last.n - 1] ^= 16
    path.write_bytes(whole)
    for error, before, after in run(forks, damaged_job, str(tmp_path / "saved"), ranks=2):
        assert f"rank 1: {path} is damaged" in error
        assert before == after


def differing_job(rank: int, folder: str) -> tuple[str, str, str]:
    engine = engine_of(4)
    before = digest(engine)
    try:
        engine.load(folder, model_only=rank == 1)
        error = "none"
    except gs.GeminiError as raised:
        error = str(raised)
    return error, before, digest(engine)


def test_ranks_that_load_other_parts(forks: Forks, tmp_path: Path) -> None:
    run(forks, save_job, str(tmp_path / "saved"), {}, ranks=2)
    for error, before, after in run(forks, differing_job, str(tmp_path / "saved"), ranks=2):
        assert "parts" in error
        assert before == after


def dying_job(rank: int, folder: str) -> str:
    engine = engine_of(3, timeout=5.0)
    train(engine, range(2))
    if rank == 1:
        patch = pytest.MonkeyPatch()
        patch.setattr(records.RecordFile, "finish", lambda self: os._exit(7))
    try:
        engine.save(folder)
    except gs.GeminiError as error:
        return str(error)
    return "none"


def test_a_rank_dies_while_saving(forks: Forks, tmp_path: Path) -> None:
    """The others have an error within the timeout, and the old checkpoint is whole."""
    target = tmp_path / "saved"
    want = run(forks, save_job, str(target), {}, ranks=2)[0][0]
    ended: list[Ended] = forks.run(f"{__name__}:dying_job", str(target), ranks=2)
    assert ended[1].exit_code == 7
    assert ended[0].value is not None and "rank 1" in ended[0].value, ended[0].how
    assert run(forks, load_job, str(target), {}, ranks=1)[0][0] == want
    shutil.rmtree(target)
