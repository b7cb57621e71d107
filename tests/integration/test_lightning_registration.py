# The names, the class per Lightning tree, and every argument: an effect or a refusal.

import copy
import importlib
import inspect
import pickle
import subprocess
import sys
import typing
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import gemini_strategy as gs
import gemini_strategy.lightning as adapter
from gemini_strategy.lightning.trees import installed_trees
from helpers import scripts
from helpers.lean import without_unused
from lightning_case import TREES, load_fabric, load_tree, make, make_trainer

ROOT = Path(__file__).resolve().parents[2]


def other(tree: str) -> str:
    return next(name for name in TREES if name != tree)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("name", "policy"),
    [("gemini", "auto"), ("GEMINI", "auto"), ("gemini_cpu", "cpu"), ("gemini_cuda", "cuda")],
)
def test_names_are_known_to_the_trainer(tree: str, name: str, policy: str) -> None:
    trainer = make_trainer(tree, name)
    assert type(trainer.strategy) is adapter.strategy_class(tree)
    assert trainer.strategy.engine_arguments["placement_policy"] == policy
    assert isinstance(trainer.strategy, load_tree(tree).strategies.ParallelStrategy)
    assert trainer.strategy.launcher is None
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.world_size == trainer.num_nodes == 1
    assert trainer.is_global_zero


def test_second_import_and_reload_change_nothing() -> None:
    before = [adapter.strategy_class(tree) for tree in TREES]
    assert importlib.reload(adapter) is adapter
    assert [adapter.strategy_class(tree) for tree in TREES] == before
    assert adapter.GeminiStrategy in before
    assert make_trainer("lightning").strategy.__class__ is before[0]


def test_each_class_can_be_imported_by_its_name() -> None:
    for tree in TREES:
        cls = adapter.strategy_class(tree)
        assert getattr(importlib.import_module(cls.__module__), cls.__qualname__) is cls


def test_preferred_class_is_of_the_tree_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ["lightning", "pytorch_lightning"]
    assert installed_trees() == both
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    assert installed_trees() == both[::-1]
    monkeypatch.delitem(sys.modules, "pytorch_lightning")
    assert installed_trees() == both


def run(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """In a process that has no Lightning yet."""
    (folder / "program.py").write_text(program)
    done = scripts.run(folder, ["program.py"], paths=[without_unused(folder), ROOT])
    assert done.returncode == 0, done.stderr
    return done


def test_only_what_is_installed_is_imported(tmp_path: Path) -> None:
    code = """
import importlib.util, sys
assert "lightning" not in sys.modules
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "lightning" else real(name, *rest)
import gemini_strategy.lightning as adapter
assert "lightning" not in sys.modules
assert adapter.GeminiStrategy is adapter.strategy_class("pytorch_lightning")
assert adapter.GeminiStrategy.__qualname__ == "GeminiStrategy"
"""
    run(tmp_path, code)


def test_unknown_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="strategy_class.*'lightning', 'pytorch_lightning'"):
        adapter.strategy_class("fabric")


@pytest.mark.parametrize("tree", TREES)
def test_a_name_of_someone_else_is_not_replaced(tree: str) -> None:
    registry = load_tree(tree).strategies.StrategyRegistry
    ours = registry["gemini"]
    registry["gemini"] = {**ours, "strategy": load_tree(tree).strategies.DDPStrategy}
    try:
        with pytest.raises(gs.GeminiError, match="'gemini' is taken"):
            adapter.strategy_class(tree)
        assert registry["gemini"]["strategy"] is load_tree(tree).strategies.DDPStrategy
    finally:
        registry["gemini"] = ours


@pytest.mark.parametrize("tree", TREES)
def test_objects_of_the_other_tree_are_refused(tree: str) -> None:
    cls, foreign = adapter.strategy_class(tree), load_tree(other(tree))
    hint = f"belongs to `{other(tree)}`.*strategy_class\\('{other(tree)}'\\)"
    for argument, value in {
        "accelerator": foreign.accelerators.CPUAccelerator(),
        "precision_plugin": foreign.plugins.MixedPrecision("bf16-mixed", "cpu"),
        "checkpoint_io": foreign.plugins.TorchCheckpointIO(),
        "cluster_environment": load_fabric(other(tree)).plugins.environments.LightningEnvironment(),
    }.items():
        with pytest.raises(TypeError, match=f"{argument}=.*{hint}"):
            cls(**{argument: value})
    # The other tree's Trainer says no by itself; our text in its message says what to do.
    with pytest.raises(ValueError, match=f"for the Trainer of `{tree}`.*strategy_class"):
        make_trainer(other(tree), cls())


def test_old_arguments_keep_names_and_order() -> None:
    expected = {
        "use_chunk": True,
        "chunk_size": None,
        "enable_distributed_storage": True,
        "placement_policy": "auto",
        "force_outputs_fp32": False,
        "gpu_margin_mem_ratio": None,
        "chunk_search_range": None,
        "chunk_search_n_grids": None,
        "min_chunk_size": None,
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
    parameters = list(inspect.signature(adapter.GeminiStrategy.__init__).parameters.values())[1:]
    assert {p.name: p.default for p in parameters[: len(expected)]} == expected
    assert [p.name for p in parameters[: len(expected)]] == list(expected)
    documented = adapter.GeminiStrategy.__doc__
    assert all(f"{p.name}: " in documented for p in parameters)


@pytest.mark.parametrize("tree", TREES)
def test_annotations_resolve_at_run_time(tree: str) -> None:
    cls = adapter.strategy_class(tree)
    hints = typing.get_type_hints(cls.__init__)
    parameters = list(inspect.signature(cls.__init__).parameters)[1:]
    assert set(parameters) <= set(hints)
    assert hints["accelerator"] == load_tree(tree).accelerators.Accelerator | None


def test_defaults_are_those_of_manage() -> None:
    manage = inspect.signature(gs.manage).parameters
    for name, value in adapter.GeminiStrategy().engine_arguments.items():
        assert manage[name].default == value, name


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("placement_policy", "cpu"),
        ("chunk_size", 4096),
        ("chunk_search_range", 8192),
        ("chunk_search_n_grids", 3),
        ("min_chunk_size", 1024),
        ("gpu_margin_mem_ratio", 0.5),
        ("device_budget", "64MiB"),
        ("host_budget", "256MiB"),
        ("gradient_dtype", torch.float32),
        ("block_size", "2MiB"),
        ("threads", 1),
        ("force_outputs_fp32", True),
        ("initial_scale", 4),
        ("min_scale", 2),
        ("growth_factor", 3),
        ("backoff_factor", 0.25),
        ("growth_interval", 5),
        ("hysteresis", 1),
        ("max_scale", 2**20),
    ],
)
def test_argument_reaches_the_engine(
    monkeypatch: pytest.MonkeyPatch, argument: str, value: object
) -> None:
    seen: dict[str, object] = {}
    manage = gs.manage

    def spy(*args: object, **arguments: object) -> object:
        seen.update(arguments)
        return manage(*args, **arguments)

    monkeypatch.setattr(gs, "manage", spy)
    trainer = make_trainer(
        "lightning", adapter.strategy_class("lightning")(**{argument: value}), fast_dev_run=1
    )
    trainer.fit(make("lightning"))
    assert seen[argument] == value
    assert seen["precision"] == "32-true"
    assert seen["device"] == torch.device("cpu")
    assert seen["convert_inputs"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_chunk": False}, "use_chunk=False.*True: parameters always live in chunks"),
        ({"chunk_size": 0}, "chunk_size=0.*positive"),
        ({"chunk_size": "big"}, "chunk_size='big'.*'64MiB'"),
        ({"enable_distributed_storage": 1}, "enable_distributed_storage=1.*True or False"),
        ({"placement_policy": "gpu"}, "placement_policy='gpu'.*'auto', 'cpu', 'cuda'"),
        ({"force_outputs_fp32": None}, "force_outputs_fp32=None"),
        ({"gpu_margin_mem_ratio": 1.5}, "gpu_margin_mem_ratio=1.5.*at least 0 and at most 1"),
        (
            {"gpu_margin_mem_ratio": 0.5, "placement_policy": "cpu"},
            "acts with placement_policy='auto' only",
        ),
        ({"chunk_search_range": -1}, "chunk_search_range=-1"),
        (
            {"chunk_size": 4096, "chunk_search_n_grids": 2},
            "chunk_size=4096, chunk_search_n_grids=2.*not both",
        ),
        ({"chunk_size": 0.5}, "chunk_size=0.5.*expected None, a positive int"),
        ({"chunk_search_n_grids": 0}, "chunk_search_n_grids=0.*at least 1"),
        ({"chunk_search_n_grids": 1.5}, "chunk_search_n_grids=1.5"),
        ({"min_chunk_size": True}, "min_chunk_size=True"),
        ({"initial_scale": 0.5}, "initial_scale=0.5.*at least 1"),
        ({"initial_scale": 2**33}, "initial_scale=.*at most 4294967296"),
        ({"min_scale": 0}, "min_scale=0.*more than 0"),
        ({"max_scale": 0.5}, "max_scale=0.5.*at least 1"),
        ({"growth_factor": 1}, "growth_factor=1.*more than 1"),
        ({"backoff_factor": 1}, "backoff_factor=1.*less than 1"),
        ({"growth_interval": 0}, "growth_interval=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
        ({"device_budget": 2.0}, "device_budget=2.0"),
        ({"host_budget": "12 apples"}, "host_budget='12 apples'"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype=torch.float16.*torch.float32"),
        ({"block_size": -2}, "block_size=-2"),
        ({"threads": 0}, "threads=0"),
        ({"timeout": "5"}, "timeout='5'.*number more than 0"),
        ({"timeout": 0}, "timeout=0.*number more than 0"),
        ({"device_mesh": (2,)}, "device_mesh=\\(2,\\).*\\(replicas, shards\\)"),
        ({"device_mesh": (0, 2)}, "device_mesh=\\(0, 2\\)"),
        ({"device_mesh": "mesh"}, "device_mesh='mesh'.*'hybrid'"),
        ({"timeout": timedelta(0)}, "timeout=.*longer than 0"),
        ({"process_group_backend": "mpi"}, "process_group_backend='mpi'.*'nccl', 'gloo'"),
        ({"checkpoint_weights_only": "no"}, "checkpoint_weights_only='no'"),
    ],
)
def test_value_is_refused_with_its_name(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter.GeminiStrategy(**arguments)


def test_wrong_types_are_refused() -> None:
    for argument in ("accelerator", "precision_plugin", "checkpoint_io", "cluster_environment"):
        with pytest.raises(
            TypeError, match=f"GeminiStrategy\\({argument}=.*expected None or an instance"
        ):
            adapter.GeminiStrategy(**{argument: object()})


def test_given_parts_are_used(tree: str) -> None:
    pl = load_tree(tree)
    environment = load_fabric(tree).plugins.environments.LightningEnvironment()
    io = pl.plugins.TorchCheckpointIO()
    strategy = adapter.strategy_class(tree)(
        parallel_devices=[torch.device("cpu")],
        cluster_environment=environment,
        checkpoint_io=io,
        precision_plugin=pl.plugins.HalfPrecision("bf16-true"),
        enable_distributed_storage=False,
        gradient_dtype="float32",
    )
    trainer = make_trainer(tree, strategy, accelerator="auto")
    assert trainer.strategy.cluster_environment is environment
    assert trainer.strategy.checkpoint_io is io
    assert trainer.precision == "bf16-true"
    assert trainer.strategy.parallel_devices == [torch.device("cpu")]
    assert strategy.engine_arguments["gradient_dtype"] is torch.float32
    accelerator = pl.accelerators.CPUAccelerator()
    trainer = make_trainer(
        tree, adapter.strategy_class(tree)(accelerator=accelerator), accelerator="auto"
    )
    assert trainer.accelerator is trainer.strategy.accelerator is accelerator


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, "32-true"),
        (32, "32-true"),
        ("bf16-true", "bf16-true"),
        ("bf16-mixed", "bf16-mixed"),
        ("bf16", "bf16-mixed"),
        ("16-mixed", "bf16-mixed"),  # Lightning's own rule for a CPU
    ],
)
def test_precision_is_translated(tree: str, precision: object, expected: str) -> None:
    trainer = make_trainer(tree, precision=precision)
    assert trainer.precision_plugin is trainer.strategy.precision_plugin
    assert type(trainer.precision_plugin).__name__ == "GeminiPrecision"
    assert isinstance(trainer.precision_plugin, load_tree(tree).plugins.Precision)
    assert trainer.precision == expected


def test_fp16_reaches_a_cpu_through_the_plugin(tree: str) -> None:
    plugin = load_tree(tree).plugins.MixedPrecision("16-mixed", "cpu")
    assert make_trainer(tree, plugins=[plugin]).precision == "16-mixed"
    assert (
        make_trainer(tree, adapter.strategy_class(tree)(precision_plugin=plugin)).precision
        == "16-mixed"
    )


@pytest.mark.parametrize("tree", TREES)
def test_other_precisions_are_refused(tree: str) -> None:
    supported = "'32-true', 'bf16-true', 'bf16-mixed', '16-mixed'"
    plugins = load_tree(tree).plugins
    with pytest.raises(ValueError, match=f"precision='16-true'. Supported.*{supported}"):
        make_trainer(tree, precision="16-true")
    with pytest.raises(TypeError, match=f"DoublePrecision. Supported.*{supported}"):
        make_trainer(tree, precision=64)

    class Mine(plugins.MixedPrecision):
        pass

    with pytest.raises(TypeError, match=f"precision plugin .*Mine. Supported.*{supported}"):
        make_trainer(tree, plugins=[Mine("bf16-mixed", "cpu")])
    with pytest.raises(TypeError, match="Mine"):
        adapter.strategy_class(tree)(precision_plugin=Mine("bf16-mixed", "cpu"))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(ValueError, match="GeminiStrategy\\(initial_scale="):
        make_trainer(tree, plugins=[plugins.MixedPrecision("16-mixed", "cpu", scaler)])


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def elastic(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, object]:
    return {
        "TORCHELASTIC_RUN_ID": 1,
        "WORLD_SIZE": size,
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "GROUP_RANK": rank // local_size,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }


def ranks_of(trainer: typing.Any) -> tuple[object, ...]:
    strategy = trainer.strategy
    return (
        trainer.world_size,
        trainer.global_rank,
        trainer.local_rank,
        trainer.node_rank,
        trainer.num_nodes,
        strategy.num_processes,
        strategy.distributed_sampler_kwargs,
    )


@pytest.fixture
def rank_of_zero() -> typing.Iterator[None]:
    """Constructing a Trainer of several devices tells Lightning which rank this process is."""
    from lightning_utilities.core.rank_zero import rank_zero_only

    before = rank_zero_only.rank
    yield
    rank_zero_only.rank = before
    for tree in TREES:
        load_tree(tree).utilities.rank_zero.rank_zero_only.rank = before


def test_several_devices_are_launched(
    tree: str, monkeypatch: pytest.MonkeyPatch, rank_of_zero: None
) -> None:
    launchers = load_tree(tree).strategies.launchers
    trainer = make_trainer(tree, devices=3, num_nodes=2)
    assert ranks_of(trainer) == (6, 0, 0, 0, 2, 3, {"num_replicas": 6, "rank": 0})
    assert type(trainer.strategy.launcher) is launchers._SubprocessScriptLauncher
    assert trainer.strategy.is_distributed and trainer.strategy.is_global_zero
    assert trainer.strategy.root_device == torch.device("cpu")
    set_environment(monkeypatch, LOCAL_RANK=2, NODE_RANK=1)
    trainer = make_trainer(tree, devices=3, num_nodes=2)
    assert ranks_of(trainer) == (6, 5, 2, 1, 2, 3, {"num_replicas": 6, "rank": 5})
    assert not trainer.is_global_zero
    # One device needs nobody, also in a process that has been rank 5 of another Trainer's.
    trainer = make_trainer(tree)
    assert trainer.strategy.launcher is None and not trainer.strategy.is_distributed
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.world_size == 1


def test_ranks_of_torchrun_and_slurm(
    tree: str, monkeypatch: pytest.MonkeyPatch, rank_of_zero: None
) -> None:
    environments = load_fabric(tree).plugins.environments
    with monkeypatch.context() as patch:
        set_environment(patch, **elastic(rank=3, size=4, local_rank=1, local_size=2))
        trainer = make_trainer(tree, devices=2, num_nodes=2)
        assert type(trainer.strategy.cluster_environment) is environments.TorchElasticEnvironment
        assert ranks_of(trainer) == (4, 3, 1, 1, 2, 2, {"num_replicas": 4, "rank": 3})
        error = load_tree(tree).utilities.exceptions.MisconfigurationException
        for options in ({}, {"devices": 2}, {"num_nodes": 2}):
            with pytest.raises(error, match="TorchElasticEnvironment reports 4"):
                make_trainer(tree, **options)
    with monkeypatch.context() as patch:
        set_environment(
            patch,
            SLURM_JOB_ID=1,
            SLURM_JOB_NAME="train",
            SLURM_NTASKS=4,
            SLURM_NTASKS_PER_NODE=2,
            SLURM_PROCID=2,
            SLURM_LOCALID=0,
            SLURM_NODEID=1,
        )
        trainer = make_trainer(tree, devices=2, num_nodes=2)
        assert type(trainer.strategy.cluster_environment) is environments.SLURMEnvironment
        assert ranks_of(trainer) == (4, 2, 0, 1, 2, 2, {"num_replicas": 4, "rank": 2})


@pytest.mark.parametrize("auto_requeue", [False, True])
def test_an_environment_of_slurm_outside_of_slurm(tree: str, auto_requeue: bool) -> None:
    """One process needs nobody to say which it is; several do."""
    environment = load_fabric(tree).plugins.environments.SLURMEnvironment(auto_requeue)
    trainer = make_trainer(tree, plugins=[environment])
    trainer.fit(_tiny(tree)())
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (
        (1, 0, 0, 0)
    )
    with pytest.raises(KeyError, match="SLURM"):
        make_trainer(tree, devices=2, plugins=[environment])


def test_a_rank_has_the_device_that_was_given(
    tree: str, monkeypatch: pytest.MonkeyPatch, rank_of_zero: None
) -> None:
    pl = load_tree(tree)
    devices = [torch.device("cuda", 1), torch.device("cuda", 3)]
    environment = load_fabric(tree).plugins.environments.LightningEnvironment
    for rank in (0, 1):
        set_environment(monkeypatch, LOCAL_RANK=rank)
        strategy = adapter.strategy_class(tree)(
            accelerator=pl.accelerators.CUDAAccelerator(),
            parallel_devices=devices,
            cluster_environment=environment(),
        )
        strategy.set_world_ranks()
        assert strategy.root_device == devices[rank]
        assert (strategy.global_rank, strategy.world_size) == (rank, 2)


def test_mesh_must_fit_the_devices(tree: str, rank_of_zero: None) -> None:
    error = load_tree(tree).utilities.exceptions.MisconfigurationException
    cls = adapter.strategy_class(tree)
    with pytest.raises(error, match=r"device_mesh=\(2, 3\)\): 2 replicas of 3 .* Trainer has 4"):
        make_trainer(tree, cls(device_mesh=(2, 3)), devices=4)
    assert make_trainer(tree, cls(device_mesh=[2, 2]), devices=4).world_size == 4
    hybrid = make_trainer(tree, "gemini_hybrid", devices=2, num_nodes=2)
    assert hybrid.strategy.device_mesh == "hybrid"
    with pytest.raises(ValueError, match="enable_distributed_storage=False, device_mesh"):
        cls(device_mesh=(2, 2), enable_distributed_storage=False)


def test_timeout_is_a_timedelta_or_seconds() -> None:
    assert adapter.GeminiStrategy().timeout == timedelta(seconds=300)
    assert adapter.GeminiStrategy(timeout=2.5).timeout == timedelta(seconds=2.5)
    assert adapter.GeminiStrategy(timeout=timedelta(minutes=1)).timeout == timedelta(minutes=1)


def test_other_accelerators_are_refused(tree: str) -> None:
    pl = load_tree(tree)
    error = pl.utilities.exceptions.MisconfigurationException

    class Elsewhere(pl.accelerators.CPUAccelerator.__mro__[1]):
        setup_device = teardown = lambda *_: None
        parse_devices = staticmethod(lambda devices: devices)
        get_parallel_devices = staticmethod(lambda devices: [torch.device("cpu")])
        auto_device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        name = staticmethod(lambda: "elsewhere")

    for accelerator in (
        Elsewhere(),
        pl.accelerators.MPSAccelerator.__new__(pl.accelerators.MPSAccelerator),
    ):
        with pytest.raises(error, match=f"does not run on {type(accelerator).__name__}. Supported"):
            adapter.strategy_class(tree)(accelerator=accelerator)
    with pytest.raises(error, match="does not run on Elsewhere"):
        make_trainer(tree, accelerator=Elsewhere())


def test_collectives_of_one_rank(tree: str) -> None:
    strategy = make_trainer(tree).strategy
    tensor = torch.arange(3.0)
    for operation in ("mean", "sum", None):
        assert strategy.reduce(tensor, reduce_op=operation) is tensor
    assert strategy.reduce("text") == "text"
    assert strategy.all_gather(tensor, sync_grads=True) is tensor
    assert strategy.broadcast({"a": [1]}) == {"a": [1]}
    assert strategy.barrier("name") is None
    assert strategy.reduce_boolean_decision(True) is True
    assert strategy.reduce_boolean_decision(False, all=False) is False
    assert not strategy.is_distributed
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}


def test_a_trainer_of_several_talks_to_itself_before_its_first_stage(
    tree: str, rank_of_zero: None
) -> None:
    trainer = make_trainer(tree, devices=2)
    strategy = trainer.strategy
    assert trainer.log_dir == str(trainer.default_root_dir)  # Lightning broadcasts it
    assert strategy.broadcast("x", 1) == "x" and strategy.reduce(3) == 3
    assert strategy.reduce_boolean_decision(False, all=False) is False
    strategy.barrier("early")
    assert copy.deepcopy(strategy).num_processes == 2


def test_plugin_can_be_copied_while_an_engine_is_attached(tree: str) -> None:
    trainer = make_trainer(tree, precision="bf16-mixed", fast_dev_run=1)
    trainer.fit(make(tree))
    duplicate = copy.deepcopy(trainer.precision_plugin)
    assert duplicate.precision == "bf16-mixed"
    assert duplicate.state_dict() == {}


def _tiny(tree: str) -> type:
    """A class that pickle finds by its name."""

    class Tiny(load_tree(tree).LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.body(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> DataLoader:
            return DataLoader(torch.ones(8, 4), batch_size=2)

    Tiny.__qualname__ = f"Tiny_{tree}"
    return globals().setdefault(Tiny.__qualname__, Tiny)


@pytest.mark.parametrize("tree", TREES)
def test_a_trainer_can_be_pickled(tree: str) -> None:
    """Before a stage and after it; what comes back is ordinary, and fits on."""
    trainer = make_trainer(tree, adapter.strategy_class(tree)(placement_policy="cpu"))
    assert type(pickle.loads(pickle.dumps(trainer)).strategy) is adapter.strategy_class(tree)
    module = _tiny(tree)()
    trainer.fit(module)
    again = pickle.loads(pickle.dumps(trainer))
    assert type(again.strategy.precision_plugin) is type(trainer.strategy.precision_plugin)
    assert type(again.optimizers[0]) is torch.optim.AdamW
    state = trainer.optimizers[0].state_dict()["state"]
    for index, entry in again.optimizers[0].state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"], state[index]["exp_avg"])
    for name, value in module.state_dict().items():
        assert torch.equal(again.lightning_module.state_dict()[name], value), name
    again.fit_loop.max_epochs += 1
    again.fit(again.lightning_module)
    assert again.strategy.engine is not trainer.strategy.engine


@pytest.mark.parametrize(
    ("first", "log"),
    [
        ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"),
        ("pytorch_lightning", "pytorch_lightning.utilities.rank_zero"),
        ("sys", "lightning.pytorch.utilities.rank_zero"),
    ],
)
def test_lightnings_messages_go_where_they_went(first: str, log: str, tmp_path: Path) -> None:
    program = (
        "import sys; assert not {'lightning', 'pytorch_lightning', 'lightning_utilities'} & sys.modules.keys()\n"
        f"import {first}, gemini_strategy.lightning\n"
        "from lightning_utilities.core import rank_zero\n"
        "import lightning.pytorch, pytorch_lightning\n"
        "print(rank_zero.log.name)"
    )
    done = run(tmp_path, program)
    assert done.stdout.split()[-1] == log
