"""A plain accelerate loop under a budget: the bits of the same loop by hand, states, and what is refused."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    ProjectConfiguration,
)
from torch import nn

import gemini_strategy as gs
from gemini_strategy.huggingface import GeminiAccelerator, GeminiOptimizer, GeminiPlugin
from huggingface_case import assert_same, make_model, plugin, rows

CLIP = 0.7


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    """accelerate keeps one state per process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset() -> None:
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._reset_state()

    reset()
    yield
    reset()


def make(**given: Any) -> GeminiAccelerator:
    return GeminiAccelerator(cpu=True, gemini_plugin=plugin(), **given)


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(rows(16), batch_size=2)


def pieces(model: nn.Module, kind: type = torch.optim.AdamW) -> tuple[Any, Any]:
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)


def train(
    accelerator: Any, model: Any, optimizer: Any, scheduler: Any, batches: Any
) -> list[float]:
    norms = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms


def by_hand(precision: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same loop without accelerate and without an engine."""
    model = gs.cast_model_(make_model(), precision)
    optimizer, scheduler = pieces(model, gs.HybridAdam)
    norms = []
    torch.manual_seed(5)
    for number, batch in enumerate(loader()):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = model(**batch).loss
        (loss.float() / 2).backward()
        if number % 2:
            norms.append(float(optimizer.clip_grad_norm_(CLIP)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return {n: p.detach().clone() for n, p in model.named_parameters()}, norms


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_the_bits_of_a_loop_by_hand(mixed: str) -> None:
    precision = {"no": "32-true", "bf16": "bf16-mixed"}[mixed]
    weights, norms = by_hand(precision)
    accelerator = make(mixed_precision=mixed, gradient_accumulation_steps=2)
    model = make_model()
    optimizer, scheduler = pieces(model)
    prepared = accelerator.prepare(model, optimizer, scheduler, loader())
    assert prepared[0] is model
    assert isinstance(prepared[1], GeminiOptimizer)
    assert prepared[1].optimizer is optimizer
    torch.manual_seed(5)
    assert train(accelerator, *prepared) == norms
    engine = gs.engine_of(model)
    assert_same(engine.model_state_dict(masters=False), weights)
    assert engine.stats()["device_peak_bytes"] <= 90_000
    assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    out = model(**next(iter(prepared[3])))
    assert out.logits.dtype is torch.float32
    want = engine.model_state_dict()
    accelerator.free_memory(model, optimizer)
    assert gs.engine_of(model) is None
    assert_same(dict(model.state_dict()), want)


@pytest.mark.parametrize("comes_later", [False, True])
def test_an_optimizer_that_is_not_adam(comes_later: bool) -> None:
    """The bits of the same loop without accelerate and without an engine."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    plain = make_model()
    optimizer = made(plain)
    torch.manual_seed(5)
    for batch in loader():
        plain(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator, model = make(), make_model()
    if comes_later:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(made(model))
    else:
        model, optimizer = accelerator.prepare(model, made(model))
    torch.manual_seed(5)
    for batch in loader():
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.free_memory(model, optimizer)
    assert_same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("precision", ["no", "bf16 weights"])
def test_an_optimizer_that_comes_later(precision: str) -> None:
    ends = []
    for at_once in (True, False):
        accelerator = make()
        model = make_model(precision)
        if at_once:
            optimizer, scheduler = pieces(model)
            _, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        else:
            accelerator.prepare(model)
            model(**rows(1)[0] | {"input_ids": rows(1)[0]["input_ids"][None], "labels": None})
            optimizer, scheduler = pieces(model)
            optimizer = accelerator.prepare(optimizer)
            scheduler = accelerator.prepare(scheduler)
        torch.manual_seed(5)
        train(accelerator, model, optimizer, scheduler, loader())
        ends.append(gs.engine_of(model).model_state_dict())
    assert_same(*ends)


@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16", "bf16 weights"])
def test_load_state_is_the_uninterrupted_run(mixed: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        given = {} if mixed == "bf16 weights" else {"mixed_precision": mixed}
        scaling = (
            [GradScalerKwargs(init_scale=2.0**10, growth_interval=3)] if mixed == "fp16" else None
        )
        accelerator = make(kwargs_handlers=scaling, **given)
        model = make_model(mixed)
        return accelerator, *accelerator.prepare(model, *pieces(model))

    batches = list(loader())
    accelerator, *trained = start()
    train(accelerator, *trained, batches[:4])
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, *trained, batches[4:])
    end = gs.engine_of(trained[0]).model_state_dict()
    again, *loaded = start()
    again.load_state(str(tmp_path / "state"))
    train(again, *loaded, batches[4:])
    assert_same(gs.engine_of(loaded[0]).model_state_dict(), end)
    assert loaded[2].get_last_lr() == trained[2].get_last_lr()
    if mixed == "fp16":
        engines = [gs.engine_of(each[0]) for each in (trained, loaded)]
        assert engines[0].scaler.state_dict() == engines[1].scaler.state_dict()
        assert engines[0].scaler.scale != 2.0**10


def _hook_states(accelerator: Any, how: str) -> None:
    """As scripts of diffusers do it: the models' files are the script's own."""

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for model in models:
            if how == "state_dict":
                torch.save(accelerator.unwrap_model(model).state_dict(), f"{folder}/model.pt")
            else:
                accelerator.unwrap_model(model).save_pretrained(f"{folder}/model")
            weights.pop()

    def load(models: list[Any], folder: str) -> None:
        while models:
            model = models.pop()
            if how == "state_dict":
                state = torch.load(f"{folder}/model.pt", weights_only=True)
            else:
                state = type(model).from_pretrained(f"{folder}/model").state_dict()
            model.load_state_dict(state)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


@pytest.mark.parametrize("how", ["state_dict", "save_pretrained"])
@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16", "bf16 weights"])
def test_hooks_that_save_the_model_resume_the_uninterrupted_run(
    mixed: str, how: str, tmp_path: Path
) -> None:
    def start() -> tuple[Any, ...]:
        accelerator = make(**({} if mixed == "bf16 weights" else {"mixed_precision": mixed}))
        _hook_states(accelerator, how)
        model = make_model(mixed)
        return accelerator, *accelerator.prepare(model, *pieces(model))

    batches = list(loader())
    accelerator, *trained = start()
    train(accelerator, *trained, batches[:4])
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, *trained, batches[4:])
    again, *loaded = start()
    again.load_state(str(tmp_path / "state"))
    train(again, *loaded, batches[4:])
    assert_same(*(gs.engine_of(each[0]).model_state_dict() for each in (loaded, trained)))


@pytest.mark.parametrize("given", [False, True], ids=["own", "get_state_dict"])
@pytest.mark.parametrize("mixed", ["bf16", "bf16 weights"])
def test_the_files_of_a_model_and_its_config_agree(mixed: str, given: bool, tmp_path: Path) -> None:
    accelerator = make(**({} if mixed == "bf16 weights" else {"mixed_precision": mixed}))
    model = make_model(mixed)
    model, optimizer, scheduler = accelerator.prepare(model, *pieces(model))
    train(accelerator, model, optimizer, scheduler, loader())
    masters = accelerator.get_state_dict(model)
    state = {"state_dict": dict(masters)} if given else {}
    plain = accelerator.unwrap_model(model)
    plain.save_pretrained(tmp_path, **state)
    is_fp32 = given or mixed == "bf16"
    want = masters if is_fp32 else gs.engine_of(model).model_state_dict(masters=False)
    assert_same(dict(type(plain).from_pretrained(tmp_path).state_dict()), want)


@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16"])
def test_parts_of_a_model_that_the_loop_calls(mixed: str) -> None:
    """The body, and the head on what it gives: accelerate's autocast is around the model's forward alone."""
    accelerator = make(mixed_precision=mixed)
    model = make_model()
    model, optimizer = accelerator.prepare(model, pieces(model)[0])
    batch = next(iter(loader()))
    hidden = accelerator.unwrap_model(model).model(batch["input_ids"]).last_hidden_state
    logits = model.lm_head(hidden)
    assert hidden.dtype is logits.dtype is torch.float32
    accelerator.backward(logits.square().mean())
    before = gs.engine_of(model).model_state_dict()["lm_head.weight"]
    optimizer.step()
    assert not torch.equal(gs.engine_of(model).model_state_dict()["lm_head.weight"], before)


def test_a_step_of_fp16_that_overflows_is_skipped() -> None:
    scaling = GradScalerKwargs(init_scale=2.0**30, growth_interval=3)
    accelerator = make(mixed_precision="fp16", kwargs_handlers=[scaling])
    model = make_model()
    optimizer, scheduler = pieces(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    before = gs.engine_of(model).model_state_dict()
    train(accelerator, model, optimizer, scheduler, list(loader())[:1])
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert scheduler.get_last_lr() == [1e-2]
    assert_same(gs.engine_of(model).model_state_dict(), before)


def test_save_model_and_get_state_dict_have_masters(tmp_path: Path) -> None:
    accelerator = make()
    model = make_model("bf16 weights")
    optimizer, scheduler = pieces(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train(accelerator, model, optimizer, scheduler, loader())
    masters = gs.engine_of(model).model_state_dict()
    assert_same(accelerator.get_state_dict(model), masters)
    accelerator.save_model(model, str(tmp_path / "model"))
    from safetensors.torch import load_file

    assert_same(load_file(tmp_path / "model" / "model.safetensors"), masters)


def test_clip_grad_value() -> None:
    accelerator = make()
    model = make_model()
    optimizer, _ = pieces(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(**next(iter(loader()))).loss)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) > 1e-3
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    assert max(float(p.grad.abs().max()) for p in model.parameters()) == pytest.approx(1e-3)


def test_two_models_and_a_loss_that_has_no_parameters() -> None:
    accelerator = make()
    models = [make_model(), nn.Linear(4, 4)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]
    loss = nn.MSELoss()
    *models, a, b, loss = accelerator.prepare(*models, *optimizers, loss)
    before = models[1].weight.detach().clone()
    accelerator.backward(loss(models[1](torch.ones(2, 4)), torch.zeros(2, 4)))
    b.step()
    a.step()
    assert not torch.equal(models[1].weight.detach(), before)
    assert gs.engine_of(models[0]) is not gs.engine_of(models[1])
    with pytest.raises(gs.GeminiError, match="2 models that are trained apart"):
        accelerator.clip_grad_norm_([*models[0].parameters(), *models[1].parameters()], 1.0)


def test_zero_grad_of_the_model() -> None:
    accelerator = make()
    model = make_model()
    optimizer, _ = pieces(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = next(iter(loader()))
    for set_to_none in (True, False):
        accelerator.backward(model(**batch).loss)
        model.zero_grad(set_to_none)
        grads = [p.grad for p in model.parameters()]
        assert all(g is None for g in grads) if set_to_none else not any(g.any() for g in grads)
    copied = copy.deepcopy(model)
    copied(**batch).loss.backward()
    copied.zero_grad()
    assert all(p.grad is None for p in copied.parameters())
    assert copied.zero_grad.__self__ is copied
    again = pickle.loads(pickle.dumps(model))
    assert again.zero_grad.__self__ is again
    accelerator.free_memory(model, optimizer)
    model(**batch).loss.backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_clipped_is_refused() -> None:
    accelerator = make(gradient_accumulation_steps=2)
    model = make_model()
    optimizer, _ = pieces(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    with accelerator.accumulate(model):
        accelerator.backward(model(**next(iter(loader()))).loss)
        with pytest.raises(gs.GeminiError, match=r"if accelerator\.sync_gradients"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(gs.GeminiError, match="clips all gradients of a model together"):
        accelerator.clip_grad_norm_(model.lm_head.parameters(), 1.0)


def test_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    with pytest.raises(gs.GeminiError, match=r"step\(\) of LBFGS needs 'closure'"):
        make().prepare(model, torch.optim.LBFGS(model.parameters(), lr=0.1))
    assert gs.engine_of(model) is None
    with pytest.raises(gs.GeminiError, match="no model that was given to accelerator.prepare"):
        make().prepare(torch.optim.AdamW(model.parameters()))
    with pytest.raises(gs.GeminiError, match=r"fsdp_plugin=.* asks for FSDP"):
        make(fsdp_plugin=object())
    with pytest.raises(gs.GeminiError, match=r"deepspeed_plugin=.* asks for DeepSpeed"):
        make(deepspeed_plugin=object())
    with pytest.raises(gs.GeminiError, match="save_on_each_node"):
        make(project_config=ProjectConfiguration(save_on_each_node=True))
    with pytest.raises(gs.GeminiError, match=r"comm_hook=.* gradients are summed exactly"):
        hook = DDPCommunicationHookType.FP16
        make(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=hook)])
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        with pytest.raises(gs.GeminiError, match="ACCELERATE_USE_DEEPSPEED"):
            make()
    with pytest.raises(ValueError, match="GeminiPlugin"):
        GeminiPlugin(placement_policy="gpu")
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, device="cpu")
    with pytest.raises(gs.GeminiError, match="is managed already, without this AdamW"):
        make().prepare(model, optimizer)
    engine.close()


def test_offloaded_weights_are_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_model().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={"model": "disk", "lm_head": "cpu"},
        offload_folder=str(tmp_path / "away"),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(gs.GeminiError, match="are offloaded by accelerate"):
        make().prepare(model, optimizer)


def test_the_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_DEVICE_BUDGET", "123KB")
    accelerator = GeminiAccelerator(cpu=True)
    model = accelerator.prepare(make_model())
    assert gs.engine_of(model).stats()["device_budget_bytes"] == 123_000


def test_frozen_weights_and_those_of_another_stage_are_not_rounded() -> None:
    accelerator = make(mixed_precision="bf16")
    model = make_model()
    frozen = model.model.embed_tokens.weight
    frozen.requires_grad_(False)
    before = frozen.detach().clone()
    model, optimizer = accelerator.prepare(model, pieces(model)[0])
    assert torch.equal(accelerator.get_state_dict(model)["model.embed_tokens.weight"], before)
    accelerator.backward(model(**next(iter(loader()))).loss)
    optimizer.step()
    want = accelerator.get_state_dict(model)
    accelerator.free_memory(model)
    assert_same(dict(model.state_dict()), want)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_optimizer_that_was_replaced_is_refused() -> None:
    accelerator = make(mixed_precision="bf16")
    model = make_model()
    body, head = list(model.model.parameters()), list(model.lm_head.parameters())
    both = torch.optim.AdamW(body), torch.optim.AdamW(head)
    model, first, second = accelerator.prepare(model, *both)
    accelerator.backward(model(**next(iter(loader()))).loss)
    second.step()
    with pytest.raises(gs.GeminiError, match="another one of the same model was prepared after it"):
        first.step()


def test_a_clip_is_the_last_that_happens_to_gradients() -> None:
    accelerator = make()
    model, optimizer = accelerator.prepare(*(lambda m: (m, pieces(m)[0]))(make_model()))
    batch = next(iter(loader()))
    for change in (
        lambda: accelerator.clip_grad_norm_(model.parameters(), 1e-3),
        lambda: accelerator.clip_grad_value_(model.parameters(), 1e-3),
        lambda: (accelerator.backward(model(**batch).loss), optimizer.step()),
    ):
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(gs.GeminiError, match="clip once in a step"):
            change()
        optimizer.zero_grad()
    accelerator.backward(model(**batch).loss)
    optimizer.step()  # works again


def test_unscale_gradients_is_refused_where_they_are_scaled() -> None:
    accelerator = make(mixed_precision="fp16")
    model = make_model()
    accelerator.prepare(model, pieces(model)[0])
    with pytest.raises(gs.GeminiError, match="stay scaled until the step"):
        accelerator.unscale_gradients()
