"""Models of the OPT and GPT-2 families by width and depth, random weights, and token data: no network needed.

Every run of a benchmark starts from the same bf16 values, whatever precision and device it keeps
them in: they are drawn per parameter from a seed, on the GPU where there is one.
"""

from typing import Any

import torch
from shapes import Shape
from torch import Tensor, nn

SEED = 20
_WAY = {"use_cache": False, "attn_implementation": "sdpa"}
DISTINCT_BATCHES = 2  # few, so that the loss falls and a missing update shows in it


def build_model(shape: Shape, home: torch.device, compute: torch.device, dtype: torch.dtype):
    """A causal language model in training mode with activation checkpointing.

    Args:
        shape: its size.
        home: where the parameters lie; on the meta device they have no values.
        compute: where their values are drawn.
        dtype: what they are kept in; the values are those of bf16.
    """
    with torch.device("meta"):
        model = _gpt2(shape) if shape.family == "gpt2" else _opt(shape)
    model.to(dtype).to_empty(device=home)
    model.tie_weights()
    if home.type != "meta":
        draw_values(model, compute)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def _opt(shape: Shape) -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.blocks,
        ffn_dim=4 * shape.hidden,
        num_attention_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.positions,
        word_embed_proj_dim=shape.hidden,
        dropout=0.0,
        attention_dropout=0.0,
        layerdrop=0.0,
        **_WAY,
    )
    return OPTForCausalLM(config)


def _gpt2(shape: Shape) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=shape.hidden,
        n_layer=shape.blocks,
        n_head=shape.heads,
        vocab_size=shape.vocabulary,
        n_positions=shape.positions,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        **_WAY,
    )
    return GPT2LMHeadModel(config)


def draw_values(model: nn.Module, compute: torch.device) -> None:
    """The same values on every device, rounded to bf16."""
    generator = torch.Generator(compute).manual_seed(SEED)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.fill_(1.0)
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                values = torch.empty(parameter.shape, dtype=torch.bfloat16, device=compute)
                parameter.copy_(values.normal_(0.0, 0.02, generator=generator))
            elif name.endswith("bias"):
                parameter.zero_()
    if compute.type == "cuda":
        torch.cuda.empty_cache()


class Batches:
    """Random token ids, drawn once on the device: `batches(step, micro)` is (sequences, length).

    Each rank has its own; `shape` says the vocabulary.
    """

    def __init__(
        self,
        shape: Any,
        sequences: int,
        length: int,
        micro_batches: int,
        device: torch.device,
        rank: int = 0,
    ) -> None:
        generator = torch.Generator(device).manual_seed(SEED + 1 + rank)
        size = (DISTINCT_BATCHES, micro_batches, sequences, length)
        self._ids = torch.randint(shape.vocabulary, size, generator=generator, device=device)

    def __call__(self, step: int, micro: int) -> Tensor:
        return self._ids[step % DISTINCT_BATCHES, micro]
