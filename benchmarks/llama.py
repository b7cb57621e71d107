"""Models of the Llama family by size, random weights, built on the meta device and given values where they will lie.

Every parameter's values are drawn by themselves, from a seed and its name, on the device that computes: so every way
of sharding begins from the same bf16 values, and no rank needs more of the model than what it draws.
"""

import zlib
from dataclasses import dataclass

import torch
from models import SEED
from torch import Tensor, nn


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a LlamaForCausalLM; input and output embeddings are two parameters."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int = 128256


LLAMAS = {
    "llama-1b": LlamaShape(2048, 16, 32, 8, 8192),  # 1.50 G parameters
    "llama-8b": LlamaShape(4096, 32, 32, 8, 14336),  # 8.03 G
    "llama-13b": LlamaShape(5120, 40, 40, 40, 13824, 32000),  # 13.0 G
    "llama-18b": LlamaShape(6144, 39, 48, 48, 16384, 32000),  # 18.1 G
    "llama-30b": LlamaShape(6656, 60, 52, 52, 17920, 32000),  # 32.5 G
    "llama-tiny": LlamaShape(64, 3, 4, 2, 128, 512),
}


def meta_llama(shape: LlamaShape, length: int, checkpointing: bool, dtype: torch.dtype):
    """LlamaForCausalLM in training mode without any values; `length`: the longest sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary,
        max_position_embeddings=length,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():  # not the rotary frequencies, as from_pretrained()
            parameter.data = parameter.data.to(dtype)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def draw(name: str, shape: torch.Size, device: torch.device) -> Tensor:
    """First values of a parameter, bf16."""
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1:  # of a norm, or a bias
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    generator = torch.Generator(device).manual_seed(SEED + zlib.crc32(name.encode()))
    return values.normal_(0.0, 0.02, generator=generator)


def draw_on_demand(model: nn.Module, device: torch.device) -> None:
    """From now on the modules' own initial values are those of draw(), whoever asks for them."""
    names = {id(module): name for name, module in model.named_modules()}
    own = model._init_weights

    def begin(module: nn.Module) -> None:
        parameters = dict(module.named_parameters(recurse=False))
        # Buffers are computed. GPT-2's containers would draw what is below them once more, on the host.
        if not parameters and dict(module.named_buffers(recurse=False)):
            own(module)
        for key, parameter in parameters.items():
            parameter.copy_(draw(f"{names[id(module)]}.{key}", parameter.shape, device))

    for module in model.modules():
        if hasattr(module, "_init_weights"):
            module._init_weights = begin


def fill_sharded(model: nn.Module, device: torch.device) -> None:
    """Gives values to a model of DTensors that has been materialised; nothing travels."""
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = draw(name, parameter.shape, device)
            mesh, placements = parameter.device_mesh, parameter.placements
            part = distribute_tensor(values, mesh, placements, src_data_rank=None)
            parameter.to_local().copy_(part.to_local())
    rotary = model.model.rotary_emb  # its buffers are computed, not drawn
    with torch.device(device):
        model.model.rotary_emb = type(rotary)(model.config)
