"""Models of which estimates are made; MODELS have been measured on a GPU: see tests/gpu/test_profiling_gpu.py."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

__all__ = ["MODELS", "PRECISION", "made", "small_llama", "step", "tokens"]

PRECISION = {torch.float32: "32-true", torch.bfloat16: "bf16-mixed"}


def gpt2() -> nn.Module:
    """124 M parameters, tied, with dropout."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))


def llama() -> nn.Module:
    """309 M parameters, with grouped heads and an untied head."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=4,
            use_cache=False,
        )
    )


def bert() -> nn.Module:
    """An encoder of 110 M parameters, with dropout."""
    return transformers.BertForMaskedLM(transformers.BertConfig())


#: name -> how it is built, sequences and their length
MODELS = {"gpt2": (gpt2, 8, 1024), "llama": (llama, 8, 1024), "bert": (bert, 32, 512)}


def made(name: str, device: str, *, checkpoints: bool) -> nn.Module:
    with torch.device(device):
        model = MODELS[name][0]().train()
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def tokens(name: str, device: str) -> dict[str, Tensor]:
    ids = torch.zeros(MODELS[name][1:], dtype=torch.long, device=device)
    return {"input_ids": ids, "labels": ids}


def step(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    loss = model(**inputs).loss
    loss.backward()
    return loss


def small_llama(is_tied: bool = False, is_checkpointed: bool = False) -> nn.Module:
    """With grouped heads, for estimates beside runs on the host device."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=is_tied,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()
