"""engine.save and engine.load: exact resume, whatever the engine is now; what other tools make of it; damage."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch.utilities.consolidate_checkpoint import _format_checkpoint
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gemini_strategy as gs
from gemini_strategy.checkpoint import boxes as boxes_module
from gemini_strategy.checkpoint import load as load_module
from gemini_strategy.checkpoint import manifest as manifests
from gemini_strategy.checkpoint import parts
from gemini_strategy.checkpoint import plain as plain_data
from helpers.reference import (
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
)
from helpers.saving import Odd, assert_same_model, make, state_of, train
from helpers.zoo import CASES

PRECISIONS = ("bf16-true", "16-mixed", "32-true")


# ---- exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "how"),
    [
        ("bf16-true", {}),
        ("16-mixed", {"placement_policy": "cpu", "chunk_size": 4096}),
        ("32-true", {"placement_policy": "cuda"}),
        ("bf16-true", {"chunk_size": 4096, "device_budget": 1 << 20}),
    ],
    ids=["auto", "cpu", "cuda", "budget"],
)
def test_resume_is_exact(precision: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Another engine, made otherwise, goes on as the first one does: 12 steps, its random numbers included."""
    with make(precision=precision) as engine:
        train(engine, 4)
        engine.save(tmp_path / "saved", {"step": 4})
        saved = state_of(engine)
        want_losses, want = train(engine, 12), state_of(engine)
    with make(seed=9, precision=precision, **how) as again:
        train(again, 1)
        assert again.load(tmp_path / "saved") == {"step": 4}
        assert state_of(again) == saved
        assert train(again, 12) == want_losses
        assert state_of(again) == want
        assert again.model.calls == 16


STORED = {  # other models of the zoo differ in what they compute, not in what is stored
    "batch_norm",
    "embedding_max_norm",
    "lora",
    "lstm",
    "parameter_list_and_dict",
    "parametrizations",
    "rope_buffers",
    "shared_module_under_two_names",
    "tied_three_ways",
    "unused_parameters",
}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in STORED], ids=repr)
def test_models_of_the_zoo(case: Any, tmp_path: Path) -> None:
    recipe = Recipe(case.precisions[-1], steps=6)
    reference = plain(case.build, recipe)
    drive(reference, case, 6)
    first = managed(case.build, recipe)
    drive(first, case, 3)
    first.engine.save(tmp_path / "saved")
    first.engine.close()
    second = managed(case.build, recipe, placement_policy="cpu", chunk_size=4096)
    second.engine.load(tmp_path / "saved")
    second.losses, second.norms, second.scales = first.losses, first.norms, first.scales
    drive(second, case, 3, first=3)
    assert_same_outcome(second.outcome(), reference.outcome())
    second.engine.close()


def test_into_models_in_another_order_of_memory(tmp_path: Path) -> None:
    """A weight that was saved transposed loads into one that is not, and the other way round."""
    contiguous = lambda: _contiguous(Odd())  # noqa: E731
    for there, here in ((Odd, contiguous), (contiguous, Odd)):
        with make(build=there) as engine:
            train(engine, 3)
            engine.save(tmp_path / "saved")
            want = engine.state_dict()
        with make(seed=4, build=here) as again:
            again.load(tmp_path / "saved")
            got = again.state_dict()
        assert_same_model(got["model"], want["model"])
        for index, entry in want["optimizer"]["state"].items():
            for key, value in entry.items():
                assert torch.equal(got["optimizer"]["state"][index][key], value), (index, key)


def _contiguous(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    return model


def test_between_precisions(tmp_path: Path) -> None:
    """Masters are fp32 whatever the weights are."""
    with make(precision="bf16-true") as engine:
        train(engine, 3)
        engine.save(tmp_path / "saved")
        want = engine.model_state_dict()
    with make(seed=4, precision="32-true") as again:
        again.load(tmp_path / "saved")
        got = again.model_state_dict()
        assert torch.equal(got.pop("frozen"), want.pop("frozen").float())  # it was in bf16 there
        assert_same_model(got, want)


def test_before_the_first_step_and_without_gradients(tmp_path: Path) -> None:
    """A state that has never been updated loads over one that has; gradients are not a part of it."""
    with make() as engine:
        engine.save(tmp_path / "new")
        want = state_of(engine)
        train(engine, 2)
        engine.backward(engine.model(torch.randn(4, 13).bfloat16()).float())
        engine.save(tmp_path / "late")
        assert engine.model.a.weight.grad is not None
        engine.load(tmp_path / "new")
        assert state_of(engine) == want
        assert not [v for v in engine.optimizer.state.values() if v]


def test_the_model_alone(tmp_path: Path) -> None:
    with make() as engine:
        train(engine, 2)
        engine.save(tmp_path / "saved")
        want = engine.model_state_dict()
    with make(seed=3) as again:
        train(again, 5)
        moments = again.optimizer_state_dict(with_lows=False)["state"]
        again.load(tmp_path / "saved", model_only=True)
        assert_same_model(again.model_state_dict(), want)
        kept = again.optimizer_state_dict(with_lows=False)["state"]
        for index, entry in moments.items():
            for key, value in entry.items():
                assert_same_bits(kept[index][key], value, key)
    with gs.manage(Odd(), device="cpu", precision="bf16-true") as without:
        without.load(tmp_path / "saved")
        assert_same_bits(without.model_state_dict()["scalar"], want["scalar"])
        without.save(tmp_path / "weights")
    with (
        make() as again,
        pytest.raises(gs.GeminiError, match="no state of an optimizer: model_only"),
    ):
        again.load(tmp_path / "weights")


def test_schedulers_groups_and_extra(tmp_path: Path) -> None:
    """Groups come back with what schedulers have put there; `extra` is plain data, and comes back as it was."""
    extra = {
        "step": 3,
        7: [1.5, float("inf"), -0.0, None, True],
        "nested": {"t": (torch.arange(6).view(2, 3), torch.tensor(2.5, dtype=torch.bfloat16))},
        "array": np.arange(3.0),
        "scalar": np.float32(0.1),
        "bytes": b"\0\xff",
        "empty": torch.empty(0, 4),
    }
    with make() as engine:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
        train(engine, 1)
        scheduler.step()
        engine.save(tmp_path / "saved", {**extra, "scheduler": scheduler.state_dict()})
    with make() as again:
        got = again.load(tmp_path / "saved")
        assert again.optimizer.param_groups[0]["lr"] == 5e-3
        assert again.optimizer.param_groups[0]["initial_lr"] == 1e-2
        assert got["scheduler"]["last_epoch"] == 1
    assert got["step"] == 3 and repr(got[7]) == repr(extra[7])
    for a, b in zip(got["nested"]["t"], extra["nested"]["t"], strict=True):
        assert_same_bits(a, b)
    assert got["array"].tolist() == [0.0, 1.0, 2.0] and got["scalar"] == extra["scalar"]
    assert got["bytes"] == b"\0\xff" and got["empty"].shape == (0, 4)


def test_what_is_not_plain_is_refused_by_its_place(tmp_path: Path) -> None:
    with make() as engine:
        with pytest.raises(gs.GeminiError, match=r"extra\['a'\]\[1\] is a Odd, and a checkpoint"):
            engine.save(tmp_path / "saved", {"a": [1, Odd()]})
        assert list(tmp_path.iterdir()) == []
        train(engine, 1)


def test_codes_that_are_none() -> None:
    for code in ({"tensor": 1, "dict": []}, {"set": []}, {"tensor": "0"}, {"dict": 3}):
        with pytest.raises((ValueError, TypeError)):
            plain_data.decode(code, lambda n: torch.zeros(n))


def test_boxes_are_the_run() -> None:
    """Of every shape and run: each box has the next elements, and no more than asked for."""
    draw = random.Random(5)
    for _ in range(3000):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        values = torch.arange(torch.Size(shape).numel()).reshape(shape)
        begin = draw.randint(0, values.numel())
        end = draw.randint(begin, values.numel())
        most = draw.randint(1, 40)
        at = begin
        for offsets, sizes in boxes_module.boxes(shape, begin, end, most):
            box = values[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            assert box.shape == sizes and 0 < box.numel() <= most
            assert box.flatten().tolist() == list(range(at, at + box.numel()))
            at += box.numel()
        assert at == end


# ---- what other tools make of it -----------------------------------------------------------------


def test_torchs_tools_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, so that a tensor is put together of several boxes."""
    monkeypatch.setattr(parts, "MOST_ELEMENTS", 20)
    with make() as engine:
        train(engine, 3)
        engine.save(tmp_path / "saved", {"step": 3})
        want = engine.state_dict()
        names = [name for name, _ in engine.model.named_parameters()]
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "one.pt")
    one = torch.load(tmp_path / "one.pt", weights_only=False)
    assert set(one["model"]) == set(want["model"])
    assert_same_model(one["model"], want["model"])
    groups = one["optimizer_0"]["param_groups"]
    assert groups[0]["params"] == names
    assert groups[0]["lr"] == 1e-2
    for index, entry in want["optimizer"]["state"].items():
        for key, value in entry.items():
            got = one["optimizer_0"]["state"][names[index]][key]
            assert_same_bits(got.contiguous(), value.contiguous(), f"{names[index]}: {key}")
    only = {"model": {"a.weight": torch.zeros(13, 13)}}
    dcp.load(only, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert_same_bits(only["model"]["a.weight"], want["model"]["a.weight"])
    assert torch.load(tmp_path / "saved" / "meta.pt", weights_only=True) == {"scaler": None}


def test_a_torch_without_its_record_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its module is imported by the first save, not with the package."""
    with make() as engine:
        monkeypatch.delattr(dcp.filesystem, "_StorageInfo")
        for keep_last in (None, 1):
            with pytest.raises(ImportError, match=r"^torch \S+ lacks \S+\._StorageInfo, by which"):
                engine.save(tmp_path / "saved", keep_last=keep_last)
        assert not list(tmp_path.iterdir())
        monkeypatch.undo()
        engine.save(tmp_path / "saved")


def test_lightnings_consolidation(tmp_path: Path) -> None:
    """Its own tool makes one ordinary file, from which torch's AdamW goes on."""
    with make(precision="32-true") as engine:
        train(engine, 3)
        engine.save(tmp_path / "saved")
        want = engine.state_dict()
    one = _format_checkpoint(_load_distributed_checkpoint(tmp_path / "saved"))
    model = Odd()
    model.load_state_dict(one["state_dict"])
    assert_same_model(dict(model.state_dict()), want["model"])
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(one["optimizer_states"][0])
    state = optimizer.state_dict()
    for index, entry in want["optimizer"]["state"].items():
        for key, value in entry.items():
            assert_same_bits(state["state"][index][key].contiguous(), value.contiguous(), key)


def test_loading_needs_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as engine:
        train(engine, 2)
        engine.save(tmp_path / "saved", {"t": torch.ones(3)})
        want = state_of(engine)
        for name in (".metadata", "meta.pt"):
            (tmp_path / "saved" / name).unlink()

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("pickle")

        for owner, name in (
            (pickle, "Unpickler"),
            (pickle, "loads"),
            (pickle, "load"),
            (torch, "load"),
        ):
            monkeypatch.setattr(owner, name, refuse)
        train(engine, 1)
        engine.load(tmp_path / "saved")
        monkeypatch.undo()
        assert state_of(engine) == want


# ---- what does not fit, and what is damaged ------------------------------------------------------


def test_another_model_is_refused_by_names(tmp_path: Path) -> None:
    class Other(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.randn(13, 8))
            self.more = nn.Parameter(torch.randn(2))
            del self.kernel

    with make() as engine:
        engine.save(tmp_path / "saved")
    with make(build=Other) as other:
        before = state_of(other)
        with pytest.raises(gs.GeminiError) as error:
            other.load(tmp_path / "saved")
        text = str(error.value)
        assert "it lacks more" in text and "it has, and this model does not, kernel." in text
        assert "transposed has shape (13, 7) there and (13, 8) here" in text
        assert state_of(other) == before
    torch.manual_seed(0)
    model = Odd()
    few = torch.optim.AdamW([model.scalar, model.transposed], lr=1e-2)
    with (
        gs.manage(model, few, device="cpu", precision="bf16-true") as fewer,
        pytest.raises(gs.GeminiError, match="does not fit the optimizer: it has, and this model"),
    ):
        fewer.load(tmp_path / "saved")


def test_a_tensor_that_shows_a_parameter_is_in_the_way(tmp_path: Path) -> None:
    with make() as engine:
        engine.save(tmp_path / "saved")
        with (
            engine.full_parameters(engine.model.a, writable=False),
            pytest.raises(gs.GeminiError, match=r"a.weight: a tensor outside its module shows it"),
        ):
            engine.load(tmp_path / "saved")
        engine.load(tmp_path / "saved")


def _saved(folder: Path) -> gs.Engine:
    """An engine that has changed since it was saved."""
    engine = make()
    train(engine, 2)
    engine.save(folder, {"t": torch.arange(1000)})
    train(engine, 1)
    return engine


def test_every_truncated_or_flipped_file_is_found(tmp_path: Path) -> None:
    """Nothing has changed after the error, which names the file."""
    folder = tmp_path / "saved"
    draw = random.Random(3)
    with _saved(folder) as engine:
        before = state_of(engine)
        used = _used_bytes(folder)
        for name in ("__0_0.distcp", "manifest.json"):
            whole = (folder / name).read_bytes()
            cuts = [0, 1, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(4))]
            flips = [
                draw.choice(used) if name[0] == "_" else draw.randrange(len(whole))
                for _ in range(16)
            ]
            damaged = [whole[:at] for at in cuts] + [whole + b"\0"]
            damaged += [
                whole[:at] + bytes([whole[at] ^ 1 << draw.randrange(8)]) + whole[at + 1 :]
                for at in flips
            ]
            for content in damaged:
                (folder / name).write_bytes(content)
                with pytest.raises(gs.GeminiError, match=str(folder)):
                    engine.load(folder)
                assert state_of(engine) == before
            (folder / name).write_bytes(whole)
        engine.load(folder)
        assert state_of(engine) != before


def _used_bytes(folder: Path) -> list[int]:
    """The places in the file that have values, not what torch.save puts around them."""
    manifest = manifests.Manifest(folder)
    return [
        piece.offset + byte
        for stored in manifest.tensors.values()
        for piece in stored.pieces
        for byte in range(piece.n * stored.dtype.itemsize)
    ]


def test_files_that_are_missing_swapped_or_no_files(tmp_path: Path) -> None:
    folder, name = tmp_path / "saved", "__0_0.distcp"
    with _saved(folder) as engine:
        before = state_of(engine)
        other = tmp_path / "other"
        engine.save(other)
        whole = (folder / name).read_bytes()

        def refused(match: str) -> None:
            with pytest.raises(gs.GeminiError, match=match):
                engine.load(folder)
            assert state_of(engine) == before
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_bytes(whole)

        (folder / name).unlink()
        refused(f"{name} cannot be read: No such file")
        (folder / name).write_bytes((other / name).read_bytes())
        refused(name)
        (folder / name).unlink()
        (folder / name).symlink_to(other / name)
        refused(f"{name} cannot be read")
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused("no ordinary file")
        engine.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["files"].update({"../x": 10**9}),
        lambda c: _piece(c).__setitem__(0, "../../etc/passwd"),
        lambda c: _piece(c).__setitem__(0, "__1_0.distcp"),
        lambda c: _piece(c).__setitem__(1, -1),
        lambda c: _piece(c).__setitem__(1, 2**63),
        lambda c: _piece(c).__setitem__(2, 1),
        lambda c: _piece(c).__setitem__(3, 2**62),
        lambda c: _piece(c).__setitem__(3, 1.5),
        lambda c: _piece(c).append(1),
        lambda c: c["tensors"]["model.a.weight"].__setitem__("shape", [2**40, 2**40]),
        lambda c: c["tensors"]["model.a.weight"].__setitem__("shape", [-13, -13]),
        lambda c: c["tensors"]["model.a.weight"].__setitem__("dtype", "load"),
        lambda c: c["tensors"]["model.a.weight"].__setitem__("order", [0, 0]),
        lambda c: c["tensors"]["model.a.weight"].__setitem__("pieces", []),
        lambda c: c["tensors"].pop("model.a.weight"),
        lambda c: c["tensors"].pop("rank 0: 0"),
        lambda c: c["rest"].pop("aliases"),
        lambda c: c["rest"].__setitem__("ranks", []),
        lambda c: c["rest"]["ranks"][0].__setitem__("extra", {"tensor": 99}),
        lambda c: c["rest"]["optimizer"].pop("groups"),
        lambda c: c["rest"]["optimizer"]["steps"].__setitem__("a.weight", -3),
        lambda c: c["rest"]["optimizer"]["steps"].__setitem__("nobody", 3),
        lambda c: c.pop("tensors"),
        lambda c: c.__setitem__("tensors", [1]),
    ],
)
def test_hostile_manifests(change: Callable[[Any], None], tmp_path: Path) -> None:
    """With a hash that is right: an error, nothing changes, nothing outside the folder is read."""
    folder = tmp_path / "saved"
    with _saved(folder) as engine:
        before = state_of(engine)
        content = json.loads((folder / "manifest.json").read_bytes().split(b"\n", 1)[1])
        change(content)
        body = json.dumps(content).encode()
        head = f"gemini-checkpoint-1 {len(body)} {hashlib.sha256(body).hexdigest()}\n"
        (folder / "manifest.json").write_bytes(head.encode() + body)
        if "../x" not in content.get("files", {}):
            with pytest.raises(gs.GeminiError):
                engine.load(folder)
        else:  # nobody asks for it
            with pytest.raises(gs.GeminiError, match="cannot be read"):
                engine.load(folder)
        assert state_of(engine) == before


def _piece(content: Any) -> list[Any]:
    return content["tensors"]["model.a.weight"]["pieces"][0]


@pytest.mark.parametrize("body", [b"[" * 100000, b"{}", b"null", b"\xff", b'{"files": 3}', b""])
def test_manifests_that_are_none(body: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with _saved(folder) as engine:
        for head in (b"gemini-checkpoint-1 %d %s\n", b"gemini-checkpoint-9 %d %s\n", b"%d %s", b""):
            with contextlib.suppress(TypeError):
                head = head % (len(body), hashlib.sha256(body).hexdigest().encode())
            (folder / "manifest.json").write_bytes(head + body)
            with pytest.raises(gs.GeminiError, match=r"manifest\.json"):
                engine.load(folder)


class Cloning(Odd):
    """Its state dict has copies, and lacks one of them: a habit of those who move it to the host."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        del state["scalar"]
        return state

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nobody asks for it")


def test_masters_are_saved_whatever_the_models_own_state_dict_is(tmp_path: Path) -> None:
    with make(build=Cloning) as engine:
        train(engine, 3)
        engine.save(tmp_path / "saved")
        want = {p: engine._runtime.slot_of(p).read_master() for p in engine.model.parameters()}
        train(engine, 2)
        engine.load(tmp_path / "saved")
        for parameter, value in want.items():
            assert_same_bits(engine._runtime.slot_of(parameter).read_master(), value)
        assert engine.model.calls == 3


def test_tied_here_and_not_there(tmp_path: Path) -> None:
    class Untied(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Linear(13, 13)

    with make(build=Untied) as engine:
        engine.save(tmp_path / "saved")
    with make() as tied, pytest.raises(gs.GeminiError, match="a.weight and b.weight are one param"):
        tied.load(tmp_path / "saved")


def test_buffers_that_cannot_be_kept_are_named(tmp_path: Path) -> None:
    class Sparse(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("graph", torch.eye(3).to_sparse())

    class Expanded(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1).expand(5))

    with (
        make(build=Sparse) as engine,
        pytest.raises(gs.GeminiError, match="buffer graph is torch.sp"),
    ):
        engine.save(tmp_path / "saved")
    with make(build=Expanded) as engine:
        engine.save(tmp_path / "saved")
        before = state_of(engine)
        with pytest.raises(gs.GeminiError, match="scale is expanded here"):
            engine.load(tmp_path / "saved")
        assert state_of(engine) == before


def test_an_interrupted_loading_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of two states are refused until one is loaded."""
    with make() as engine:
        train(engine, 2)
        engine.save(tmp_path / "saved")
        want = state_of(engine)
        train(engine, 1)

        def interrupt(self: Any, state: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Odd, "set_extra_state", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.load(tmp_path / "saved")
        for use in (lambda: train(engine, 1), lambda: engine.save(tmp_path / "bad")):
            with pytest.raises(
                gs.GeminiError, match=r"was interrupted, .* engine.load\(\) a checkpoint"
            ):
                use()
        with pytest.raises(gs.GeminiError, match="does not exist"):
            engine.load(tmp_path / "none")
        with pytest.raises(gs.GeminiError, match="was interrupted"):
            train(engine, 1)
        engine.load(tmp_path / "saved")
        assert state_of(engine) == want
        train(engine, 1)


def test_what_latest_names_may_move_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluator reads a series that another process saves into: it has the one that it began with."""
    with make() as engine, make(seed=3) as reader:
        train(engine, 1)
        engine.save(tmp_path, "one", keep_last=1)
        want = engine.model_state_dict()
        check = load_module._Loading.check_bytes

        def meanwhile(self: Any, *args: Any) -> None:
            train(engine, 1)
            engine.save(tmp_path, "two", keep_last=1)
            check(self, *args)

        monkeypatch.setattr(load_module._Loading, "check_bytes", meanwhile)
        assert reader.load(tmp_path) == "one"
        assert_same_model(reader.model_state_dict(), want)


def test_nothing_of_a_persons_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make() as engine:
        engine.save(tmp_path / "saved")
        (tmp_path / "saved" / "config.json").write_text("{}")
        with pytest.raises(
            gs.GeminiError, match=r"a checkpoint with 'config.json' of somebody else"
        ):
            engine.save(tmp_path / "saved")
        with pytest.raises(gs.GeminiError, match="is a checkpoint itself: keep a series"):
            engine.save(tmp_path / "saved", keep_last=2)
        engine.save(tmp_path / "run", keep_last=2)
        with pytest.raises(gs.GeminiError, match="is there already and is no checkpoint folder"):
            engine.save(tmp_path / "run")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        with pytest.raises(gs.GeminiError, match="is the current folder"):
            engine.save(".")
        for call in (engine.save, engine.load):
            with pytest.raises(gs.GeminiError, match="s3://bucket/x is no folder of a file system"):
                call("s3://bucket/x")
        engine.save("below")
        assert (tmp_path / "here" / "below" / "manifest.json").is_file()


def test_a_run_that_begins_again_in_its_series(tmp_path: Path) -> None:
    """The last ones that were saved stay, also where their steps are less."""
    with make() as engine:
        for step in (1, 2, 3):
            train(engine, 1)
            engine.save(tmp_path, step, keep_last=2)
    with make() as again:
        train(again, 1)
        again.save(tmp_path, "again", keep_last=2)
        assert again.load(tmp_path) == "again"
        names = sorted(p.name for p in tmp_path.iterdir())
        assert names == ["latest", "step-000000001", "step-000000003"]


def test_loading_a_younger_state_forgets_the_rest(tmp_path: Path) -> None:
    with make() as engine:
        engine.save(tmp_path / "new")
        train(engine, 1)
        p = engine.model.scalar
        engine.optimizer.state[p]["mine"] = 3
        engine.save(tmp_path / "mine")
        engine.optimizer.state[p]["other"] = 4
        engine.load(tmp_path / "mine")
        assert dict(engine.optimizer.state[p].items()).keys() == {
            "step",
            "exp_avg",
            "exp_avg_sq",
            "remainder",
            "mine",
        }
        engine.load(tmp_path / "new")
        assert len(engine.optimizer.state) == 0


def test_under_another_default_device(tmp_path: Path) -> None:
    with make() as engine:
        train(engine, 1)
        with torch.device("meta"):
            engine.save(tmp_path / "saved", {"t": torch.ones(2, device="cpu")})
        want = state_of(engine)
        train(engine, 1)
        with torch.device("meta"):
            assert engine.load(tmp_path / "saved")["t"].tolist() == [1.0, 1.0]
        assert state_of(engine) == want


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    with make() as engine:
        with pytest.raises(gs.GeminiError, match="does not exist: engine.save"):
            engine.load(tmp_path / "none")
        with pytest.raises(gs.GeminiError, match="is no checkpoint folder: engine.save"):
            engine.load(tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        for target in (tmp_path, tmp_path / "notes.txt"):
            with pytest.raises(
                gs.GeminiError, match="is there already and is no checkpoint folder"
            ):
                engine.save(target)
        assert (tmp_path / "notes.txt").read_text() == "mine"
        (tmp_path / "empty").mkdir()
        engine.save(tmp_path / "empty")


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_an_option_that_is_set_later_is_refused(option: str, tmp_path: Path) -> None:
    """By its group, where a step would leave it out and a checkpoint would say that it was used."""
    with make() as engine:
        train(engine, 1)
        engine.save(tmp_path / "saved")
        before = state_of(engine)
        group = engine.optimizer.param_groups[0]
        group[option] = True
        for act in (lambda: engine.save(tmp_path / "saved"), engine.step):
            with pytest.raises(gs.GeminiError, match=f"param group 0: {option}=True"):
                act()
        group[option] = False
        assert state_of(engine) == before
        train(engine, 1)


@pytest.mark.parametrize("steps", [0, 3])
def test_between_a_backward_that_ends_a_step_and_the_step(steps: int, tmp_path: Path) -> None:
    """Whether its updates ran inside it or not: refused, and the step is the same."""
    with make() as engine, make() as other:
        for each in (engine, other):
            torch.manual_seed(4)
            for _ in range(steps + 1):
                each.backward(each.model(torch.randn(4, 13).bfloat16()).float(), step=True)
                if each is engine:
                    with pytest.raises(gs.GeminiError, match="would be of no step"):
                        engine.save(tmp_path / "saved")
                each.step()
                each.zero_grad()
        assert not (tmp_path / "saved").exists()
        assert state_of(engine)[2:] == state_of(other)[2:]
        engine.save(tmp_path / "saved")
