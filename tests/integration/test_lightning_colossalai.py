# The old name of the strategy: both trees know it, it is GeminiStrategy, and says so once. All 21 old arguments: an
# effect or a refusal.

import importlib
import inspect
import pickle
import typing
from typing import Any

import pytest
import torch

import gemini_strategy as gs
import gemini_strategy.lightning as adapter
from gemini_strategy.originals import strategy as alias
from lightning_case import TREES, load_fabric, load_tree, make, make_trainer

# name: the old default
OLD = {
    "use_chunk": True,
    "chunk_size": None,
    "enable_distributed_storage": True,
    "placement_policy": "auto",
    "force_outputs_fp32": False,
    "gpu_margin_mem_ratio": 0.0,
    "chunk_search_range": 64 * 1024**2,
    "chunk_search_n_grids": 4096,
    "min_chunk_size": 32 * 1024**2,
    "initial_scale": 2**16,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
    "accelerator": None,
    "parallel_devices": None,
    "cluster_environment": None,
    "checkpoint_io": None,
    "precision_plugin": None,
}
CHOSEN = {
    "gpu_margin_mem_ratio",
    "chunk_search_range",
    "chunk_search_n_grids",
    "min_chunk_size",
}


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alias, "_has_said", True)


@pytest.mark.parametrize("tree", TREES)
def test_the_trainer_knows_the_name(tree: str) -> None:
    trainer = make_trainer(tree, "colossalai")
    cls = adapter.colossalai_strategy_class(tree)
    assert type(trainer.strategy) is cls
    assert isinstance(trainer.strategy, adapter.strategy_class(tree))
    assert getattr(importlib.import_module(cls.__module__), cls.__qualname__) is cls
    assert pickle.loads(pickle.dumps(cls)) is cls
    assert "colossalai" not in load_fabric(tree).strategies.STRATEGY_REGISTRY
    with pytest.raises(ValueError, match="colossalai_strategy_class"):
        adapter.colossalai_strategy_class("fabric")


def test_a_second_import_changes_nothing() -> None:
    before = [adapter.colossalai_strategy_class(tree) for tree in TREES]
    assert importlib.reload(adapter) is adapter
    assert [adapter.colossalai_strategy_class(tree) for tree in TREES] == before
    assert adapter.ColossalAIStrategy in before


@pytest.mark.parametrize("tree", TREES)
def test_it_says_once_what_it_became(tree: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alias, "_has_said", False)
    cls = adapter.colossalai_strategy_class(tree)
    said: list[str] = []
    monkeypatch.setattr("lightning_utilities.core.rank_zero.rank_zero_info", said.append)
    make_trainer(tree, cls(placement_policy="cpu", chunk_size=4096))
    make_trainer(tree, "colossalai")
    assert len(said) == 1
    assert "has become GeminiStrategy(chunk_size=4096, placement_policy='cpu')" in said[0]


@pytest.mark.parametrize("tree", TREES)
def test_a_fit_has_the_bits_of_gemini(tree: str) -> None:
    states = []
    for strategy in ("gemini", "colossalai"):
        torch.manual_seed(0)
        module = make(tree)
        trainer = make_trainer(tree, strategy, precision="bf16-mixed")
        trainer.fit(module)
        assert trainer.global_step > 1
        states.append(trainer.strategy.engine.model_state_dict())
        trainer.strategy.engine.close()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_the_21_arguments_keep_names_and_order() -> None:
    cls = adapter.ColossalAIStrategy
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    assert [p.name for p in parameters[: len(OLD)]] == list(OLD)
    assert len(OLD) == 21
    for parameter in parameters[: len(OLD)]:
        # The old defaults keep every state off the GPU, and search whatever the budget is.
        expected = None if parameter.name in CHOSEN else OLD[parameter.name]
        assert parameter.default == expected, parameter.name
    assert set(OLD) <= set(typing.get_type_hints(cls.__init__))
    adapter.ColossalAIStrategy(*OLD.values())  # the old defaults, in the old order


def _engine(**arguments: Any) -> tuple[Any, gs.Engine]:
    trainer = make_trainer(
        "lightning", adapter.colossalai_strategy_class("lightning")(**arguments), fast_dev_run=1
    )
    trainer.fit(make("lightning"))
    return trainer, trainer.strategy.engine


@pytest.mark.parametrize(
    ("arguments", "effect"),
    [
        ({"use_chunk": True}, lambda e: e.stats()["chunks"] > 0),
        ({"chunk_size": 1024}, lambda e: e._runtime.chunk_bytes == 1024),
        ({"placement_policy": "cuda"}, lambda e: e.stats()["host_bytes"] == 0),
        ({"placement_policy": "cpu"}, lambda e: e._runtime.settings.policy == "cpu"),
        ({"gpu_margin_mem_ratio": 0.0}, lambda e: e._runtime.settings.margin == 0.0),
        (
            {"min_chunk_size": 2048, "chunk_search_range": 1024, "chunk_search_n_grids": 2},
            lambda e: e._runtime.chunk_bytes in (2048, 2560, 3072),
        ),
        ({"enable_distributed_storage": False}, lambda e: e.stats()["shards"] == 1),
    ],
)
def test_what_shapes_the_engine_has_its_effect(arguments: dict[str, Any], effect: Any) -> None:
    _, engine = _engine(**arguments)
    assert effect(engine)
    engine.close()


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("initial_scale", 4.0), ("min_scale", 2.0), ("growth_factor", 3.0),
        ("backoff_factor", 0.25), ("growth_interval", 5), ("hysteresis", 1),
        ("max_scale", 2.0**20),
    ],
)  # fmt: skip
def test_what_scales_the_loss_has_its_effect(argument: str, value: float) -> None:
    plugin = load_tree("lightning").plugins.MixedPrecision("16-mixed", "cpu")
    _, engine = _engine(**{argument: value}, precision_plugin=plugin)
    assert engine.precision == "16-mixed"
    name = "scale" if argument == "initial_scale" else argument
    found = getattr(engine.scaler, name)
    assert found == value or (argument == "initial_scale" and found <= value)
    engine.close()


def test_the_rest_of_the_arguments_has_its_effect() -> None:
    pl, fabric = load_tree("lightning"), load_fabric("lightning")
    environment = fabric.plugins.environments.LightningEnvironment()
    io = pl.plugins.TorchCheckpointIO()
    cls = adapter.colossalai_strategy_class("lightning")
    strategy = cls(
        parallel_devices=[torch.device("cpu")], cluster_environment=environment, checkpoint_io=io,
        precision_plugin=pl.plugins.HalfPrecision("bf16-true"), force_outputs_fp32=True,
    )  # fmt: skip
    trainer = make_trainer("lightning", strategy, accelerator="auto", fast_dev_run=1)
    assert trainer.strategy.cluster_environment is environment
    assert trainer.strategy.checkpoint_io is io
    assert trainer.strategy.parallel_devices == [torch.device("cpu")]
    assert trainer.precision == "bf16-true"
    trainer.fit(make("lightning"))
    assert strategy.force_outputs_fp32
    given = (torch.ones(1).bfloat16(),)
    assert strategy._outputs(lambda x: x, given, {}).dtype is torch.float32
    strategy.engine.close()
    accelerator = pl.accelerators.CPUAccelerator()
    trainer = make_trainer("lightning", cls(accelerator=accelerator), accelerator="auto")
    assert trainer.accelerator is accelerator


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_chunk": False}, "use_chunk=False.*always live in chunks"),
        ({"placement_policy": "const"}, "placement_policy='const'"),
        ({"chunk_size": 4096, "min_chunk_size": 1024}, "not both"),
        ({"gpu_margin_mem_ratio": 0.5, "placement_policy": "cpu"}, "'auto' only"),
        ({"max_scale": 0.5}, "max_scale=0.5"),
    ],
)
def test_what_cannot_be_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter.ColossalAIStrategy(**arguments)
    with pytest.raises(TypeError, match="precision_plugin="):
        adapter.ColossalAIStrategy(precision_plugin=16)


def test_means_over_ranks_are_geminis() -> None:
    """Right on every rank: test_lightning_ranks.py has what this function gives."""
    for tree in TREES:
        old, new = adapter.colossalai_strategy_class(tree), adapter.strategy_class(tree)
        assert inspect.getattr_static(old, "reduce") is inspect.getattr_static(new, "reduce")
        assert make_trainer(tree, old()).precision == "32-true"  # its own default is one it takes
