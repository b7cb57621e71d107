# What a checkpoint has of the module and its optimizer, and when a stage takes it in.
#
# A class for the strategy of each Lightning tree to inherit from; nothing here imports Lightning.
#
# Invariants
#   1. Checkpoints hold plain keys, fp32 masters and Adam's own state form: files are interchangeable with those of
#      Lightning's single-device and DDP strategies.
#   2. Weights come where those strategies load them: after `configure_model`, before `configure_optimizers` and
#      `on_fit_start`, into ordinary parameters. Optimizer states come when there is an engine.
#   3. What the module cannot take yet (parameters without memory, a file of weights that is still to be read, or a
#      folder without an engine) it takes at the end of `setup`, over what they got there.
#   4. No fp32 value of a file is rounded on its way into a master.
#   5. With state_dict_type="sharded" a checkpoint is a folder (checkpoint/) as Lightning's FSDP strategy writes it:
#      all ranks write and read the engine's state, and `meta.pt` has the rest of the Trainer's checkpoint. With an
#      AsyncCheckpointIO they write while training goes on; no older checkpoint is removed before the new one is there.
#      What an averaging callback puts in the place of the weights is in `meta.pt` too.
#   6. Else its tensors are stand-ins, which are read from the engine while the file is written (one_file.py).

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gemini_strategy as gs
from gemini_strategy.checkpoint import folder as folders
from gemini_strategy.checkpoint.background import save_in_background
from gemini_strategy.checkpoint.distcp import META
from gemini_strategy.checkpoint.load import load
from gemini_strategy.checkpoint.manifest import Manifest
from gemini_strategy.checkpoint.save import Wanted, save
from gemini_strategy.lightning.engine_strategy import EngineStrategy
from gemini_strategy.lightning.engines import masters_of, states_of
from gemini_strategy.lightning.ranks import is_mappable, load_mapped


class InFolder(dict[str, Any]):
    """Stands in a checkpoint for a state that stays in its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder


class Checkpoints(EngineStrategy):
    """To be inherited from before the tree's own strategy.

    Attributes:
        checkpoint_weights_only: `weights_only` of ``torch.load`` where Lightning has no other word.
        state_dict_type: "full": one file, written by rank 0; "sharded": a folder, written by all ranks.
    """

    checkpoint_weights_only: bool | None
    optimizers: Any
    state_dict_type: str
    _late: tuple[Mapping[str, Any], bool] | None = None  # a checkpoint for the end of `setup`

    # -- saving ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._is_sharded:
            return {}  # save_checkpoint writes it from where it is
        return masters_of(self.lightning_module, self.is_distributed, for_file=_is_for_file())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, self._home.core.optimizer.LightningOptimizer):
            optimizer = optimizer.optimizer
        engine = self.engine
        if self._is_sharded:
            return {}
        if engine is not None and engine.optimizer is optimizer:  # the masters are beside it
            return states_of(engine, self.is_distributed, for_file=_is_for_file())
        return optimizer.state_dict()

    @property
    def _is_sharded(self) -> bool:
        return self.state_dict_type == "sharded"

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        filepath = self.broadcast(filepath)
        if not self._is_sharded:
            self._save_file(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError(
                "GeminiStrategy(state_dict_type='sharded') writes a folder by itself: storage_options have no use"
            )
        if self.engine is None:
            raise gs.GeminiError(
                f"{filepath}: GeminiStrategy(state_dict_type='sharded') saves what an engine has; no stage has begun"
            )
        runtime = self.engine._runtime
        has_average = "current_model_state" in checkpoint  # and that is what the engine has
        left = ("optimizer_states", "current_model_state" if has_average else "state_dict")
        meta = {k: v for k, v in checkpoint.items() if k not in left}
        has_thread = isinstance(self.checkpoint_io, self._home.plugins.AsyncCheckpointIO)
        target, has_optimizer = folders.local(filepath), "optimizer_states" in checkpoint
        wanted = Wanted(target, meta=meta, with_optimizer=has_optimizer, replaces_files=True)
        (save_in_background if has_thread else save)(runtime, wanted)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Not before the one that takes its place is on the disk."""
        saving = None if self.engine is None else self.engine._runtime.saving
        if saving is None:
            super().remove_checkpoint(filepath)  # type: ignore[misc]
        elif self.is_global_zero:
            saving.then(lambda: self.checkpoint_io.remove_checkpoint(filepath))

    def _end_saving(self) -> None:
        """What is written in the background is on the disk, or its error is raised."""
        if self.engine is not None:
            self.engine._runtime.end_saving()

    def _save_file(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        def write() -> None:
            if not self._write_plain(checkpoint, filepath, storage_options):
                with folders.aside(Path(filepath)):
                    super(Checkpoints, self).save_checkpoint(  # type: ignore[misc]
                        checkpoint, filepath, storage_options=storage_options
                    )

        self._on_rank_0("Trainer.save_checkpoint", filepath, write)

    # -- loading ---------------------------------------------------------------------------------------------

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if weights_only is None:
            weights_only = self.checkpoint_weights_only
        self._end_saving()
        path = Path(checkpoint_path)
        if path.is_dir() or (not path.exists() and folders.left_of(path)):
            return self._load_folder(Path(checkpoint_path), weights_only)
        if self._has_plain_io and is_mappable(checkpoint_path):
            return load_mapped(checkpoint_path, weights_only)
        return super().load_checkpoint(  # type: ignore[misc,no-any-return]
            checkpoint_path, weights_only=weights_only
        )

    def _load_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        """All but the engine's state, for which there is none yet."""
        folder = folders.find(path)
        checkpoint = torch.load(folder / META, map_location="cpu", weights_only=weights_only)
        if "pytorch-lightning_version" not in checkpoint:
            raise gs.GeminiError(
                f"{path} was saved by engine.save(): a Trainer goes on from what a Trainer has saved"
            )
        has_optimizer = "optimizer" in Manifest(folder).rest
        states = [InFolder(folder)] if has_optimizer else []
        weights = "current_model_state" if "state_dict" in checkpoint else "state_dict"
        return {**checkpoint, weights: InFolder(folder), "optimizer_states": states}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        is_blank = any(parameter.is_meta for parameter in module.parameters())
        is_in_folder = isinstance(checkpoint["state_dict"], InFolder)
        if not is_blank and not is_in_folder and self._weights_of(module) is None:
            _untie(module, checkpoint["state_dict"])
            _widen(module, checkpoint["state_dict"])
            super().load_model_state_dict(checkpoint, strict=strict)  # type: ignore[misc]
            return
        self._late = checkpoint, strict
        if is_in_folder and self.engine is not None:
            self._load_late(module)  # who asks may remove the folder next, as a finder does

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        if not states:  # saved where no optimizer was made: there is nothing to go on from
            return
        if len(states) != len(self.optimizers):
            raise RuntimeError(
                f"The checkpoint holds the state of {len(states)} optimizers, but strategy='gemini' trains with"
                f" {len(self.optimizers)}. To start with fresh optimizer state, load the weights only:"
                " model = type(model).load_from_checkpoint(path)."
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            if isinstance(state, InFolder):
                load(self.engine._runtime, state.folder, {"optimizer", "random"})
            else:
                optimizer.load_state_dict(state)

    def _load_late(self, module: nn.Module) -> None:
        """The end of `setup`: what had to wait (invariant 3)."""
        self._loaded.add(module)
        late, self._late = self._late, None
        if late is not None and isinstance(late[0]["state_dict"], InFolder):
            load(self.engine._runtime, late[0]["state_dict"].folder, {"model"})
        elif late is not None:
            super().load_model_state_dict(late[0], strict=late[1])  # type: ignore[misc]


def _is_for_file() -> bool:
    """Whether a Trainer makes a checkpoint: others keep what they get, perhaps for longer than the engine lives."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return str(caller).endswith(".checkpoint_connector")


def _untie(module: nn.Module, state: Any) -> None:
    """What `on_load_checkpoint` took from the module itself is copied: the Trainer keeps it until manage() has come."""
    memory = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in memory:
            state[name] = value.clone()


@torch.no_grad()
def _widen(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Parameters in half precision take fp32 values whole (invariant 4); manage() rounds them, and keeps the rest."""
    wide = {n for n, v in state.items() if isinstance(v, Tensor) and v.dtype is torch.float32}
    if not wide:
        return
    for name, parameter in module.named_parameters(remove_duplicate=False):
        is_half = parameter.dtype in (torch.float16, torch.bfloat16)
        # Of those that are trained no name is asked: the module may have names of its own for what is saved.
        is_meant = parameter.requires_grad or name in wide
        if is_half and is_meant and not hasattr(parameter, "_gm_slot"):
            parameter.data = parameter.data.float()
