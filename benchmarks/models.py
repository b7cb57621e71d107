"""Models of the OPT, GPT-2, Llama and Qwen2 families by size, random weights, and token data: no network needed.

Every run of a benchmark starts from the same bf16 values, whatever precision, device and sharding it keeps them in:
each parameter's are drawn by themselves, from a seed and its name, on the device that computes.
"""

import zlib
from typing import Any

import torch
from shapes import LlamaShape, Shape
from torch import Tensor, nn

SEED = 20
_WAY = {"use_cache": False, "attn_implementation": "sdpa"}
DISTINCT_BATCHES = 2  # few, so that the loss falls and a missing update shows in it


def build_model(
    shape: Shape | LlamaShape,
    home: torch.device,
    compute: torch.device,
    dtype: torch.dtype,
    checkpointing: bool = True,
):
    """A causal language model in training mode.

    Args:
        shape: its size.
        home: where the parameters lie; on the meta device they have no values.
        compute: where their values are drawn.
        dtype: what they are kept in; the values are those of bf16.
        checkpointing: of each block's activations.
    """
    kinds = {"opt": _opt, "gpt2": _gpt2}
    with torch.device("meta"):
        model = kinds.get(shape.family, _llama)(shape)
        for parameter in model.parameters():  # not the rotary frequencies, as from_pretrained()
            parameter.data = parameter.data.to(dtype)
    model.tie_weights()
    if home.type != "meta":
        model.to_empty(device=home)
        model.tie_weights()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(draw(name, parameter.shape, compute))
            fill_buffers(model)
        if compute.type == "cuda":
            torch.cuda.empty_cache()
    if checkpointing:
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


def _llama(shape: LlamaShape) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        shape.family,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def draw(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """First values of a parameter, bf16."""
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1:  # of a norm, or a bias
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    generator = torch.Generator(device).manual_seed(SEED + zlib.crc32(name.encode()))
    return values.normal_(0.0, 0.02, generator=generator)


def fill_buffers(model: nn.Module) -> None:
    """Of modules without parameters: those are computed, as rotary frequencies are."""
    for module in model.modules():
        if dict(module.named_buffers(recurse=False)) and not dict(module.named_parameters()):
            model._init_weights(module)


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
