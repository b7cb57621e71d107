# A checkpoint is taken in where Lightning's default strategy takes it in: hooks of a resumed run see the same.

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini_strategy.lightning import strategy_class
from lightning_case import (
    fit,
    load_tree,
    make,
    make_trainer,
    module_class,
    same,
)

STRATEGIES = ("auto", "gemini")


def saved(tree: str, path: Path, **options: Any) -> Path:
    fit(tree, make(tree, optimizer="AdamW"), "auto", **options).save_checkpoint(path)
    return path


def test_a_depleted_timer_trains_no_step_more(tree: str, tmp_path: Path) -> None:
    def timer() -> Any:
        return load_tree(tree).callbacks.Timer(timedelta(hours=1), interval="step")

    used = timer()
    used._offset = 3600.0  # all of it
    path = tmp_path / "one.ckpt"
    trainer = fit(tree, make(tree), "auto", callbacks=[timer()])
    trainer.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert list(content["callbacks"]) == ["Timer"]
    content["callbacks"]["Timer"] = used.state_dict()
    torch.save(content, path)
    for strategy in STRATEGIES:
        resumed = fit(tree, make(tree), strategy, ckpt_path=path, callbacks=[timer()], max_epochs=3)
        assert resumed.global_step == 11, strategy


def seen_on_resume(tree: str, strategy: str, path: Path) -> list[tuple[str, Any]]:
    """What hooks of the module and of a callback find, in the order in which they come."""
    seen: list[tuple[str, Any]] = []

    def note(hook: str, module: Any, optimizer: Any = None) -> None:
        weights = {n: p.detach().float().cpu().clone() for n, p in module.named_parameters()}
        steps = optimizer and sorted(float(s["step"]) for s in optimizer.state.values())
        seen.append((hook, (weights, steps)))

    class Watching(load_tree(tree).Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            note("callback.setup", pl_module)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            note("callback.on_load_checkpoint", pl_module)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            seen.append(("callback.load_state_dict", state_dict))

        def state_dict(self) -> dict[str, Any]:
            return {"kept": 7}

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            note("callback.on_fit_start", pl_module, trainer.optimizers[0])

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            note("callback.on_train_start", pl_module, trainer.optimizers[0])

    class Telling(module_class(tree)):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            note("on_load_checkpoint", self)

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            result = super().load_state_dict(*args, **kwargs)
            note("load_state_dict", self)
            return result

        def configure_model(self) -> None:
            note("configure_model", self)

        def configure_optimizers(self) -> Any:
            note("configure_optimizers", self)
            return super().configure_optimizers()

        def on_fit_start(self) -> None:
            note("on_fit_start", self, self.optimizers().optimizer)

    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        return Telling(optimizer="AdamW")

    fit(tree, build(0), "auto", callbacks=[Watching()], max_steps=3).save_checkpoint(path)
    seen.clear()
    fit(tree, build(1), strategy, ckpt_path=path, callbacks=[Watching()], max_steps=3)
    return seen


def test_hooks_of_a_resumed_run_find_what_they_find_under_the_default(
    tree: str, tmp_path: Path
) -> None:
    path = tmp_path / "one.ckpt"
    expected, found = (seen_on_resume(tree, strategy, path) for strategy in STRATEGIES)
    assert [hook for hook, _ in found] == [hook for hook, _ in expected]
    for (hook, ours), (_, theirs) in zip(found, expected, strict=True):
        same(ours, theirs, hook)
    names = [hook for hook, _ in found]
    assert names.index("load_state_dict") < names.index("configure_optimizers")
    assert names.index("callback.load_state_dict") < names.index("callback.on_fit_start")


def test_a_layer_may_be_resized_for_a_checkpoint(tree: str, tmp_path: Path) -> None:
    path = tmp_path / "wide.ckpt"
    wide = make(tree, width=50)
    fit(tree, wide, "auto").save_checkpoint(path)

    class Resizing(module_class(tree)):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            width = len(checkpoint["state_dict"]["body.1.bias"])
            self.body[1] = nn.Linear(16, width)
            self.body[3] = nn.LayerNorm(width)
            self.body[5] = nn.Linear(width, 16)

    trainer, module = make_trainer(tree), Resizing()
    trainer.validate(module, ckpt_path=path, verbose=False)
    same(trainer.strategy.lightning_module_state_dict(), dict(wide.state_dict()))
    fit(tree, module)  # is managed now, and was of another width when it was built
    resumed = fit(tree, module, ckpt_path=path, max_epochs=2)
    again = Resizing()
    same(
        resumed.strategy.lightning_module_state_dict(),
        fit(tree, again, ckpt_path=path, max_epochs=2).strategy.lightning_module_state_dict(),
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_all_of_a_module_may_be_built_again_for_a_checkpoint(
    tree: str, precision: str, tmp_path: Path
) -> None:
    class Rebuilding(module_class(tree)):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            for name, parameter in list(self.named_parameters(recurse=False)):
                values = torch.empty_like(parameter, dtype=torch.float32)
                setattr(self, name, nn.Parameter(values, parameter.requires_grad))
            self.body = None
            self.build()

    module = Rebuilding()
    trainer = fit(tree, module, precision=precision)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    first, weights = trainer.strategy.engine, trainer.strategy.lightning_module_state_dict()
    trainer.predict(module, ckpt_path=tmp_path / "one.ckpt")
    assert first.closed
    same(trainer.strategy.lightning_module_state_dict(), weights)
    trainer.predict(module)  # Lightning looks whether the module has a forward of its own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_in_half_precision_takes_the_masters_whole(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tmp_path / "one.ckpt"
    precision = "bf16-true" if dtype is torch.bfloat16 else "bf16-mixed"
    first = fit("lightning", make("lightning", optimizer="AdamW"), precision=precision)
    first.save_checkpoint(path)
    masters = first.strategy.lightning_module_state_dict()

    class Renaming(module_class("lightning")):
        """Its file has other names than its parameters."""

        def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
            bare = {k.removeprefix("x."): v for k, v in state.items()}
            return super().load_state_dict(bare, *args, **kwargs)

    renamed = {**torch.load(path, weights_only=True)}
    renamed["state_dict"] = {"x." + k: v for k, v in renamed["state_dict"].items()}
    torch.save(renamed, tmp_path / "renamed.ckpt")
    for cls, file in ((module_class("lightning"), path), (Renaming, tmp_path / "renamed.ckpt")):
        module = cls(optimizer="AdamW").to(dtype)
        trainer = make_trainer("lightning", precision=precision)
        trainer.fit(module, ckpt_path=file)  # is at its end already
        found = trainer.strategy.lightning_module_state_dict()
        found = {k.removeprefix("x."): v for k, v in found.items()}
        found = {k: v for k, v in found.items() if k not in ("frozen", "offset")}
        same(found, {k: masters[k] for k in found})


STAGES = ("fit", "validate", "test", "predict")


@pytest.mark.parametrize("stage", STAGES)
def test_weights_only_is_honoured(tree: str, stage: str, tmp_path: Path) -> None:
    path = saved(tree, tmp_path / "one.ckpt")
    content = torch.load(path, weights_only=True)
    torch.save({**content, "a path": Path("somewhere")}, path)

    def run(strategy: Any, **options: Any) -> None:
        trainer = make_trainer(tree, strategy)
        getattr(trainer, stage)(make(tree, optimizer="AdamW"), ckpt_path=path, **options)

    for given in (None, True):
        with pytest.raises(Exception, match="(?i)weights.only"):
            run("gemini", weights_only=given)
    run("gemini", weights_only=False)
    # What a stage is given comes before the strategy's argument.
    run(strategy_class(tree)(checkpoint_weights_only=False))
    with pytest.raises(Exception, match="(?i)weights.only"):
        run(strategy_class(tree)(checkpoint_weights_only=False), weights_only=True)


def test_a_checkpoint_made_without_an_optimizer_starts_a_fresh_one(
    tree: str, tmp_path: Path
) -> None:
    path = tmp_path / "untrained.ckpt"
    first = make_trainer(tree)
    first.validate(make(tree, seed=4, optimizer="AdamW"), verbose=False)
    first.save_checkpoint(path)
    content = torch.load(path, weights_only=True)
    assert content["optimizer_states"] == [] == content["lr_schedulers"]
    weights = []
    for module, ckpt in (
        (make(tree, seed=5, optimizer="AdamW"), path),
        (make(tree, seed=4, optimizer="AdamW"), None),
    ):
        trainer = fit(tree, module, ckpt_path=ckpt)
        assert trainer.global_step == 11
        weights.append(trainer.strategy.lightning_module_state_dict())
    same(*weights)
