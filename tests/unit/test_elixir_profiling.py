"""cuda_memory_profiling: bytes by hand, what estimate() says, a model of 175 G parameters, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.elixir import cuda_memory_profiling
from gemini_strategy.report.tables import host_peak_bytes
from helpers import profiled

PRECISION = {torch.float32: "32-true", torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}


def opt(layers: int, hidden: int, words: int, *, is_tied: bool = True, checkpoints: bool) -> Any:
    config = transformers.OPTConfig(
        vocab_size=words,
        hidden_size=hidden,
        word_embed_proj_dim=hidden,
        ffn_dim=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128 or 1,
        max_position_embeddings=2048,
        tie_word_embeddings=is_tied,
        dropout=0.0,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.OPTForCausalLM(config).train()
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def opt_bytes(
    layers: int, hidden: int, words: int, dtype: torch.dtype, *, is_tied: bool = True
) -> int:
    """Norms keep fp32 beside autocast. Two rows of positions are for padding."""
    norms = (2 * layers + 1) * 2 * hidden
    each = 4 * (hidden + 1) * hidden + (hidden + 1) * 4 * hidden + (4 * hidden + 1) * hidden
    others = layers * each + (words * (1 if is_tied else 2) + 2048 + 2) * hidden
    return 4 * norms + dtype.itemsize * others


def tokens(n: int) -> dict[str, Tensor]:
    ids = torch.empty(1, n, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, inp: dict[str, Tensor]) -> Tensor:
    loss = model(**inp).loss
    loss.backward()
    return loss  # as Elixir's examples do; it is not run backward again


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize(("is_tied", "checkpoints"), [(False, False), (True, False), (True, True)])
def test_bytes_of_a_transformer(is_tied: bool, checkpoints: bool, dtype: torch.dtype) -> None:
    def model() -> Any:
        return opt(3, 32, 50, is_tied=is_tied, checkpoints=checkpoints)

    found = cuda_memory_profiling(model(), tokens(16), step, dtype)
    assert found.param_occ == found.grad_occ == opt_bytes(3, 32, 50, dtype, is_tied=is_tied)
    assert found.buffer_occ == 0
    forecast = gs.estimate(
        model(), tokens(16), gpu="h100", device_budget="4GB", precision=PRECISION[dtype]
    )
    assert found.activation_occ == forecast.activation_bytes


class Odd(nn.Module):
    """Buffers, a frozen weight, an unused one, and a product whose memory is plain to see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 512, bias=False)
        self.norm = nn.BatchNorm1d(512)
        self.frozen = nn.Parameter(torch.ones(512), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(512))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.frozen


def odd_step(model: nn.Module, inp: Tensor) -> None:
    model(inp).sum().backward()


def test_every_byte_by_hand() -> None:
    found = cuda_memory_profiling(Odd(), torch.empty(64, 256), odd_step)
    assert found.param_occ == 4 * (256 * 512 + 2 * 512 + 2 * 512)
    assert found.grad_occ == 4 * 256 * 512
    assert found.buffer_occ == 4 * 2 * 512 + 8
    # At the end of the backward: the inputs, the product's gradient, the weight's, the loss and its gradient.
    assert found.activation_occ == 4 * (64 * 256 + 64 * 512 + 256 * 512) + 2 * 512


#: MB that torch's allocator gave on an H100 (benchmarks/results/h100_2026-11-23.md), and what each of them is about.
MEASURED = [
    ("gpt2", torch.float32, False, 13610.2),  # dropout's masks
    ("gpt2", torch.bfloat16, True, 5135.6),
    ("llama", torch.float32, False, 25796.6),  # grouped heads without flash attention
    ("bert", torch.bfloat16, False, 11545.0),  # a softmax that casts
    ("bert", torch.bfloat16, True, 5794.8),
]


@pytest.mark.parametrize(("name", "dtype", "checkpoints", "measured"), MEASURED)
def test_what_a_gpu_took(name: str, dtype: torch.dtype, checkpoints: bool, measured: float) -> None:
    model = profiled.made(name, "meta", checkpoints=checkpoints)
    inputs = profiled.tokens(name, "meta")
    found = cuda_memory_profiling(model, inputs, profiled.step, dtype)
    assert found.activation_occ / 1e6 == pytest.approx(measured, rel=1e-3)


def test_the_model_is_as_before() -> None:
    model = Odd()
    before = {**model.state_dict(keep_vars=True)}
    cuda_memory_profiling(model, torch.empty(64, 256), odd_step, torch.bfloat16)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
    assert all(p.grad is None and p.dtype is torch.float32 for p in model.parameters())
    assert "forward" not in vars(model) and not model.layer._forward_hooks
    model(torch.randn(2, 256)).sum().backward()


def test_a_model_of_175_billion_parameters() -> None:
    """OPT-175B's shape; each layer more keeps its input and nothing else."""
    size, few, all_layers = 12288, 8, 96
    before = host_peak_bytes()
    small, large = (
        cuda_memory_profiling(
            opt(layers, size, 50272, checkpoints=True), tokens(2048), step, torch.float16
        )
        for layers in (few, all_layers)
    )
    assert large.param_occ == large.grad_occ == opt_bytes(all_layers, size, 50272, torch.float16)
    assert large.param_occ > 349e9
    assert large.activation_occ - small.activation_occ == (all_layers - few) * 2048 * size * 2
    assert host_peak_bytes() - before < 1e9


ASKS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": float,
    "numpy": lambda loss: loss.detach().cpu().numpy(),
    "format": lambda loss: f"{loss:.3f}",
    "comparison": lambda loss: bool(loss > 0),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_step_that_asks_for_values_is_refused(name: str) -> None:
    def asking(model: nn.Module, inp: Tensor) -> None:
        loss = model(inp).sum()
        loss.backward()
        ASKS[name](loss.detach())

    with pytest.raises(gs.GeminiError, match="or step_fn, asks for values of its tensors"):
        cuda_memory_profiling(Odd(), torch.empty(4, 256), asking)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="step_fn has left no gradient"):
        cuda_memory_profiling(Odd(), torch.empty(4, 256), lambda model, inp: model(inp))
    with pytest.raises(ValueError, match=r"cuda_memory_profiling\(dtype=torch.float64\)"):
        cuda_memory_profiling(Odd(), torch.empty(4, 256), odd_step, torch.float64)
    with pytest.raises(KeyError, match="own"):  # other errors of a step stay what they are
        cuda_memory_profiling(Odd(), torch.empty(4, 256), lambda model, inp: {}["own"])
