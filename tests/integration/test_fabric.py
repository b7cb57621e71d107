# Fabric: the bits of a managed loop and of Fabric's own single device, and every call of Fabric served or refused.

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gemini_strategy as gs
import gemini_strategy.lightning as adapter
from fabric_case import (
    STEPS,
    Net,
    batch,
    close,
    hybrid_adam,
    loss_of,
    make_fabric,
    managed_loop,
    net,
    single_device,
    state_of,
    train,
)
from lightning_case import (
    PRECISIONS,
    TREES,
    cast_reference,
    load_fabric,
    load_tree,
    reference_weights,
    same,
    same_adam,
)

# ---- training ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_are_those_of_a_managed_loop_and_of_a_single_device(tree: str, precision: str) -> None:
    plain = net()
    cast_reference(plain, precision)
    own = single_device(tree, precision)
    wrapped, optimizer = own.setup(plain, hybrid_adam(plain))
    expected = train(own, wrapped, optimizer)
    loop, losses = managed_loop(precision)
    assert losses == expected

    strategy = adapter.fabric_strategy_class(tree)(chunk_size=2048, placement_policy="cpu")
    for chosen in ("gemini", "gemini_cpu", strategy):
        fabric = make_fabric(tree, chosen, precision=precision)
        module = net()
        model, optimizer_of_model = fabric.setup(module, hybrid_adam(module))
        assert train(fabric, model, optimizer_of_model) == expected
        state = state_of(model)
        same(state, loop.state_dict(), "the managed loop")
        same(state["model"], reference_weights(plain, optimizer), "the single device")
        same_adam(state["optimizer"], optimizer.optimizer.state_dict())
        close(model)
    loop.close()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("name", ["SGD", "Adafactor", "RMSprop"])
def test_an_optimizer_that_is_not_adam(name: str, precision: str, tree: str) -> None:
    """The bits of Fabric's own single device."""

    def run(fabric: Any, module: Net) -> tuple[list[float], dict[str, Tensor]]:
        given = {"momentum": 0.9} if name == "SGD" else {}
        trained = [p for p in module.parameters() if p.requires_grad]
        model, optimizer = fabric.setup(module, getattr(torch.optim, name)(trained, 1e-2, **given))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        losses = []
        for first in range(0, STEPS, 2):
            losses += train(fabric, model, optimizer, steps=2, first=first)
            scheduler.step()
        engine = gs.engine_of(module)
        if engine is not None:
            engine.close()
        return losses, {key: value.clone() for key, value in module.state_dict().items()}

    plain = net()
    cast_reference(plain, precision)
    expected = run(single_device(tree, precision), plain)
    losses, state = run(make_fabric(tree, precision=precision), net())
    assert losses == expected[0]
    for key, value in expected[1].items():
        assert torch.equal(state[key].to(value.dtype), value), key


@pytest.mark.parametrize("precision", [*PRECISIONS, "16-mixed"])
def test_accumulation_without_sync_is_accumulation(precision: str) -> None:
    loop, losses = managed_loop(precision, accumulate=3)
    fabric = make_fabric(precision=precision)
    module = net()
    model, optimizer = fabric.setup(module, hybrid_adam(module))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a strategy that cannot skip the sync would warn
        assert train(fabric, model, optimizer, accumulate=3) == losses
    same(state_of(model), loop.state_dict())
    close(model)
    loop.close()


@pytest.mark.parametrize("precision", [*PRECISIONS, "16-mixed"])
def test_clipping_by_norm_returns_the_norm_before(precision: str) -> None:
    expected: list[Tensor] = []
    loop, losses = managed_loop(
        precision, clip=lambda engine: expected.append(engine.clip_grad_norm_(0.05))
    )
    fabric = make_fabric(precision=precision)
    module = net()
    model, optimizer = fabric.setup(module, hybrid_adam(module))
    norms: list[Tensor] = []
    clip = lambda model, optimizer: norms.append(  # noqa: E731
        fabric.clip_gradients(model, optimizer, max_norm=0.05, error_if_nonfinite=False)
    )
    assert train(fabric, model, optimizer, clip=clip) == losses
    same(norms, expected)
    assert all(norm > 0.05 for norm in norms)
    same(state_of(model), loop.state_dict())
    close(model)
    loop.close()


def test_clipping_by_value_is_that_of_a_single_device() -> None:
    def run(fabric: Any, is_managed: bool) -> Any:
        module = net()
        model, optimizer = fabric.setup(module, hybrid_adam(module))
        clip = lambda *both: fabric.clip_gradients(*both, clip_val=1e-3)  # noqa: E731
        losses = train(fabric, model, optimizer, clip=clip)
        assert losses != train_unclipped
        return losses, dict(fabric.strategy.get_module_state_dict(model._forward_module))

    fabric = make_fabric()
    module = net()
    train_unclipped = train(fabric, *fabric.setup(module, hybrid_adam(module)))
    own = run(single_device("lightning", "32-true"), False)
    same(run(fabric, True), own)


def test_a_norm_that_is_not_finite_is_raised_before_anything_changes() -> None:
    fabric = make_fabric()
    module = net()
    model, optimizer = fabric.setup(module, hybrid_adam(module))
    train(fabric, model, optimizer, steps=1)
    before = state_of(model)
    fabric.backward(model(batch(0)).sum() * float("inf"))
    gradient = module.gain.grad.clone().view(torch.int32)
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    same(state_of(model), before)
    assert torch.equal(module.gain.grad.clone().view(torch.int32), gradient)
    norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
    assert not norm.isfinite()
    with pytest.raises(ValueError, match="norm_type=1.*2-norm is supported"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1)
    optimizer.zero_grad()
    assert train(fabric, model, optimizer, steps=1, first=1)
    close(model)


def test_fp16_scales_the_loss_and_skips_overflows() -> None:
    strategy = adapter.fabric_strategy_class("lightning")(initial_scale=64.0, hysteresis=1)
    fabric = make_fabric(strategy=strategy, precision="16-mixed")
    module = net()
    model, optimizer = fabric.setup(module, hybrid_adam(module))
    engine = gs.engine_of(model)
    loop, losses = managed_loop("16-mixed", initial_scale=64.0, hysteresis=1)
    assert train(fabric, model, optimizer) == losses
    same(state_of(model), loop.state_dict())
    assert engine.stats()["steps"] == STEPS
    before = state_of(model)
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward\(loss\)`"):
        model(batch(0)).sum().backward()
    fabric.backward(model(batch(0)).sum() * 1e30)
    optimizer.step()
    optimizer.zero_grad()
    after = state_of(model)
    assert engine.stats()["skipped_steps"] == 1
    assert after.pop("scaler")["scale"] == before.pop("scaler")["scale"] / 2
    same(after, before)
    close(model)
    loop.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_plain_backward_is_taken_where_nothing_is_scaled(precision: str) -> None:
    fabric = make_fabric(precision=precision)
    loop, losses = managed_loop(precision)
    module = net()
    model, optimizer = fabric.setup(module, hybrid_adam(module))
    assert train(fabric, model, optimizer, backward=Tensor.backward) == losses
    close(model)
    loop.close()


def test_updates_may_run_inside_a_backward() -> None:
    fabric = make_fabric(precision="bf16-true")
    loop, losses = managed_loop("bf16-true")
    module = net()
    model, optimizer = fabric.setup(module, hybrid_adam(module))

    def backward(loss: Tensor) -> None:
        with gs.engine_of(model).ends_step():
            fabric.backward(loss)

    assert train(fabric, model, optimizer, backward=backward) == losses
    same(state_of(model), loop.state_dict())
    close(model)
    loop.close()


@pytest.mark.parametrize("precision", [*PRECISIONS, "16-mixed"])
def test_inputs_and_outputs_are_cast_as_by_fabrics_own(precision: str) -> None:
    class Seen(nn.Linear):
        def forward(self, x: Tensor, more: Any) -> Any:
            self.seen = [x.dtype, more["scale"].dtype, more["index"].dtype]
            return super().forward(x), {"half": x.half(), "index": more["index"]}

    def dtypes(fabric: Any) -> Any:
        module = Seen(4, 2)
        model = fabric.setup(module)
        more = {"scale": torch.ones(1, dtype=torch.float64), "index": torch.ones(1).long()}
        output, rest = model(torch.ones(3, 4), more)
        return module.seen, output.dtype, rest["half"].dtype, rest["index"].dtype

    assert dtypes(make_fabric(precision=precision)) == dtypes(single_device("lightning", precision))


# ---- setting up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [*PRECISIONS, "16-mixed"])
def test_module_first_and_optimizer_afterwards_are_both_together(precision: str) -> None:
    loop, losses = managed_loop(precision)
    fabric = make_fabric(precision=precision)
    module = net()
    model = fabric.setup_module(module)
    with torch.no_grad():
        model(batch(0))  # evaluation comes first
    optimizer = fabric.setup_optimizers(hybrid_adam(model))
    assert train(fabric, model, optimizer) == losses
    same(state_of(model), loop.state_dict())
    close(model)
    loop.close()


def test_what_cannot_be_set_up_is_refused_by_name() -> None:
    error = load_fabric("lightning").utilities.exceptions.MisconfigurationException
    fabric = make_fabric(precision="bf16-true")
    module = net()
    with pytest.raises(error, match="exactly one optimizer; fabric.setup.. got Adam, AdamW"):
        fabric.setup(
            module, torch.optim.Adam(module.parameters()), torch.optim.AdamW(module.parameters())
        )
    with pytest.raises(gs.GeminiError, match=r"step\(\) of LBFGS needs 'closure'"):
        fabric.setup(module, torch.optim.LBFGS(module.parameters()))
    assert gs.engine_of(module) is None
    with pytest.raises(RuntimeError, match=r"Set up the model first.*fabric.setup\(model, opt"):
        fabric.setup_optimizers(torch.optim.AdamW(module.parameters()))
    model, _ = fabric.setup(module, hybrid_adam(module))
    other = fabric.setup_module(net(1))
    both = [*model.parameters(), *other.parameters()]
    with pytest.raises(RuntimeError, match="over parameters of one model"):
        fabric.setup_optimizers(torch.optim.AdamW(both))
    with pytest.raises(error, match="exactly one optimizer, and Net has one"):
        fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    with pytest.raises(gs.GeminiError, match="Sequential has parameters that an engine of Net"):
        fabric.setup_module(module.body)
    came = gs.engine_of(other).model_state_dict()["frozen"]
    other.frozen.requires_grad_(True)
    fabric.setup_optimizers(torch.optim.AdamW(other.parameters()))  # from the values it came with
    assert torch.equal(gs.engine_of(other).model_state_dict()["frozen"], came)
    close(model, other)
    engine = gs.manage(module, None, device="cpu")
    with pytest.raises(gs.GeminiError, match="call .*close.. first"):
        fabric.setup_module(module)
    engine.close()


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_model_is_set_up_again_with_what_it_had(precision: str) -> None:
    loop, losses = managed_loop(precision)
    fabric = make_fabric(precision=precision)
    module = net()
    plain = hybrid_adam(module)
    found = train(fabric, *fabric.setup(module, plain), steps=3)
    model, optimizer = fabric.setup(module, plain)
    found += train(fabric, model, optimizer, steps=3, first=3)
    assert found == losses
    same(state_of(model), loop.state_dict())
    assert model.module is module
    close(model)
    loop.close()


def test_a_model_without_memory_gets_values_of_a_file(tmp_path: Path) -> None:
    fabric = make_fabric()
    torch.save({"model": net(5).state_dict()}, tmp_path / "five.pt")
    with fabric.init_module(empty_init=True):
        blank = Net()
    assert blank.gain.is_meta
    with fabric.init_module():
        assert not Net().gain.is_meta
    with pytest.warns(UserWarning, match="no reset_parameters.*uninitialised.*: Net"):
        model = fabric.setup_module(blank)
    fabric.load(tmp_path / "five.pt", {"model": model})
    optimizer = fabric.setup_optimizers(hybrid_adam(model))
    same(dict(gs.engine_of(model).model_state_dict()), dict(net(5).state_dict()))
    assert train(fabric, model, optimizer, steps=1)
    close(model)


def test_models_without_parameters_are_moved_and_called() -> None:
    fabric = make_fabric(precision="bf16-true")
    loss = fabric.setup(nn.MSELoss())
    assert loss(torch.ones(2), torch.zeros(2)) == 1.0
    module = nn.BatchNorm1d(3, affine=False)
    assert fabric.to_device(module) is module


def test_two_models_train_beside_each_other() -> None:
    def play(fabric: Any) -> Any:
        torch.manual_seed(0)
        maker, judge = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        maker, maker_optimizer = fabric.setup(maker, gs.HybridAdam(maker.parameters(), lr=1e-2))
        judge, judge_optimizer = fabric.setup(judge, gs.HybridAdam(judge.parameters(), lr=1e-2))
        losses = []
        for step in range(4):
            noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
            for optimizer, sign in ((judge_optimizer, 1.0), (maker_optimizer, -1.0)):
                maker_optimizer.zero_grad()
                judge_optimizer.zero_grad()
                loss = sign * judge(maker(noise)).sigmoid().mean()
                fabric.backward(loss)
                optimizer.step()
                losses.append(float(loss.detach()))
        state = {"maker": maker, "judge": judge, "optimizer": maker_optimizer}
        return losses, state

    fabric = make_fabric()
    losses, state = play(fabric)
    expected, own = play(single_device("lightning", "32-true"))
    assert losses == expected
    for name in ("maker", "judge"):
        same(dict(gs.engine_of(state[name]).model_state_dict()), dict(own[name].state_dict()))
    close(state["maker"], state["judge"])

    fabric = make_fabric(precision="16-mixed")
    with pytest.raises(gs.GeminiError, match="2 models are trained in '16-mixed'.*model=model"):
        play(fabric)


def test_each_model_in_fp16_has_its_own_scale() -> None:
    fabric = make_fabric(precision="16-mixed")
    loop, losses = managed_loop("16-mixed")
    models = [fabric.setup(module, hybrid_adam(module)) for module in (net(), net())]
    for model, optimizer in models:
        backward = lambda loss: fabric.backward(loss, model=model)  # noqa: B023, E731
        assert train(fabric, model, optimizer, backward=backward) == losses
        same(state_of(model), loop.state_dict())
    close(*(model for model, _ in models))
    loop.close()


# ---- Fabric's own calls --------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_steps_of_a_lightning_module_go_through_forward(precision: str) -> None:
    pl = load_tree("lightning")

    class Stepped(Net, pl.LightningModule):
        def training_step(self, tokens: Tensor) -> Tensor:
            self.kinds = torch.is_autocast_enabled("cpu"), self.dtype, self.device
            return loss_of(self(tokens), tokens)

        def scored(self, tokens: Tensor) -> Tensor:
            return self.training_step(tokens)

    def stepped(fabric: Any, is_managed: bool) -> list[float]:
        torch.manual_seed(0)
        module = Stepped()
        if not is_managed:
            cast_reference(module, precision)
        model, optimizer = fabric.setup(module, hybrid_adam(module))
        losses = []
        for step in range(STEPS):
            torch.manual_seed(100 + step)
            if is_managed:
                loss = (model.training_step if step % 2 else model.scored)(batch(step))
                kinds = (precision == "bf16-mixed", torch.float32, torch.device("cpu"))
                assert module.kinds == kinds
            else:
                loss = loss_of(model(batch(step)), batch(step))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    fabric = make_fabric(precision=precision)
    with pytest.raises(RuntimeError, match=r"mark_forward_method\('scored'\)"):
        stepped(fabric, True)
    mark = Stepped.__init__

    def marked(self: Any, *args: Any) -> None:
        mark(self, *args)

    setup = fabric.setup

    def setup_and_mark(*args: Any) -> Any:
        model, optimizer = setup(*args)
        model.mark_forward_method("scored")
        return model, optimizer

    fabric.setup = setup_and_mark
    assert stepped(fabric, True) == stepped(single_device("lightning", precision), False)


def test_launch_call_and_callbacks(tree: str) -> None:
    said: list[Any] = []

    class Listener:
        def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
            said.append((type(strategy), optimizer))

        def on_after_setup(self, fabric: Any, module: Any) -> None:
            said.append(module)

        def on_mine(self, value: int) -> None:
            said.append(value)

    fabric = load_fabric(tree).Fabric(
        strategy="gemini", accelerator="cpu", devices=1, callbacks=[Listener()]
    )
    module = net()
    plain = hybrid_adam(module)
    with pytest.raises(RuntimeError, match="you must call `.launch"):
        fabric.setup(module, plain)

    def program(fabric: Any, number: int) -> int:
        model, optimizer = fabric.setup(module, plain)
        train(fabric, model, optimizer, steps=1)
        fabric.call("on_mine", value=number)
        assert said == [model, (adapter.fabric_strategy_class(tree), plain), number]
        return number + 1

    assert fabric.launch(program, 7) == 8
    close(module)


def test_schedulers_and_closures_are_served() -> None:
    def run(fabric: Any) -> Any:
        module = net()
        plain = hybrid_adam(module)
        scheduler = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.1)
        model, optimizer, scheduler = fabric.setup(module, plain, scheduler=scheduler)
        losses = []
        for step in range(STEPS):
            torch.manual_seed(step)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model(batch(step)), batch(step))  # noqa: B023
                fabric.backward(loss)
                return loss

            losses.append(float(optimizer.step(closure)))
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
        return losses

    assert run(make_fabric()) == run(single_device("lightning", "32-true"))


def test_one_device_keeps_the_sampler_and_talks_to_itself() -> None:
    fabric = make_fabric()
    loader = DataLoader(list(range(6)), batch_size=2, shuffle=True)
    assert fabric.setup_dataloaders(loader).sampler is loader.sampler
    value = torch.tensor([1.0, 2.0])
    assert fabric.all_reduce(value) is value and fabric.all_gather(value) is value
    assert fabric.broadcast("told") == "told"
    fabric.barrier()
    assert fabric.strategy.reduce_boolean_decision(True)
    assert fabric.world_size == 1 and fabric.strategy.launcher is None


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_blocks_stay_compiled_and_a_compiled_model_is_refused(backend: str) -> None:
    torch._dynamo.reset()

    def run(fabric: Any) -> list[float]:
        module = net()
        module.body = torch.compile(module.body, backend=backend)
        return train(fabric, *fabric.setup(module, hybrid_adam(module)), steps=3)

    fabric = make_fabric()
    assert run(fabric) == run(single_device("lightning", "32-true"))
    module = net()
    optimizer = hybrid_adam(module)
    with pytest.raises(gs.GuardError, match="compile modules before"):
        fabric.setup(torch.compile(module, backend=backend), optimizer)
    # Compiled as one unit, it is served.
    torch._dynamo.reset()
    module = torch.compile(net(), backend=backend)
    model, optimizer = fabric.setup(module, hybrid_adam(module), _reapply_compile=False)
    own = train(make := single_device("lightning", "32-true"), *compiled(make, backend), steps=3)
    assert train(fabric, model, optimizer, steps=3) == own


def compiled(fabric: Any, backend: str) -> Any:
    module = torch.compile(net(), backend=backend)
    return fabric.setup(module, hybrid_adam(module))


# ---- names, arguments, precisions ----------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(
    ("name", "policy"),
    [("gemini", "auto"), ("GEMINI", "auto"), ("gemini_cpu", "cpu"), ("gemini_cuda", "cuda")],
)
def test_names_are_known_to_fabric(tree: str, name: str, policy: str) -> None:
    fabric = make_fabric(tree, name)
    assert type(fabric.strategy) is adapter.fabric_strategy_class(tree)
    assert isinstance(fabric.strategy, load_fabric(tree).strategies.ParallelStrategy)
    assert fabric.strategy.engine_arguments["placement_policy"] == policy
    cls = adapter.fabric_strategy_class(tree)
    assert getattr(adapter, cls.__qualname__) is cls and cls.__module__ == adapter.__name__
    assert make_fabric(tree, "gemini_hybrid").strategy.device_mesh == "hybrid"


@pytest.mark.parametrize("tree", TREES)
def test_a_strategy_of_another_kind_is_refused(tree: str) -> None:
    other = next(name for name in TREES if name != tree)
    strategy = adapter.fabric_strategy_class(tree)()
    with pytest.raises(ValueError, match=f"for the Fabric of `{tree}`.*fabric_strategy_class"):
        make_fabric(other, strategy)
    with pytest.raises(ValueError, match="for the Trainer of .*for Fabric fabric_strategy_class"):
        make_fabric(tree, adapter.strategy_class(tree)())
    with pytest.raises(ValueError, match="for a Trainer strategy_class"):
        load_tree(tree).Trainer(strategy=strategy, accelerator="cpu")
    foreign = load_fabric(other).plugins
    with pytest.raises(TypeError, match=rf"GeminiFabricStrategy\(precision=.*belongs to `{other}`"):
        adapter.fabric_strategy_class(tree)(precision=foreign.MixedPrecision("bf16-mixed", "cpu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, r"GeminiFabricStrategy\(chunk_size=0.*positive"),
        ({"placement_policy": "gpu"}, "placement_policy='gpu'"),
        ({"timeout": 0}, "timeout=0.*number more than 0"),
        ({"device_mesh": (0, 2)}, r"device_mesh=\(0, 2\)"),
        ({"process_group_backend": "mpi"}, "process_group_backend='mpi'"),
        ({"device_mesh": (1, 2), "enable_distributed_storage": False}, "give one of the two"),
        ({"gradient_dtype": torch.float16}, "gradient_dtype=torch.float16"),
    ],
)
def test_an_argument_is_refused_with_its_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter.GeminiFabricStrategy(**arguments)


@pytest.mark.parametrize("argument", ["update_schedule", "precision_plugin", "use_chunk"])
def test_arguments_of_the_trainer_alone_are_refused(argument: str) -> None:
    with pytest.raises(TypeError, match=argument):
        adapter.GeminiFabricStrategy(**{argument: None})


def test_arguments_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    manage = gs.manage

    def spy(*args: Any, **arguments: Any) -> Any:
        seen.update(arguments)
        return manage(*args, **arguments)

    monkeypatch.setattr(gs, "manage", spy)
    given = {
        "chunk_size": 4096,
        "gpu_margin_mem_ratio": 0.5,
        "device_budget": "64MiB",
        "host_budget": "256MiB",
        "gradient_dtype": torch.float32,
        "block_size": "2MiB",
        "threads": 1,
        "initial_scale": 4,
        "min_scale": 2,
        "growth_factor": 3,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "hysteresis": 1,
        "max_scale": 2**20,
        "missing": "init",
        "report": False,
    }
    fabric = make_fabric(strategy=adapter.fabric_strategy_class("lightning")(**given))
    module = net()
    model = fabric.setup_module(module)
    assert {name: seen[name] for name in given} == given
    assert seen["precision"] == "32-true" and seen["convert_inputs"] is False
    close(model)


def test_precisions_are_translated_or_refused(tree: str) -> None:
    for precision, expected in (
        (None, "32-true"),
        ("bf16-true", "bf16-true"),
        ("bf16-mixed", "bf16-mixed"),
    ):
        plugin = make_fabric(tree, precision=precision)._precision
        assert type(plugin).__name__ == "GeminiFabricPrecision"
        assert plugin.precision == expected
    assert make_fabric(tree, precision="16-mixed")._precision.precision == "16-mixed"
    with pytest.raises(ValueError, match=r"precision='16-true'. Supported: Fabric\(precision"):
        make_fabric(tree, precision="16-true")
    with pytest.raises(TypeError, match="DoublePrecision. Supported"):
        make_fabric(tree, precision="64-true")
    fabric = make_fabric(tree, precision="bf16-true")
    with fabric.init_tensor():
        assert torch.ones(1).dtype is torch.bfloat16
    with fabric.init_module():
        assert nn.Linear(1, 1).weight.dtype is torch.float32
    with fabric.autocast():
        assert torch.ones(1).dtype is torch.bfloat16
    assert torch.get_default_dtype() is torch.float32
