"""transformers' Trainer under a budget: losses and masters of the same loop without one, bit for bit."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainerCallback

import gemini_strategy as gs
from gemini_strategy.huggingface import GeminiTrainer, GeminiTrainerMixin
from gemini_strategy.huggingface.folders import keeping_masters
from gemini_strategy.report.logged import LOGGED, logged
from huggingface_case import (
    PRECISIONS,
    ReferenceTrainer,
    arguments,
    assert_same,
    losses,
    make_model,
    masters,
    plugin,
    rows,
)


def make(folder: Path, precision: str = "no", model: Any = None, **given: Any) -> GeminiTrainer:
    names = ("eval_dataset", "callbacks", "model_init", "compute_metrics", "optimizers")
    of_trainer = {name: given.pop(name) for name in names if name in given}
    kind = given.pop("kind", GeminiTrainer)
    args = arguments(folder, precision, **given)
    if "model_init" not in of_trainer and model is None:
        model = make_model(precision)
    beside = {"gemini_plugin": plugin()} if kind is GeminiTrainer else {}
    return kind(model, args, train_dataset=rows(), **of_trainer, **beside)


def both(folder: Path, precision: str = "no", **given: Any) -> tuple[Any, Any]:
    """A reference and a managed Trainer that have trained alike."""
    reference = make(folder / "reference", precision, kind=ReferenceTrainer, **given)
    reference.train()
    managed = make(folder / "managed", precision, **given)
    managed.train()
    return reference, managed


def assert_alike(reference: Any, managed: Any) -> None:
    assert losses(reference) == losses(managed)
    assert_same(masters(managed), masters(reference))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_bits_of_the_reference(precision: str, tmp_path: Path) -> None:
    before = masters_of(make_model(precision))
    reference, managed = both(
        tmp_path, precision, eval_dataset=rows(4, 2), eval_strategy="steps", eval_steps=2
    )
    assert_alike(reference, managed)
    assert any(
        not torch.equal(before[n], v.to(before[n].dtype)) for n, v in masters(managed).items()
    )
    stats = gs.engine_of(managed.model).stats()
    assert stats["steps"] == 4
    assert 0 < stats["device_peak_bytes"] <= 90_000
    assert type(managed.model_wrapped) is type(managed.model)


def flat_states(trainer: Any) -> dict[str, torch.Tensor]:
    state = trainer.optimizer.state_dict()["state"]
    return {f"{i}.{k}": v.clone() for i, entry in state.items() for k, v in entry.items()}


def masters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "given",
    [
        {"gradient_checkpointing": True},
        {"neftune_noise_alpha": 5.0},
        {"label_smoothing_factor": 0.1},
        {"num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 3},
        {
            "lr_scheduler_type": "constant",
            "warmup_steps": 2,
            "eval_on_start": True,
            "eval_dataset": rows(4),
        },
    ],
    ids=["checkpointing", "neftune", "smoothing", "remainder", "eval-on-start"],
)
def test_settings_of_the_trainer(given: dict[str, Any], tmp_path: Path) -> None:
    assert_alike(*both(tmp_path, "bf16", **given))


def test_no_norm_is_measured_where_nothing_clips(tmp_path: Path, monkeypatch: Any) -> None:
    from gemini_strategy.runtime import Runtime

    reference = make(tmp_path / "reference", kind=ReferenceTrainer, max_grad_norm=0.0)
    reference.train()
    trainer = make(tmp_path, max_grad_norm=0.0)
    ended = []
    plain = Runtime.ends_step
    monkeypatch.setattr(Runtime, "ends_step", lambda self: ended.append(self) or plain(self))
    monkeypatch.setattr(Runtime, "_measure_grads", lambda self: pytest.fail("a norm"))
    trainer.train()
    assert len(ended) == 4  # updates were allowed inside the last backward of each step
    assert all("grad_norm" not in entry for entry in losses(trainer))
    assert_same(masters(trainer), masters(reference))


def test_updates_wait_where_somebody_may_want_gradients(tmp_path: Path) -> None:
    class Reads(TrainerCallback):
        norms = []  # noqa: RUF012

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.norms.append(float(next(given["model"].parameters()).grad.square().sum()))

    class Own(GeminiTrainer):
        def training_step(self, *args: Any, **given: Any) -> Any:
            return super().training_step(*args, **given)

    trainer = make(tmp_path / "a", max_grad_norm=0.0, callbacks=[Reads()])
    trainer.train()
    assert len(Reads.norms) == 4
    assert "Reads" in str(trainer._why_deferred())
    own = Own(
        make_model(),
        arguments(tmp_path, max_grad_norm=0.0),
        train_dataset=rows(),
        gemini_plugin=plugin(),
    )
    own.train()
    assert "Own" in str(own._why_deferred())
    assert_same(masters(trainer), masters(own))


@pytest.mark.parametrize(
    "how",
    [
        "wrapped",
        "is wrapped",
        "replaced",
        "has a hook",
        "backward was",
        "has on_pre_optimizer_step",
    ],
)
def test_updates_wait_for_what_is_put_on_the_optimizer_the_trainer_or_a_parameter(
    how: str, tmp_path: Path
) -> None:
    def halve(*parameters: torch.Tensor) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    class Puts(TrainerCallback):
        trainer: Any

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            trainer, model = self.trainer, self.trainer.model
            optimizer = trainer.optimizer  # accelerate's, with what it wraps in it
            optimizer = optimizer if how == "is wrapped" else optimizer.optimizer
            step, train = optimizer.step, trainer.training_step
            if state.global_step != 2:
                pass
            elif "wrapped" in how:
                optimizer.step = lambda *args: (halve(*model.parameters()), step(*args))[1]
            elif how == "backward was":
                accelerator, backward = trainer.accelerator, trainer.accelerator.backward
                accelerator.backward = lambda loss: (backward(loss), halve(*model.parameters()))
            elif how == "has on_pre_optimizer_step":
                reads = TrainerCallback()
                reads.on_pre_optimizer_step = lambda *_, **__: halve(*model.parameters())
                trainer.add_callback(reads)
            elif how == "replaced":
                trainer.training_step = lambda *args: (train(*args), halve(*model.parameters()))[0]
            else:
                model.lm_head.weight.register_post_accumulate_grad_hook(halve)

    both = []
    for kind in (GeminiTrainer, ReferenceTrainer):
        callback = Puts()
        folder = tmp_path / kind.__name__
        given = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "callbacks": [callback]}
        callback.trainer = trainer = make(folder, kind=kind, **given)
        trainer.train()
        both.append(masters(trainer))
        assert kind is ReferenceTrainer or how in trainer._why_deferred()
    assert_same(*both)


@pytest.mark.parametrize("precision", [*PRECISIONS, "fp16"])
def test_resume_is_the_uninterrupted_run(precision: str, tmp_path: Path) -> None:
    whole = make(tmp_path / "a", precision, save_strategy="steps", save_steps=2)
    whole.train()
    model = make_model(precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    again = make(tmp_path / "b", precision, model)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert losses(again)[:-1] == losses(whole)[:-1]  # the last has the mean of its own run
    assert_same(masters(again), masters(whole))
    one, other = (flat_states(t) for t in (whole, again))
    assert len(one) == len(other) > 3
    assert_same(one, other)


def test_a_checkpoint_goes_on_without_gemini(tmp_path: Path) -> None:
    managed = make(tmp_path / "a", save_strategy="steps", save_steps=2)
    managed.train()
    plain = make(tmp_path / "b", kind=ReferenceTrainer)
    plain.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert_same(masters(managed), masters(plain))


def test_the_best_model_is_loaded_whole(tmp_path: Path) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Keeps(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen[state.global_step] = gs.engine_of(given["model"]).model_state_dict()

    trainer = make(
        tmp_path,
        "bf16 weights",
        eval_dataset=rows(4, 2),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_only_model=True,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,
        callbacks=[Keeps()],
        learning_rate=1e-3,
    )
    trainer.train()
    best = int(str(trainer.state.best_model_checkpoint).rpartition("-")[2])
    assert_same(masters(trainer), seen[best])
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()


def test_save_model_into_a_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    trainer = make(tmp_path, "bf16 weights", save_strategy="steps", save_steps=4)
    trainer.train()
    trainer.save_model()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.dtype is torch.float32
    assert_same(masters(trainer), {n: p.detach() for n, p in plain.named_parameters()})
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint-4", "notes.txt", "config.json", "training_args.bin"} <= names
    assert {name for name in names if "safetensors" in name or "model" in name} == {
        "model.safetensors"
    }


def train_alike(trainer: Any) -> None:
    """With the same random numbers, whatever has used some before."""
    torch.manual_seed(5)
    trainer.train()


def test_evaluation_before_training_changes_nothing(tmp_path: Path) -> None:
    plain = make(tmp_path / "a", "bf16 weights", eval_dataset=rows(4))
    first = plain.evaluate()["eval_loss"]
    assert gs.engine_of(plain.model).optimizer is None
    train_alike(plain)
    other = make(tmp_path / "b", "bf16 weights", eval_dataset=rows(4))
    train_alike(other)
    assert_same(masters(plain), masters(other))
    assert first != plain.evaluate()["eval_loss"] == other.evaluate()["eval_loss"]


def test_full_evaluation_in_bf16_rounds_nothing_for_good(tmp_path: Path) -> None:
    trainer = make(tmp_path / "a", bf16_full_eval=True, eval_dataset=rows(4))
    trainer.evaluate()
    assert next(trainer.model.parameters()).dtype is torch.bfloat16
    train_alike(trainer)
    assert next(trainer.model.parameters()).dtype is torch.float32
    other = make(tmp_path / "b")
    train_alike(other)
    assert_same(masters(trainer), masters(other))
    trainer.evaluate()
    assert next(trainer.model.parameters()).dtype is torch.bfloat16
    assert_same(masters(trainer), masters(other))


def test_training_twice_goes_on_with_one_engine(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    engine = gs.engine_of(trainer.model)
    trainer.train()
    assert gs.engine_of(trainer.model) is engine
    assert engine.stats()["steps"] == 8


def test_another_trainer_goes_on_from_the_masters(tmp_path: Path) -> None:
    first = make(tmp_path, "bf16 weights")
    first.train()
    before = masters(first)
    second = make(tmp_path, "bf16 weights", first.model, learning_rate=0.0, weight_decay=0.0)
    second.train()
    assert second.model.dtype is torch.bfloat16
    assert_same(masters(second), before)


def test_model_init(tmp_path: Path) -> None:
    trainer = make(tmp_path / "a", model_init=make_model)
    trainer.train()
    old, first = trainer.model, masters(trainer)
    trainer.train()
    assert trainer.model is not old
    assert gs.engine_of(old) is None
    assert_same(masters(trainer), first)
    other = make(tmp_path / "b")
    other.train()
    assert_same(masters(other), first)


def test_a_batch_that_is_too_large_is_tried_again(tmp_path: Path) -> None:
    fails = [True]

    class Fails(GeminiTrainer):
        def compute_loss(self, *args: Any, **given: Any) -> Any:
            loss = super().compute_loss(*args, **given)
            if fails and self.state.global_step == 1:
                fails.pop()
                raise RuntimeError("CUDA out of memory. Tried to allocate 1 GB")
            return loss

    args = arguments(tmp_path, auto_find_batch_size=True)
    trainer = Fails(make_model(), args, train_dataset=rows(), gemini_plugin=plugin())
    trainer.train()
    assert trainer._train_batch_size == 1
    assert gs.engine_of(trainer.model).stats()["steps"] == 1 + 4


def plain_optimizer(folder: Path, precision: str, **given: Any) -> tuple[Any, Any]:
    """(what transformers' own Trainer makes with an optimizer, the Trainer under a budget that has done the same)."""
    plain = make(folder / "plain", precision, kind=Trainer, **given)
    plain.train()
    managed = make(folder / "managed", precision, **given)
    managed.train()
    return plain, managed


BY_NAME = (
    "sgd",
    "adafactor",
    "rmsprop",
    "adagrad",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion_8bit",
    "adamw_torch_8bit",
    "adamw_torch_4bit",
)


@pytest.mark.parametrize("precision", ["no", "bf16 weights"])
@pytest.mark.parametrize("name", BY_NAME)
def test_an_optimizer_by_its_name(name: str, precision: str, tmp_path: Path) -> None:
    """The bits of transformers' own Trainer; where no norm is asked for, updates run inside the backward."""
    given: dict[str, Any] = {"optim": name, "max_grad_norm": 0.0, "eval_dataset": rows(4, 2)}
    plain, managed = plain_optimizer(
        tmp_path, precision, eval_strategy="steps", eval_steps=2, **given
    )
    engine = gs.engine_of(managed.model)
    assert engine.stats()["steps"] == 4
    assert engine._runtime.opaque is not None
    without_norm = [{k: v for k, v in e.items() if k != "grad_norm"} for e in losses(plain)]
    assert losses(managed) == without_norm
    engine.close()
    assert_same(managed.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("name", ["adafactor", "adamw_torch_8bit"])
def test_a_checkpoint_of_an_optimizer_by_its_name(name: str, tmp_path: Path) -> None:
    """The norm is below its limit, so torch's clip changes no bit either."""
    given: dict[str, Any] = {"optim": name, "max_grad_norm": 1e3, "save_strategy": "steps"}
    plain, managed = plain_optimizer(tmp_path, "no", save_steps=2, **given)
    again = make(tmp_path / "again", save_steps=2, **given)
    again.train(resume_from_checkpoint=str(tmp_path / "managed" / "checkpoint-2"))
    for trainer in (managed, again):
        gs.engine_of(trainer.model).close()
        assert_same(trainer.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize("name", ["lomo", "adalomo", "galore_adamw_layerwise"])
def test_an_optimizer_that_steps_inside_the_backward_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(gs.GeminiError, match=rf"optim='{name}'.*go past the engine: use '"):
        make(tmp_path, optim=name)


def test_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    trainer = make(tmp_path, model=model, optimizers=(optimizer, None), optim="sgd")
    trainer.train()
    assert gs.engine_of(model).optimizer is optimizer


@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_methods_of_an_accelerator_of_ones_own(
    clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Accelerator):
        def backward(self, loss: torch.Tensor, **given: Any) -> None:
            super().backward(loss * loss.detach() ** 9, **given)

    monkeypatch.setattr(transformers.trainer, "Accelerator", Own)
    assert_same(*map(masters, both(tmp_path, max_grad_norm=clip)))


def test_a_save_of_ones_own_is_called_or_refused(tmp_path: Path) -> None:
    def kind(base: type) -> type:
        class Own(base):  # type: ignore[misc]
            def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
                super()._save(output_dir, state_dict)
                (Path(output_dir) / "own").touch()

        return Own

    with pytest.raises(gs.GeminiError, match="Own has its own _save"):
        type("Late", (GeminiTrainerMixin, kind(Trainer)), {})
    own = kind(type("Early", (GeminiTrainerMixin, Trainer), {}))
    trainer = own(make_model(), arguments(tmp_path, save_strategy="steps", save_steps=4))
    trainer.train_dataset = rows()
    trainer.train()
    assert (tmp_path / "checkpoint-4" / "own").exists()


def test_a_trainer_whose_optimizer_was_replaced_is_refused(tmp_path: Path) -> None:
    """Its moments are gone, and it would go on without them."""
    first = make(tmp_path)
    first.train()
    make(tmp_path, model=first.model).train()
    with pytest.raises(gs.GeminiError, match="AdamW has lost its states"):
        first.train()
    first.optimizer = None
    first.train()


def test_compiled_layers(tmp_path: Path) -> None:
    reference = make(tmp_path / "reference", kind=ReferenceTrainer)
    for layer in reference.model.model.layers:
        layer.compile(backend="eager")
    reference.train()
    managed = make(tmp_path, torch_compile=True, torch_compile_backend="eager")
    managed.train()
    assert all(layer._compiled_call_impl is not None for layer in managed.model.model.layers)
    assert_alike(reference, managed)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prompts_go_on_where_they_were(precision: str, tmp_path: Path) -> None:
    ends = []
    for resume in (None, str(tmp_path / "checkpoint-2")):
        config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        torch.manual_seed(0)
        model = get_peft_model(make_model(), config)
        trainer = make(tmp_path, precision, model, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=resume)
        ends.append(masters(trainer))
    assert_same(*ends)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_save_pretrained_of_a_script_does_not_round(
    has_adapters: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = PeftModel if has_adapters else PreTrainedModel
    monkeypatch.setattr(kind, "save_pretrained", keeping_masters(kind.save_pretrained))
    model = make_model()
    if has_adapters:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    trainer = make(tmp_path / "a", "bf16", model)
    trainer.train()
    (tmp_path / "b" / "other").mkdir(parents=True)
    model.save_pretrained(tmp_path / "b", is_main_process=True, safe_serialization=True)
    file = "adapter_model.safetensors" if has_adapters else "model.safetensors"
    saved = load_file(tmp_path / "b" / file)
    plain = {name.replace(".default.", "."): value for name, value in masters(trainer).items()}
    assert_same(plain, saved)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in saved.values())
    model.save_pretrained(tmp_path / "c", token="none")  # which only the plain method knows
    assert_same(plain, load_file(tmp_path / "c" / file))


def test_save_pretrained_of_a_script_says_that_it_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that came in bf16 is written so where more is asked for than is done here."""
    method = keeping_masters(PreTrainedModel.save_pretrained)
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", method)
    trainer = make(tmp_path / "a", "bf16", make_model().bfloat16())
    trainer.train()
    with pytest.warns(UserWarning, match="token.*rounded to bf16-mixed"):
        trainer.model.save_pretrained(tmp_path / "b", token="none")
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    assert_same(weights, load_file(tmp_path / "b" / "model.safetensors"))


@pytest.mark.parametrize(("stored", "precision"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_resume_of_weights_that_were_stored_otherwise(
    stored: str, precision: str, tmp_path: Path
) -> None:
    """The masters of a checkpoint are not rounded to the dtype in which the model came."""

    def build() -> Any:
        return make_model().to({"fp16": torch.float16, "bf16": torch.bfloat16}[stored])

    whole = make(tmp_path, precision, build(), save_strategy="steps", save_steps=2)
    whole.train()
    again = make(tmp_path, precision, build(), save_strategy="steps", save_steps=2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(masters(again), masters(whole))


def test_adapters_beside_their_base(tmp_path: Path) -> None:
    """Saving one kind of files deletes none of the other."""
    make_model().save_pretrained(tmp_path)
    base = (tmp_path / "model.safetensors").read_bytes()
    model = get_peft_model(make_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = make(tmp_path / "out", model=model)
    trainer.train()
    trainer.save_model(str(tmp_path))
    assert (tmp_path / "model.safetensors").read_bytes() == base
    assert (tmp_path / "adapter_model.safetensors").is_file()


def test_the_log_has_the_engines_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the loss of training, where the Trainer logs it; no other step asks for them."""
    asked: list[dict[str, float]] = []
    plain = gs.Engine.stats
    monkeypatch.setattr(gs.Engine, "stats", lambda self: asked.append(plain(self)) or asked[-1])
    seen: list[dict[str, Any]] = []

    class Logger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    trainer = make(
        *(tmp_path, "no"),
        max_steps=8,
        logging_steps=3,
        eval_strategy="steps",
        eval_steps=4,
        eval_dataset=rows(4, 2),
        callbacks=[Logger()],
    )
    trainer.train()
    assert len(asked) == 2
    with_loss = [logs for logs in seen if "loss" in logs]
    assert len(with_loss) == 2 and len(seen) == 5  # two evaluations, and the end
    for logs in seen:
        figures = {name: value for name, value in logs.items() if name.startswith("gemini/")}
        at = next((i for i, each in enumerate(with_loss) if each is logs), None)
        expected = {} if at is None else logged(asked[at])
        assert figures == expected
        assert not any(map(math.isnan, figures.values()))
    assert set(LOGGED.values()) <= set(with_loss[-1])
    assert with_loss[-1]["gemini/tokens_per_s"] > 0
    kept = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["gemini/device_peak_bytes"] for entry in kept] == [
        stats["device_peak_bytes"] for stats in asked
    ]
