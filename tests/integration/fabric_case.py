# What the Fabric tests share: a small model, a loop, a quiet Fabric, and the same loop without Lightning.

import os
from typing import Any

import torch
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.lightning import fabric_strategy_class
from lightning_case import load_fabric

STEPS = 6
SCALE = 2.0**8  # a loss scale at which gradients do not overflow


class Net(nn.Module):
    """It meets a tied use of a parameter, dropout, an unused and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.body = nn.Sequential(
            nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Dropout(0.1), nn.Linear(33, 16)
        )
        self.gain = nn.Parameter(torch.ones(16))
        self.unused = nn.Parameter(torch.full((3,), 0.5))
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 16), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.body(self.embedding(tokens)) * self.gain + self.frozen
        return hidden @ self.embedding.weight.t()


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def hybrid_adam(model: nn.Module) -> Any:
    return gs.HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batch(step: int) -> Tensor:
    return torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), tokens.roll(1, 1).flatten(), label_smoothing=0.1
    )


def make_fabric(tree: str = "lightning", strategy: Any = "gemini", **options: Any) -> Any:
    options = {"accelerator": "cpu", "devices": 1, **options}
    if options.get("precision") == "16-mixed":  # Lightning's rule for a CPU makes it bf16-mixed
        del options["precision"]
        options["plugins"] = [load_fabric(tree).plugins.MixedPrecision("16-mixed", "cpu")]
        if strategy == "gemini":
            strategy = fabric_strategy_class(tree)(initial_scale=SCALE)
    fabric = load_fabric(tree).Fabric(strategy=strategy, **options)
    fabric.launch()
    return fabric


def ranked_fabric(rank: int, size: int, tree: str = "lightning", **options: Any) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)  # the test has started the processes
    return make_fabric(tree, devices=size, **options)


def single_device(tree: str, precision: str) -> Any:
    return make_fabric(tree, "auto", precision=precision)


def train(
    fabric: Any,
    model: Any,
    optimizer: Any,
    steps: int = STEPS,
    first: int = 0,
    accumulate: int = 1,
    clip: Any = None,
    backward: Any = None,
) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        for micro in range(accumulate):
            tokens = batch(step * accumulate + micro)
            is_last = micro == accumulate - 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = loss_of(model(tokens), tokens)
                (backward or fabric.backward)(loss / accumulate)
            losses.append(float(loss.detach()))
        if clip is not None:
            clip(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def managed_loop(precision: str, accumulate: int = 1, clip: Any = None, **how: Any) -> Any:
    """The engine and the losses of a loop without Lightning."""
    model = net()
    optimizer = hybrid_adam(model)
    how = {"initial_scale": SCALE, **how}
    engine = gs.manage(model, optimizer, precision=precision, device="cpu", **how)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        for micro in range(accumulate):
            tokens = batch(step * accumulate + micro)
            loss = loss_of(model(tokens), tokens)
            engine.backward(loss / accumulate)
            losses.append(float(loss.detach()))
        if clip is not None:
            clip(engine)
        optimizer.step()
        optimizer.zero_grad()
    return engine, losses


def state_of(model: Any) -> dict[str, Any]:
    return gs.engine_of(model).state_dict()


def close(*models: nn.Module) -> None:
    for model in models:
        gs.engine_of(model).close()
