# What the Lightning tests share: a small module per Lightning tree, quiet Trainers, and the unmanaged reference.
"""The reference is a plain Trainer with `gs.cast_model_` and `gs.HybridAdam` alone: the same arithmetic, no engine."""

import functools
import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gemini_strategy as gs
import gemini_strategy.lightning

# Tiny operations: threads would only wait for each other.
torch.set_num_threads(1)

TREES = ("lightning", "pytorch_lightning")
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


def load_tree(name: str) -> ModuleType:
    return importlib.import_module({"lightning": "lightning.pytorch"}.get(name, name))


def load_fabric(name: str) -> ModuleType:
    return importlib.import_module({"lightning": "lightning.fabric"}.get(name, "lightning_fabric"))


@functools.cache
def module_class(tree: str) -> type:
    """The LightningModule class of a tree. It meets a tied use of a parameter, dropout, an unused and a frozen one."""
    pl = load_tree(tree)

    class Case(pl.LightningModule):
        def __init__(
            self,
            reference: bool = False,
            optimizer: str = "HybridAdam",
            lr: float = 1e-2,
            schedule: str | None = None,
            clip_with: str = "engine",
            steps_are_manual: bool = False,
            build: str = "init",
            batch_size: int = 4,
            width: int = 33,
        ) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.reference = reference
            self.optimizer_name = optimizer
            self.lr = lr
            self.batch_size = batch_size
            self.width = width
            self.schedule = schedule
            self.clip_with = clip_with
            self.automatic_optimization = not steps_are_manual
            self.losses: list[float] = []
            self.seen: list[str] = []
            self.body: nn.Module | None = None
            self.gain = nn.Parameter(torch.ones(16))
            self.unused = nn.Parameter(torch.full((3,), 0.5))
            self.frozen = nn.Parameter(torch.linspace(-1, 1, 16), requires_grad=False)
            self.register_buffer("offset", torch.linspace(0, 1, 16))
            if build == "init":
                self.build()

        def build(self) -> None:
            if self.body is None:
                self.body = nn.Sequential(
                    nn.Embedding(32, 16),
                    nn.Linear(16, self.width),
                    nn.GELU(),
                    nn.LayerNorm(self.width),
                    nn.Dropout(0.1),
                    nn.Linear(self.width, 16),
                )

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.body(tokens) * self.gain + self.frozen
            return hidden @ self.body[0].weight.t()

        def loss(self, batch: Any) -> Tensor:
            tokens, scale = batch
            logits = self(tokens)
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten(), reduction="none"
            )
            return (losses * scale.float().flatten()).mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss = self.loss(batch)
            self.losses.append(float(loss.detach()))
            self.log("train_loss", loss.detach())
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            parameters = [p for p in self.parameters() if p.requires_grad]
            groups = [
                {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ]
            kind = {"HybridAdam": gs.HybridAdam, "CPUAdam": gs.CPUAdam}.get(self.optimizer_name)
            optimizer = (kind or getattr(torch.optim, self.optimizer_name))(groups, lr=self.lr)
            if self.schedule is None:
                return optimizer
            scheduler = {
                "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(
                    optimizer, 3e-2, total_steps=12
                ),
                "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
            }[self.schedule]()
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            if not self.reference or not gradient_clip_val:
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            elif gradient_clip_algorithm == "value":
                nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
            else:
                unwrapped(optimizer).clip_grad_norm_(gradient_clip_val)

        def train_dataloader(self) -> DataLoader:
            return loader(11, self.batch_size)

        def val_dataloader(self) -> DataLoader:
            return loader(2)

        def test_dataloader(self) -> DataLoader:
            return loader(3)

        def predict_dataloader(self) -> DataLoader:
            return loader(2)

    return Case


@functools.cache
def late_module_class(tree: str, hook: str) -> type:
    """The same module, built in `configure_model` or `configure_sharded_model`."""

    def hook_body(self: Any) -> None:
        self.build()

    base = module_class(tree)
    return type("Late", (base,), {hook: hook_body})


def loader(batches: int, batch_size: int = 4) -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 32, (batches * 4, 8), generator=generator)
    scale = torch.rand(batches * 4, 8, generator=generator) + 0.5
    # Its own generator: an iterator draws a seed when it is made, which must not move dropout's stream.
    return DataLoader(TensorDataset(tokens, scale), batch_size=batch_size, generator=generator)


def make(tree: str, seed: int = 0, hook: str | None = None, **options: Any) -> Any:
    torch.manual_seed(seed)
    if hook is not None:
        return late_module_class(tree, hook)(build="late", **options)
    return module_class(tree)(**options)


def make_reference(tree: str, precision: str, seed: int = 0, **options: Any) -> Any:
    module = make(tree, seed, reference=True, **options)
    cast_reference(module, precision)
    return module


def cast_reference(module: nn.Module, precision: str) -> None:
    """gs.cast_model_; what is frozen has its values from before as `original`, for `reference_weights`."""
    originals = {p: p.detach().clone() for p in module.parameters() if not p.requires_grad}
    gs.cast_model_(module, precision)
    for parameter, original in originals.items():
        parameter.original = original


def make_trainer(tree: str, strategy: Any = "gemini", **options: Any) -> Any:
    options = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        **options,
    }
    return load_tree(tree).Trainer(strategy=strategy, **options)


def ranked_trainer(
    rank: int, size: int, tree: str = "lightning", strategy: Any = "gemini", **options: Any
) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)  # the test has started the processes
    return make_trainer(tree, strategy, devices=size, **options)


def fit(
    tree: str,
    module: Any,
    strategy: Any = "gemini",
    seed: int = 1,
    ckpt_path: Any = None,
    **options: Any,
) -> Any:
    trainer = make_trainer(tree, strategy, **options)
    torch.manual_seed(seed)
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def make_reference_trainer(tree: str, precision: str = "32-true", **options: Any) -> Any:
    if precision != "bf16-true":
        return make_trainer(tree, "auto", precision=precision, **options)

    class KeepBuffers(load_tree(tree).plugins.HalfPrecision):
        """Lightning's plugin, but the module, cast already, keeps its buffers' dtypes."""

        def convert_module(self, module: nn.Module) -> nn.Module:
            return module

    return make_trainer(tree, "auto", plugins=[KeepBuffers("bf16-true")], **options)


def fit_reference(
    tree: str, module: Any, seed: int = 1, ckpt_path: Any = None, **options: Any
) -> Any:
    trainer = make_reference_trainer(tree, **options)
    torch.manual_seed(seed)
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def unwrapped(optimizer: Any) -> Any:
    return getattr(optimizer, "optimizer", optimizer)


def reference_weights(module: Any, optimizer: Any) -> dict[str, Tensor]:
    """state_dict with every parameter that was trained as its fp32 master, and what was frozen as it came."""
    weights = dict(module.state_dict())
    for name, parameter in module.named_parameters(remove_duplicate=False):
        data = parameter.detach()
        if not parameter.requires_grad and hasattr(parameter, "original"):
            same(parameter.original.to(data.dtype), data, f"{name}, which is frozen")
            weights[name] = parameter.original
            continue
        state = unwrapped(optimizer).state.get(parameter, {})
        if data.dtype == torch.bfloat16:
            low = state.get("remainder", getattr(parameter, "_gm_low", None))
            bits = (data.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)
            data = bits.view(torch.float32)
        elif data.dtype == torch.float16:
            data = state.get("master", getattr(parameter, "_gm_low", None))
        weights[name] = data
    return weights


def same(left: Any, right: Any, where: str = "") -> None:
    """Assert equality, bit for bit, of nested tensors and values."""
    if isinstance(left, dict):
        assert isinstance(right, dict) and list(left) == list(right), (
            f"{where}: {list(left)} != {list(right)}"
        )
        for key in left:
            same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            same(*pair, f"{where}[{index}]")
    elif isinstance(left, Tensor):
        assert isinstance(right, Tensor), where
        assert left.dtype == right.dtype and left.shape == right.shape, (
            f"{where}: {left.dtype}{tuple(left.shape)} != {right.dtype}{tuple(right.shape)}"
        )
        equal = (
            torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
            if (left.numel() and left.ndim)
            else torch.equal(left, right)
        )
        assert equal, f"{where}: differs, largest by {(left.double() - right.double()).abs().max()}"
    else:
        assert left == right, f"{where}: {left!r} != {right!r}"


def same_training(trainer: Any, module: Any, reference_trainer: Any, reference: Any) -> None:
    """Assert that losses, weights (fp32 masters) and Adam's state are those of the reference, bit for bit."""
    same(module.losses, reference.losses, "losses")
    optimizer = reference_trainer.optimizers[0]
    same(
        trainer.strategy.lightning_module_state_dict(),
        reference_weights(reference, optimizer),
        "weights",
    )
    same_adam(
        trainer.strategy.optimizer_state(trainer.optimizers[0]), unwrapped(optimizer).state_dict()
    )


def same_adam(left: dict[str, Any], right: dict[str, Any]) -> None:
    names = ("step", "exp_avg", "exp_avg_sq")
    pick = {
        side: {
            int(i): {n: torch.as_tensor(state[n]).float() for n in names}
            for i, state in sd["state"].items()
        }
        for side, sd in (("left", left), ("right", right))
    }
    for index in (
        pick["left"].keys() - pick["right"].keys()
    ):  # never updated: only what its weight lacks
        assert not any(value.count_nonzero() for value in pick["left"].pop(index).values()), index
    same(dict(sorted(pick["left"].items())), dict(sorted(pick["right"].items())), "adam")
    for ours, theirs in zip(left["param_groups"], right["param_groups"], strict=True):
        for key in ("lr", "betas", "eps", "weight_decay", "params"):
            assert ours[key] == theirs[key], f"param_groups {key}: {ours[key]} != {theirs[key]}"


# ---- several ranks: gradients that add up exactly, in any order and precision --------------------

RANK_BATCH = 4  # samples of one rank in one micro-batch


@functools.cache
def summable_class(tree: str) -> type:
    """A module whose gradients are small integers, whatever its weights are: the loss is linear in them.

    Its reference sees the batches of `n_ranks` ranks at once and divides by their number as the engine does.
    """
    pl = load_tree(tree)

    class Summable(pl.LightningModule):
        def __init__(
            self,
            n_ranks: int = 1,
            is_reference: bool = False,
            n_batches: int = 6,
            lr: float = 1e-2,
            is_late: bool = False,
            is_manual: bool = False,
            overflows_on: int = -1,
        ) -> None:
            super().__init__()
            self.n_ranks = n_ranks
            self.is_reference = is_reference
            self.n_batches = n_batches
            self.lr = lr
            self.automatic_optimization = not is_manual
            self.overflows_on = overflows_on
            self.seen: list[int] = []
            self.layers: nn.ModuleList | None = None
            if not is_late:
                self.build()

        def build(self) -> None:
            if self.layers is None:
                self.embedding = nn.Embedding(8, 6)
                self.layers = nn.ModuleList(nn.Linear(6, width) for width in (5, 33, 6, 7))
                self.norm = nn.Linear(6, 8, bias=False)
                self.norm.weight = self.embedding.weight  # tied
                self.unused = nn.Parameter(torch.full((3,), 0.5))
                self.frozen = nn.Parameter(torch.linspace(-1, 1, 6), requires_grad=False)
                self.register_buffer("steps", torch.zeros(()))

        def loss(self, numbers: Tensor) -> Tensor:
            tokens = numbers % 8
            inputs = (numbers[:, None] * torch.arange(1, 7, device=numbers.device)) % 5 - 2.0
            total = (self.embedding(tokens) * inputs).float().sum()
            for index, layer in enumerate([*self.layers, self.norm]):
                outputs = layer(inputs.to(layer.weight.dtype))
                columns = torch.arange(outputs.shape[1], device=numbers.device)
                factors = (numbers[:, None] + columns) % (index + 2) - 1.0
                total = total + (outputs.float() * factors).sum()
            return total / (RANK_BATCH * 4)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            numbers = batch[0]
            self.seen += numbers.tolist()
            loss = self.loss(numbers)
            if batch_idx == 2 and self.overflows_on == self.global_rank:
                loss = loss * float("inf")
            # Each rank's own mean, whose mean is this; the loss that is minimised is not divided by the ranks.
            self.log(
                "loss", loss.detach() / (self.n_ranks if self.is_reference else 1), sync_dist=True
            )
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", batch[0].float().mean() + self.loss(batch[0]), sync_dist=True)

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layers[0](batch[0][:, None] * torch.ones(6).to(self.layers[0].weight.dtype))

        def configure_optimizers(self) -> Any:
            groups = [
                {"params": [p for p in self.parameters() if p.requires_grad and p.ndim > 1]},
                {
                    "params": [p for p in self.parameters() if p.requires_grad and p.ndim <= 1],
                    "weight_decay": 0.0,
                },
            ]
            return gs.HybridAdam(groups, lr=self.lr, weight_decay=0.1)

        def _loader(self, batches: int, is_training: bool = False) -> DataLoader:
            n_ranks = self.n_ranks if self.is_reference else 1
            data = TensorDataset(torch.arange(batches * RANK_BATCH * self.n_ranks) * 7 + 3)
            # Ranks get Lightning's sampler, which shuffles: this is the order that they have together.
            is_alone = is_training and self.is_reference
            sampler = DistributedSampler(data, num_replicas=1, rank=0) if is_alone else None
            return DataLoader(data, batch_size=RANK_BATCH * n_ranks, sampler=sampler)

        def train_dataloader(self) -> DataLoader:
            return self._loader(self.n_batches, is_training=True)

        def val_dataloader(self) -> DataLoader:
            return self._loader(2)

        def predict_dataloader(self) -> DataLoader:
            return self._loader(2)

    return Summable


@functools.cache
def late_summable_class(tree: str) -> type:
    class Late(summable_class(tree)):
        def configure_model(self) -> None:
            self.build()

    return Late


@functools.cache
def reference_summable_class(tree: str) -> type:
    class Reference(summable_class(tree)):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            power = 2 ** (self.n_ranks.bit_length() - 1)
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(power).div_(self.n_ranks / power)

        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            if gradient_clip_val and gradient_clip_algorithm == "value":
                nn.utils.clip_grad_value_(self.parameters(), gradient_clip_val)
            elif gradient_clip_val:
                unwrapped(optimizer).clip_grad_norm_(gradient_clip_val)

    return Reference


def summable(tree: str, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    if options.get("is_reference"):
        return reference_summable_class(tree)(**options)
    return (late_summable_class if options.get("is_late") else summable_class)(tree)(**options)
