# Files of Fabric: what is in them, and that a run which is resumed from one is the run that was not interrupted.

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from fabric_case import (
    close,
    hybrid_adam,
    make_fabric,
    net,
    single_device,
    state_of,
    train,
)
from lightning_case import PRECISIONS, TREES, load_fabric, same, same_adam


def ready(
    precision: str = "32-true",
    seed: int = 0,
    tree: str = "lightning",
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """A Fabric, and what it has set up. dtype: in which the model comes."""
    fabric = make_fabric(tree, precision=precision)
    module = net(seed).to(dtype)
    return fabric, *fabric.setup(module, hybrid_adam(module))


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("precision", [*PRECISIONS, "16-mixed"])
def test_a_resumed_run_is_the_run_that_went_on(precision: str, tree: str, tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    fabric, model, optimizer = ready(precision, tree=tree)
    losses = train(fabric, model, optimizer, steps=3)
    state = {"model": model, "optimizer": optimizer, "step": 3, "note": "kept"}
    scaler = gs.engine_of(model).scaler
    if scaler is not None:
        state["scaler"] = scaler
    fabric.save(path, state)
    losses += train(fabric, model, optimizer, steps=3, first=3)

    again, its_model, its_optimizer = ready(precision, seed=9, tree=tree)
    found = {"model": its_model, "optimizer": its_optimizer, "step": 0}
    if scaler is not None:
        found["scaler"] = gs.engine_of(its_model).scaler
    assert again.load(path, found) == {"note": "kept"}
    assert found["step"] == 3 and found["model"] is its_model
    assert train(again, its_model, its_optimizer, steps=3, first=3) == losses[3:]
    same(state_of(its_model), state_of(model))
    close(model, its_model)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_file_is_that_of_a_single_device(precision: str, tmp_path: Path) -> None:
    fabric, model, optimizer = ready(precision)
    train(fabric, model, optimizer, steps=2)
    fabric.save(tmp_path / "ours.ckpt", {"model": model, "optimizer": optimizer})
    checkpoint = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    engine = gs.engine_of(model)
    same(dict(checkpoint["model"]), dict(engine.model_state_dict()))
    assert list(checkpoint["model"]) == list(net().state_dict())
    entries = checkpoint["optimizer"]["state"].values()
    assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in entries)

    own = single_device("lightning", "32-true")
    module = net(3)
    plain = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    its_model, its_optimizer = own.setup(module, plain)
    own.load(tmp_path / "ours.ckpt", {"model": its_model, "optimizer": its_optimizer})
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    values = module.state_dict()
    assert all(torch.equal(values[name], checkpoint["model"][name]) for name in trained)
    same_adam(checkpoint["optimizer"], plain.state_dict())
    # One more step of its own, and back.
    train(own, its_model, its_optimizer, steps=1, first=2)
    own.save(tmp_path / "theirs.ckpt", {"model": its_model, "optimizer": its_optimizer})
    fabric.load(tmp_path / "theirs.ckpt", {"model": model, "optimizer": optimizer})
    masters = engine.model_state_dict()
    assert all(torch.equal(masters[name], module.state_dict()[name]) for name in trained)
    same_adam(engine.optimizer_state_dict(), plain.state_dict())
    assert train(fabric, model, optimizer, steps=1, first=3)
    close(model)


def test_keys_that_are_missing_and_raw_files(tmp_path: Path) -> None:
    fabric, model, optimizer = ready()
    fabric.save(tmp_path / "some.ckpt", {"model": model, "step": 4})
    with pytest.raises(KeyError, match=r"some.ckpt.*key 'epoch'.*has 'model', 'step'.*strict"):
        fabric.load(tmp_path / "some.ckpt", {"model": model, "epoch": 1})
    state = {"epoch": 1, "step": 0}
    remainder = fabric.load(tmp_path / "some.ckpt", state, strict=False)
    assert state == {"epoch": 1, "step": 4} and list(remainder) == ["model"]
    whole = fabric.load(tmp_path / "some.ckpt")
    assert list(whole) == ["model", "step"]

    other = net(7).state_dict()
    torch.save(other, tmp_path / "raw.pt")
    fabric.load_raw(tmp_path / "raw.pt", model)
    same(dict(gs.engine_of(model).model_state_dict()), dict(other))
    del other["gain"]
    other["unknown"] = torch.ones(1)
    torch.save(other, tmp_path / "less.pt")
    with pytest.raises(RuntimeError, match="gain"):
        fabric.load_raw(tmp_path / "less.pt", model)
    fabric.load_raw(tmp_path / "less.pt", model, strict=False)
    train(fabric, model, optimizer, steps=1)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    again, its_model, its_optimizer = ready()
    again.load_raw(tmp_path / "optimizer.pt", its_optimizer)
    same(gs.engine_of(its_model).optimizer_state_dict(), gs.engine_of(model).optimizer_state_dict())
    with pytest.raises(TypeError, match="storage_options"):
        fabric.strategy.save_checkpoint(tmp_path / "no.ckpt", {}, storage_options={"a": 1})
    close(model, its_model)


def test_a_filter_keeps_what_it_names(tmp_path: Path) -> None:
    fabric, model, optimizer = ready("bf16-mixed")
    train(fabric, model, optimizer, steps=1)
    path = tmp_path / "filtered.ckpt"
    named: list[str] = []

    def keep(name: str, value: Any) -> bool:
        named.append(name)
        return name.startswith("body")

    fabric.save(path, {"model": model, "n": 1}, filter={"model": keep})
    assert named == list(net().state_dict())
    checkpoint = torch.load(path)
    masters = gs.engine_of(model).model_state_dict()
    same(checkpoint["model"], {n: v for n, v in masters.items() if n.startswith("body")})
    assert checkpoint["n"] == 1
    with pytest.raises(ValueError, match="not present in the state keys"):
        fabric.save(path, {"model": model}, filter={"other": keep})
    fabric.load(path, {"model": model}, strict=False)
    close(model)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_several_models_parts_and_strangers_share_a_file(precision: str, tmp_path: Path) -> None:
    fabric, first, optimizer = ready(precision)
    module = net(1)
    second = fabric.setup_module(module)
    train(fabric, first, optimizer, steps=2)
    plain = nn.Linear(2, 2)
    state = {"first": first, "second": second, "part": module.body, "plain": plain}
    fabric.save(tmp_path / "all.ckpt", state)
    checkpoint = torch.load(tmp_path / "all.ckpt")
    masters = {name: gs.engine_of(state[name]).model_state_dict() for name in ("first", "second")}
    for name in ("first", "second"):
        same(dict(checkpoint[name]), dict(masters[name]))
    start = "body."
    part = {n[len(start) :]: v for n, v in masters["second"].items() if n.startswith(start)}
    same(dict(checkpoint["part"]), part)
    same(dict(checkpoint["plain"]), dict(plain.state_dict()))
    fabric.load(tmp_path / "all.ckpt", {"second": first, "part": module.body, "plain": plain})
    same(dict(gs.engine_of(first).model_state_dict()), dict(masters["second"]))
    close(first, second)


def test_a_model_may_have_its_own_idea_of_its_state(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {**super().state_dict(*args, **kwargs), "version": torch.tensor(2)}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(
                {k: v for k, v in state.items() if k != "version"}, strict
            )

    fabric = make_fabric(precision="bf16-true")
    module = Own(3, 3)
    weight = module.weight.detach().clone()
    model = fabric.setup_module(module)
    fabric.save(tmp_path / "own.ckpt", {"model": model})
    saved = torch.load(tmp_path / "own.ckpt")["model"]
    assert saved["version"] == 2 and torch.equal(saved["weight"], weight)
    assert saved["weight"].dtype is torch.float32
    fabric.load(tmp_path / "own.ckpt", {"model": model})
    close(model)


HALVES = {"bf16-true": torch.bfloat16, "16-mixed": torch.float16}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("came_in_half", [False, True])
def test_state_dicts_of_ones_own_resume_to_the_bit(precision: str, came_in_half: bool) -> None:
    """What Fabric's wrappers give, saved in any way: fp32 weights of a model that came in fp32. Of one that came in
    16 bits they are in 16 bits, and with the optimizer is what they lack."""
    dtype = HALVES[precision] if came_in_half else torch.float32
    fabric, model, optimizer = ready(precision, dtype=dtype)
    train(fabric, model, optimizer, steps=2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    # Mixed precision computes the norm, body.2, in fp32, which is then the wider dtype.
    assert {v.dtype for name, v in weights.items() if "body.2." not in name} == {dtype}
    same(weights["frozen"], net().frozen.detach().to(dtype))
    masters = gs.engine_of(model).model_state_dict()
    same(weights["gain"], masters["gain"].to(dtype))
    _, its_model, its_optimizer = ready(precision, seed=9, dtype=dtype)
    its_optimizer.load_state_dict(optimizer.state_dict())
    its_model.load_state_dict(weights)
    names = ("model", "optimizer")
    mine, its = state_of(model), state_of(its_model)
    same({name: its[name] for name in names}, {name: mine[name] for name in names})
    close(model, its_model)


def test_an_optimizer_that_is_saved_alone_has_what_its_weights_lack(tmp_path: Path) -> None:
    fabric, model, optimizer = ready("bf16-true")
    train(fabric, model, optimizer, steps=1)
    fabric.save(tmp_path / "alone.ckpt", {"optimizer": optimizer})
    entries = torch.load(tmp_path / "alone.ckpt")["optimizer"]["state"]
    assert all("remainder" in entry for entry in entries.values())
    close(model)


def test_a_checkpoint_io_of_ones_own_is_used(tmp_path: Path) -> None:
    calls: list[str] = []

    class Spy(load_fabric("lightning").plugins.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append("save")
            super().save_checkpoint(checkpoint, path, storage_options)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append("load")
            return super().load_checkpoint(path, *args, **kwargs)

    fabric = make_fabric(plugins=[Spy()])
    model = fabric.setup_module(net())
    fabric.save(tmp_path / "a.ckpt", {"model": model})
    fabric.load(tmp_path / "a.ckpt", {"model": model})
    assert calls == ["save", "load"]
    close(model)


@pytest.mark.parametrize("is_on_class", [False, True])
def test_a_method_that_is_put_in_place_of_the_ios_is_called(
    is_on_class: bool, tmp_path: Path
) -> None:
    """As Lightning's own tests do it, on the strategy's own TorchCheckpointIO."""
    fabric = make_fabric()
    model = fabric.setup_module(net())
    io = fabric.strategy.checkpoint_io
    owner = type(io) if is_on_class else io

    def watched(name: str) -> Any:
        return patch.object(owner, name, autospec=True, side_effect=getattr(owner, name))

    with watched("save_checkpoint") as save, watched("load_checkpoint") as load:
        fabric.save(tmp_path / "a.ckpt", {"model": model})
        fabric.load(tmp_path / "a.ckpt", {"model": model})
    save.assert_called_once()
    load.assert_called_once()
    close(model)
