"""`initialize`: an engine that is called like the model, with the criterion beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini_strategy.arguments import Arguments
from gemini_strategy.colossalai.launch import global_context
from gemini_strategy.colossalai.zero import TensorShardStrategy, init_seed
from gemini_strategy.precision import LOSS_SCALING
from gemini_strategy.weights.loading import Weights
from gemini_strategy.wrapper import WrappedModule, WrappedOptimizer, refuse

# zero=dict(model_config=...): each key with the one value that is taken, and why.
_MODEL = {
    "reduce_scatter_bucket_size_mb": (25, "a chunk's gradients are reduced as a whole"),
    "gradient_predivide_factor": (
        1.0,
        "gradients are divided before the sum by the ranks' power of two",
    ),
    "reuse_fp16_shard": (False, "gradients have places of their own"),
    "use_memory_tracer": (False, "the first step is traced in any case"),
    "process_group": (None, "give initialize(mesh=...)"),
    "reduce_scatter_process_group": (None, "give initialize(mesh=...)"),
}
_OPTIMIZER = {
    "cpu_offload": (None, "tensor_placement_policy of model_config says where states are"),
    "keep_unshard": (False, "the ranks share every chunk"),
    "verbose": (False, "give initialize(verbose=True)"),
    "dp_process_group": (None, "give initialize(mesh=...)"),
    "mp_process_group": (None, "there is data parallelism alone"),
}  # fmt: skip


@dataclass(eq=False, repr=False)
class TrainingEngine:
    """A model, its optimizer and its criterion: `engine(data)`, `engine.backward(loss)`, `engine.step()`.

    Attributes:
        model: the wrapped model; `model.engine` is the Engine of manage().
        optimizer: the wrapped optimizer.
        criterion: as it was given.
    """

    model: WrappedModule
    optimizer: WrappedOptimizer
    _criterion: Callable[..., Any] | None
    accumulation: int
    _n_backwards: int = 0

    @property
    def criterion(self) -> Callable[..., Any]:
        if self._criterion is None:
            raise ValueError("engine.criterion: initialize() was given none")
        return self._criterion

    @property
    def training(self) -> bool:
        return self.model.training

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def train(self) -> None:
        self.model.train()

    def eval(self) -> None:
        self.model.eval()

    @property
    def is_between(self) -> bool:
        """Whether micro-batches of a step are still to come."""
        return self._n_backwards % self.accumulation != 0

    def zero_grad(self) -> None:
        """Drops the gradients; between micro-batches of a step it does nothing."""
        if not self.is_between:
            self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """The loss's gradients, scaled for fp16; with gradient_accumulation=N a Nth of them."""
        self.optimizer.backward(loss if self.accumulation == 1 else loss / self.accumulation)
        self._n_backwards += 1

    def step(self) -> Any:
        """Clips if the configuration says so, and updates; with gradient_accumulation=N every Nth time."""
        return None if self.is_between else self.optimizer.step()

    def close(self) -> nn.Module:
        """The model, ordinary again, with the trained weights."""
        return self.model.close()


class _Schedule:
    """A scheduler of steps, stepped once per micro-batch."""

    def __init__(self, schedule: Any, engine: TrainingEngine) -> None:
        self._schedule = schedule
        self._engine = engine

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._engine.is_between:
            self._schedule.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    criterion: Callable[..., Any] | None = None,
    train_dataloader: Any = None,
    test_dataloader: Any = None,
    lr_scheduler: Any = None,
    ophooks: None = None,
    verbose: bool = False,
    *,
    device_budget: int | float | str | None = None,
    host_budget: int | float | str | None = None,
    precision: str | None = None,
    weights: Weights | None = None,
    mesh: Any = None,
) -> tuple[TrainingEngine, Any, Any, Any]:
    """The engine, and loaders and schedule as they were given (several ranks: give the loader a DistributedSampler).

    Of the configuration of launch_from_torch it reads `zero` (model_config, optimizer_config), `fp16`,
    `gradient_accumulation` and `clip_grad_norm`.

    Args:
        model: in place; best built inside ZeroInitContext.
        optimizer: over its parameters.
        criterion: for engine.criterion.
        train_dataloader, test_dataloader: returned.
        lr_scheduler: returned; with accumulation it counts steps, not micro-batches.
        ophooks: None; module hooks of torch take their place.
        verbose: print the plan's table.
        device_budget, host_budget, weights, mesh: as manage() has them.
        precision: as manage() has it; None: "16-mixed" with `zero` or `fp16` in the configuration, else "32-true".

    Raises:
        ValueError: a key of the configuration is refused, by name.
    """
    refuse("initialize", locals(), {"ophooks": (None, "register hooks on the modules themselves")})
    config = global_context.config
    zero = config.get("zero")
    fp16 = config.get("fp16")
    arguments = {} if zero is None else _model_arguments(zero.get("model_config", {}))
    more = _optimizer_arguments((zero or {}).get("optimizer_config", {}), arguments)
    more |= _fp16_arguments(fp16 or {})
    count = {"gradient_accumulation": config.get("gradient_accumulation", 1)}
    Arguments("config", count).check_count("gradient_accumulation")
    if precision is None:
        precision = "32-true" if zero is None and fp16 is None else "16-mixed"
    wrapped = WrappedModule(
        model,
        precision=precision,
        device_budget=device_budget,
        host_budget=host_budget,
        weights=weights,
        mesh=mesh,
        report=verbose or None,
        **arguments,
    )
    seed = init_seed(model)
    with contextlib.ExitStack() as stack:
        if seed is not None:  # initial values are drawn with that of the model's ZeroInitContext
            stack.enter_context(torch.random.fork_rng([]))
            torch.manual_seed(seed)
        taken = WrappedOptimizer(
            wrapped, optimizer, max_norm=config.get("clip_grad_norm") or 0.0, **more
        )
    engine = TrainingEngine(wrapped, taken, criterion, count["gradient_accumulation"])
    if lr_scheduler is not None and engine.accumulation > 1:
        lr_scheduler = _Schedule(lr_scheduler, engine)
    return engine, train_dataloader, test_dataloader, lr_scheduler


def _check_keys(
    where: str,
    given: Mapping[str, Any],
    names: tuple[str, ...],
    fixed: Mapping[str, tuple[Any, str]],
) -> None:
    """Refuses keys that are neither of `names` nor fixed, and other values of those that are."""
    _known(where, given, (*names, *fixed))
    refuse(where, {name: value for name, (value, _) in fixed.items()} | dict(given), fixed)


def _known(where: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(
            f"config: {where} has no {unknown[0]!r}; it has {', '.join(sorted(names))}"
        )


def _model_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of manage() for zero=dict(model_config=given)."""
    where = "zero.model_config"
    own = ("shard_strategy", "tensor_placement_policy", "fp32_reduce_scatter", "offload_config")
    _check_keys(where, given, own, _MODEL)
    strategy = given.get("shard_strategy")
    if not isinstance(strategy, TensorShardStrategy):
        raise ValueError(f"{where}(shard_strategy={strategy!r}): expected a TensorShardStrategy().")
    policy = given.get("tensor_placement_policy")
    offload = given.get("offload_config")
    if offload is not None:
        if offload != {"device": "cpu"} or policy not in (None, "cpu"):
            raise ValueError(
                f"{where}(offload_config={offload!r}, tensor_placement_policy={policy!r}): only dict(device='cpu') is "
                "taken, which is tensor_placement_policy='cpu'."
            )
        policy = "cpu"
    return {
        "placement_policy": "cuda" if policy is None else policy,
        "gradient_dtype": torch.float32 if given.get("fp32_reduce_scatter") else None,
    }


def _optimizer_arguments(given: Mapping[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The same for zero=dict(optimizer_config=given)."""
    where = "zero.optimizer_config"
    if given.get("cpu_offload") and model.get("placement_policy") == "cpu":
        given = {name: value for name, value in given.items() if name != "cpu_offload"}
    _check_keys(where, given, ("gpu_margin_mem_ratio", *LOSS_SCALING), _OPTIMIZER)
    found = {name: given[name] for name in LOSS_SCALING if name in given}
    margin = given.get("gpu_margin_mem_ratio")
    if margin is not None and (margin or model.get("placement_policy") == "auto"):
        found["gpu_margin_mem_ratio"] = float(margin)
    return found


def _fp16_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same for fp16=given; `mode` says nothing more, as there is one way to train in fp16."""
    _known("fp16", given, ("mode", "init_scale", *LOSS_SCALING))
    found = {name: given[name] for name in LOSS_SCALING if name in given}
    if "init_scale" in given:
        found["initial_scale"] = given["init_scale"]
    return found
