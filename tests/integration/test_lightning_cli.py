"""LightningCLI: the strategy by its class in YAML, its arguments, an optimizer of torch's by its class."""

from __future__ import annotations

from pathlib import Path

from helpers import scripts
from helpers.lean import without_unused

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  precision: 32-true
  max_steps: 4
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy:
    class_path: gemini_strategy.lightning.GeminiStrategy
    init_args:
      device_budget: 1MB
      chunk_size: 8192
      placement_policy: cpu
model:
  width: 48
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.01
"""


PROGRAM = """
import sys
assert "gemini_strategy.lightning" not in sys.modules
import torch
from torch import nn
from torch.utils.data import DataLoader
from {tree}.cli import LightningCLI
from {tree} import LightningModule

class Module(LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch):
        return self.layers(batch).square().mean()

    def train_dataloader(self):
        data = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
        return DataLoader(data, batch_size=8)

sys.argv = ["train.py", "fit", "--config", "config.yaml"]
done = LightningCLI(Module, save_config_callback=None, seed_everything_default=1)
arguments = done.trainer.strategy.engine_arguments
assert type(done.trainer.strategy).__name__ == "GeminiStrategy"
assert arguments["placement_policy"] == "cpu" and arguments["device_budget"] == "1MB"
assert done.trainer.global_step == 4
torch.manual_seed(3)
assert not torch.equal(done.model.layers[0].weight, nn.Linear(16, 48).weight)
"""


def test_a_config_file_names_the_strategy(tree: str, tmp_path: Path) -> None:
    """Without an import of the strategy: its class path is one."""
    module = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}[tree]
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "train.py").write_text(PROGRAM.replace("{tree}", module))
    # The adapter prefers the tree that was imported first.
    imported = (module,) if tree == "lightning" else ()
    paths = [without_unused(tmp_path), ROOT]
    done = scripts.run(tmp_path, ["train.py"], imported=imported, paths=paths)
    assert done.returncode == 0, done.stderr[-3000:]
