"""transformers' Trainer under a budget, and by the mixin any class that is derived from it, such as those of trl.

Invariants
    1. The loop is the Trainer's own. What is here places nothing, clips through the engine, and saves and loads.
    2. What reads whole fields is called by all ranks: models, checkpoints.
    3. A checkpoint has fp32 masters in the model's files, and Adam's own form of state in optimizer.pt, so that it goes
       on bit for bit here, and goes on elsewhere.
    4. Updates run inside a backward only where nobody can need the gradients after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME, Trainer

from gemini_strategy import Engine, GeminiError, engine_of
from gemini_strategy.checkpoint import one_file
from gemini_strategy.close import close
from gemini_strategy.huggingface.accelerator import adopt
from gemini_strategy.huggingface.folders import save_into
from gemini_strategy.huggingface.plugin import GeminiPlugin
from gemini_strategy.huggingface.refusals import check_arguments
from gemini_strategy.optim.managed import is_wrapped, who_needs_gradients
from gemini_strategy.optim.state_dicts import state_dict as optimizer_state_dict
from gemini_strategy.report.logged import logged

# Whose own code, around a backward and between it and its step, reads no gradients but by these methods.
_KNOWN = ("transformers", "trl", "gemini_strategy", "accelerate")
_AROUND_BACKWARD = ("training_step", "backward", "_clip_grad_norm", "_get_grad_norm", "_run_epoch")
_CALLBACKS = ("on_pre_optimizer_step", "on_optimizer_step")
# Ours, which call no other; what a class between ours and the Trainer does there would be left out.
_INSTEAD = ("save_model", "_save", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler")


class TrainerMethods:
    """What is different in a Trainer under a budget.

    Apart from GeminiTrainerMixin, so that a class may have the mixin and be derived from a GeminiTrainer too, as it is
    under the runner.
    """

    accelerator: Any
    args: Any
    callback_handler: Any
    is_in_train: bool
    lr_scheduler: Any
    model: Any
    optimizer: Any
    _gemini_plugin: GeminiPlugin | None = None

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for kind in cls.__mro__[cls.__mro__.index(TrainerMethods) + 1 :]:
            own = [name for name in _INSTEAD if name in vars(kind)]
            if own and kind.__module__.partition(".")[0] not in _KNOWN:
                raise GeminiError(
                    f"{kind.__name__} has its own {own[0]}, and {cls.__name__} would not call it: derive "
                    f"{kind.__name__} from GeminiTrainer, or from a class of GeminiTrainerMixin and its base"
                )

    def __init__(
        self, *args: Any, gemini_plugin: GeminiPlugin | None = None, **kwargs: Any
    ) -> None:
        self._gemini_plugin = gemini_plugin
        given = (*args, *kwargs.values())
        for each in given:
            if isinstance(each, TrainingArguments):  # before a model is loaded by its name
                check_arguments(each, has_optimizer=_has_optimizer(given))
        super().__init__(*args, **kwargs)

    # ---- placing ----

    def create_accelerator_and_postprocess(self) -> None:
        """The Accelerator is ours; one process computes on one device."""
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator, self._gemini_plugin)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: the engine places it."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The model before is let go."""
        engine = self._engine()
        if engine is not None:
            close(engine._runtime, None, with_states=False, is_told=False)
        return super().call_model_init(trial)  # type: ignore[misc,no-any-return]

    def _engine(self) -> Engine | None:
        model = getattr(self, "model", None)
        return engine_of(model) if isinstance(model, nn.Module) else None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; at its end, however it comes, the report has its second table."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            engine = self._engine()
            if engine is not None:
                engine._runtime.measured.tell()

    # ---- a step ----

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ever; where the step needs no gradients, it begins inside this backward."""
        self.accelerator.ends_step = self._why_deferred() is None
        try:
            return super().training_step(*args, **kwargs)  # type: ignore[misc,no-any-return]
        finally:
            self.accelerator.ends_step = False

    def _why_deferred(self) -> str | None:
        """Why updates cannot run inside the backward that comes; None: they can (invariant 4)."""
        if not self.accelerator.sync_gradients:
            return "the step has more micro-batches"
        if self.args.max_grad_norm and self.args.max_grad_norm > 0:
            return f"max_grad_norm is {self.args.max_grad_norm}"
        if self.args.auto_find_batch_size:
            return "auto_find_batch_size goes on after an error"
        for name in _AROUND_BACKWARD:
            holder = self.accelerator if name == "backward" else self
            if name in vars(holder):
                return f"{name} was replaced"
            for kind in type(holder).__mro__:
                if name in vars(kind) and kind.__module__.partition(".")[0] not in _KNOWN:
                    return f"{kind.__name__} has its own {name}"
        for callback in self.callback_handler.callbacks:
            for name in _CALLBACKS:
                plain = getattr(TrainerCallback, name)
                if getattr(getattr(callback, name), "__func__", None) is not plain:
                    return f"the callback {type(callback).__name__} has {name}"
        engine = self._engine()
        if engine is None or engine.optimizer is None:
            return "nothing is trained"
        if is_wrapped(self.optimizer, type(self.optimizer).step):
            return "the optimizer's step is wrapped"
        return who_needs_gradients(engine._runtime)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As ever; with the loss of training, which alone has a `start_time`, come the engine's figures."""
        engine = self._engine()
        if start_time is not None and engine is not None and engine.optimizer is not None:
            logs = {**logs, **logged(engine.stats())}
        super().log(logs, start_time)  # type: ignore[misc]

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """No: and no gradient is read to see that."""
        return False if self._engine() else super()._has_mixed_mesh_grads(model)  # type: ignore[misc,no-any-return]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm for the log: that of clipping. Where nothing is clipped it is not measured."""
        if grad_norm is None and self._engine() is not None:
            return None
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    # ---- evaluation ----

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """The model is managed, trained or not; with bf16_full_eval its weights are computed with in bf16."""
        if self.is_in_train:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        wants_bf16 = self.args.bf16_full_eval
        if wants_bf16:
            self.accelerator.evaluate_in(self.model, "bf16-true")
        elif self._engine() is None:
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
        self.args.bf16_full_eval = False  # nobody casts a managed model
        try:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.args.bf16_full_eval = wants_bf16

    # ---- saving ----

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """All ranks call it; the files have fp32 masters, and config.json says so."""
        engine = self._engine()
        if engine is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        if _has_exact_prompts(engine):  # peft computes them
            self.model.save_pretrained(folder)
        else:
            with engine.ranks.explaining():
                save_into(engine, folder)
        if self.args.should_save:
            self._save(str(folder))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)  # type: ignore[attr-defined]

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        """What lies beside the weights, which `save_model` has written."""
        if state_dict is not None or self._engine() is None:
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        processor = self.processing_class  # type: ignore[attr-defined]
        if processor is None:
            processor = getattr(self.data_collator, "tokenizer", None)  # type: ignore[attr-defined]
        if processor is not None:
            processor.save_pretrained(folder)
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        engine = self._engine()
        if engine is None or engine.optimizer is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state = optimizer_state_dict(
            engine._runtime, engine.optimizer, 0, with_lows=False, for_file=True
        )
        if self.args.should_save:
            folder = Path(output_dir)
            one_file.write(state, folder / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    # ---- resuming ----

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        engine = self._engine()
        if checkpoint is None or engine is None or engine.optimizer is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        # The model took the file's masters before it was managed; 16-bit weights could not keep them.
        if any(s.has_low and s.original_dtype is not torch.float32 for s in engine._runtime.slots):
            self._load_from_checkpoint(checkpoint)  # type: ignore[attr-defined]
        files = Path(checkpoint) / OPTIMIZER_NAME, Path(checkpoint) / SCHEDULER_NAME
        if not all(file.is_file() for file in files):  # save_only_model
            return
        state = torch.load(files[0], map_location="cpu", weights_only=True, mmap=True)
        self.optimizer.load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(files[1], weights_only=True))


class GeminiTrainerMixin(TrainerMethods):
    """To be inherited from before a Trainer: `class MyTrainer(GeminiTrainerMixin, SFTTrainer): ...`.

    Args:
        gemini_plugin: budgets and policy; None: those of the runner or the environment.
        args, kwargs: the Trainer's own.

    Raises:
        GeminiError: an argument asks for what cannot be honoured, by name.
    """


class GeminiTrainer(TrainerMethods, Trainer):
    """transformers.Trainer under a budget; see GeminiTrainerMixin for its one argument."""


def _has_exact_prompts(engine: Engine) -> bool:
    """Whether peft's prompts are what is trained, with no more than one rank and nothing to be rounded."""
    adapters = getattr(engine.model, "peft_config", None) or {}
    is_alone = engine.ranks.size == 1 and not any(slot.has_low for slot in engine._runtime.slots)
    return is_alone and any(getattr(a, "is_prompt_learning", False) for a in adapters.values())


def _has_optimizer(given: tuple[Any, ...]) -> bool:
    """Whether a Trainer is given an optimizer or its class, so that `optim` does not count."""
    firsts = [each[0] for each in given if isinstance(each, tuple) and each]
    return any(
        isinstance(first, Optimizer) or (isinstance(first, type) and issubclass(first, Optimizer))
        for first in firsts
    )
