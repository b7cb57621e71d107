"""The seams of transformers, accelerate and trl that Gemini relies on: one that has moved fails by name."""

import inspect
from typing import Any

import accelerate
import pytest
import transformers
import trl
from accelerate.accelerator import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from peft import PeftModel
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer import Trainer
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, SFTTrainer

from gemini_strategy.errors import GeminiError
from gemini_strategy.huggingface import (
    GeminiAccelerator,
    GeminiOptimizer,
    GeminiTrainer,
    GeminiTrainerMixin,
)
from gemini_strategy.huggingface.trainer import TrainerMethods
from gemini_strategy.optim.names import check_name

# What is overridden, with the parameters that it had when this was written; in a tuple all that it had from the oldest
# version on that is served (requirements/oldest.txt), where None is a version that lacks it.
Texts = str | tuple[str | None, ...]
OVERRIDDEN: dict[Any, dict[str, Texts]] = {
    Accelerator: {
        "__init__": "*",  # arguments are passed on
        "prepare": "self, *args, device_placement=None",
        "prepare_model": "self, model, device_placement=None, evaluation_mode=False",
        "prepare_optimizer": "self, optimizer, device_placement=None",
        "free_memory": "self, *objects",
        "end_training": "self",
        "backward": "self, loss, **kwargs",
        "unscale_gradients": "self, optimizer=None",
        "clip_grad_norm_": "self, parameters, max_norm, norm_type=2",
        "clip_grad_value_": "self, parameters, clip_value",
        "get_state_dict": "self, model, unwrap=True",
        "join_uneven_inputs": "self, joinables, even_batches=None",
        "save_state": "self, output_dir=None, safe_serialization=True, **save_model_func_kwargs",
        "load_state": "self, input_dir=None, load_kwargs=None, **load_model_func_kwargs",
    },
    AcceleratedOptimizer: {
        "__init__": "self, optimizer, device_placement=True, scaler=None",
        "step": "self, closure=None",
        "state_dict": "self",
    },
    Trainer: {
        "__init__": "*",
        "create_accelerator_and_postprocess": "self",
        "_move_model_to_device": "self, model, device",
        "call_model_init": "self, trial=None",
        "training_step": "self, model, inputs, num_items_in_batch=None",
        "log": "self, logs, start_time=None",
        "train": "*",
        "_has_mixed_mesh_grads": (None, "self, model"),
        "_get_grad_norm": "self, model, grad_norm=None",
        "evaluation_loop": "self, dataloader, description, prediction_loss_only=None, ignore_keys=None, "
        "metric_key_prefix='eval'",
        "save_model": "self, output_dir=None, _internal_call=False",
        "_save": "self, output_dir=None, state_dict=None",
        "_save_optimizer_and_scheduler": "self, output_dir",
        "_load_optimizer_and_scheduler": "self, checkpoint",
    },
}
OURS = {
    Accelerator: GeminiAccelerator,
    AcceleratedOptimizer: GeminiOptimizer,
    Trainer: TrainerMethods,
}
# What is called or read, and not overridden.
USED: dict[Any, dict[str, Texts]] = {
    Trainer: {
        "_clip_grad_norm": "self, model",
        "_load_from_checkpoint": "self, resume_from_checkpoint, model=None",
        "push_to_hub": "*",
    },
    TrainerCallback: {
        "on_pre_optimizer_step": "self, args, state, control, **kwargs",
        "on_optimizer_step": "self, args, state, control, **kwargs",
    },
    TrainingArguments: {"__post_init__": "self"},
    PreTrainedModel: {
        "save_pretrained": tuple(
            "self, save_directory, is_main_process=True, state_dict=None, push_to_hub=False, "
            "max_shard_size='50GB', variant=None, token=None, save_peft_format=True, "
            f"save_original_format=True, {last}**kwargs"
            for last in ("", "distributed_checkpoint=False, ")
        )
    },
    PeftModel: {
        "save_pretrained": "self, save_directory, safe_serialization=True, selected_adapters=None, "
        "save_embedding_layers='auto', is_main_process=True, path_initial_model_for_weight_conversion=None, **kwargs"
    },
    AcceleratedScheduler: {
        "__init__": "self, scheduler, optimizers, step_with_optimizer=True, split_batches=False"
    },
}
# (a function, what its text has): the calls that lead to what is overridden, and the marks that others look at.
TEXTS = [
    (Trainer.create_accelerator_and_postprocess, "self.accelerator = Accelerator(**args)"),
    (Trainer._prepare_for_training, "self.accelerator.prepare(self.model, self.optimizer)"),
    (Trainer._prepare_for_training, "self._load_optimizer_and_scheduler(resume_from_checkpoint)"),
    (
        Trainer._clip_grad_norm,
        "self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)",
    ),
    (Trainer._run_epoch, "if self.args.max_grad_norm > 0:"),
    (Trainer._run_epoch, "self._get_grad_norm(model, grad_norm=grad_norm)"),
    (Trainer._run_epoch, "self.accelerator.gradient_state._set_sync_gradients(do_sync_step)"),
    (Trainer._run_epoch, "self.accelerator.optimizer_step_was_skipped"),
    (Trainer._maybe_log_save_evaluate, "if grad_norm is not None:"),
    (Trainer.training_step, "self.accelerator.backward(loss, **kwargs)"),
    (Trainer.evaluation_loop, "args.bf16_full_eval"),
    (Trainer._save_checkpoint, "self.save_model(output_dir, _internal_call=True)"),
    (Trainer._save_checkpoint, "self._save_optimizer_and_scheduler(output_dir)"),
    (Trainer._save_scaler, "self.accelerator.scaler.state_dict()"),
    (Trainer._load_scaler, "self.accelerator.scaler.load_state_dict("),
    (Trainer._inner_training_loop, "self.accelerator.free_memory()"),
    (Trainer._maybe_log_save_evaluate, "self.log(logs, start_time)"),
    (Accelerator.prepare_optimizer, '"_is_accelerate_prepared"'),
    (Accelerator.prepare_scheduler, "opt.optimizer"),
    (Accelerator.save_state, "self.get_state_dict(model, unwrap=False)"),
    (save_accelerator_state, "state = opt.state_dict()"),
    (Accelerator.save_model, "self.get_state_dict(model)"),
    (AcceleratedOptimizer.step, "self.gradient_state.sync_gradients"),
    (AcceleratedOptimizer.step_was_skipped.fget, "self._is_overflow"),
    (AcceleratedScheduler.step, "opt.step_was_skipped"),
    (DPOTrainer.__init__, "self.accelerator.prepare_model(self.ref_model, evaluation_mode=True)"),
]


def parameters(function: Any) -> str:
    """As they are written, without types."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return ", ".join(str(p) for p in plain)


SEAMS = [
    pytest.param(kind, name, text, id=f"{kind.__name__}.{name}")
    for table in (OVERRIDDEN, USED)
    for kind, names in table.items()
    for name, text in names.items()
]


def versions() -> str:
    of = {"accelerate": accelerate, "transformers": transformers, "trl": trl}
    return ", ".join(f"{name} {module.__version__}" for name, module in of.items())


@pytest.mark.parametrize(("kind", "name", "text"), SEAMS)
def test_signature(kind: Any, name: str, text: Texts) -> None:
    texts = text if isinstance(text, tuple) else (text,)
    has_it = hasattr(kind, name)
    assert has_it or None in texts, f"{kind.__name__}.{name} is gone ({versions()})"
    if has_it and text != "*":
        now = parameters(getattr(kind, name))
        assert now in texts, f"{kind.__name__}.{name}({now}) was ({text}) ({versions()})"


@pytest.mark.parametrize(
    ("function", "text"), TEXTS, ids=lambda value: getattr(value, "__qualname__", None)
)
def test_call(function: Any, text: str) -> None:
    source = " ".join(inspect.getsource(function).split())
    assert text in source, f"{function.__qualname__} has no {text} any more ({versions()})"


@pytest.mark.parametrize("kind", OVERRIDDEN, ids=lambda kind: kind.__name__)
def test_all_that_is_overridden_is_listed(kind: Any) -> None:
    ours = {
        name
        for name in vars(OURS[kind])
        if callable(getattr(OURS[kind], name)) and hasattr(kind, name)
    }
    there = {name for name in OVERRIDDEN[kind] if hasattr(kind, name)}
    assert ours - {"__class__", "__init_subclass__"} == there


@pytest.mark.parametrize(
    "kind", [SFTTrainer, DPOTrainer, GRPOTrainer, RewardTrainer], ids=lambda kind: kind.__name__
)
def test_trl_goes_through_the_trainer(kind: Any) -> None:
    """What trl overrides of ours it must call the Trainer's for."""
    assert issubclass(kind, Trainer)
    for name in OVERRIDDEN[Trainer]:
        for base in kind.__mro__[: kind.__mro__.index(Trainer)]:
            if name in vars(base):
                source = inspect.getsource(vars(base)[name])
                assert f"super().{name}(" in source, f"{base.__name__}.{name} ({versions()})"


def test_the_mixin_goes_before_a_class_that_has_it_already() -> None:
    """As in a script with the mixin in it that is run by the runner."""
    kind = type("Mine", (GeminiTrainerMixin, type("Theirs", (GeminiTrainer,), {})), {})
    names = [each.__name__ for each in kind.__mro__]
    assert names.index("TrainerMethods") == names.index("Trainer") - 1


def test_the_names_of_optimizers_that_step_inside_the_backward() -> None:
    default = TrainingArguments.__dataclass_fields__["optim"].default
    names = {str(name.value) for name in transformers.training_args.OptimizerNames}
    refused = set()
    for name in names:
        try:
            check_name(name, "optim")
        except GeminiError:
            refused.add(name)
    assert {"lomo", "adalomo"} < refused < names
    assert all(name.endswith("_layerwise") for name in refused - {"lomo", "adalomo"})
    assert str(getattr(default, "value", default)) not in refused
