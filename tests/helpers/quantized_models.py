"""Models whose frozen linear layers are quantized, in each of the ways that are served, under adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import peft
import torch
import transformers
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

from helpers.reference import Plain

TIGHT: dict[str, Any] = {"chunk_size": 4096, "placement_policy": "cpu", "device_budget": "60KB"}


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **heads)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def int8(linear: nn.Linear) -> nn.Module:
    new = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
    )
    new.weight = bnb.nn.Int8Params(linear.weight.data.cpu(), requires_grad=False)
    return new.to(linear.weight.device)  # quantizes what is on the CPU


def four_bits(linear: nn.Linear, **how: Any) -> nn.Module:
    kind = {"quant_type": "nf4", "compress_statistics": True} | how
    new = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, **kind
    )
    new.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, module=new, **kind)
    return new.to(linear.weight.device)  # quantizes


def torchao_int8(linear: nn.Linear) -> nn.Module:
    quantize_(linear, Int8WeightOnlyConfig())
    linear.weight.requires_grad_(False)
    return linear


def torchao_int4(linear: nn.Linear) -> nn.Module:
    quantize_(linear, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    linear.weight.requires_grad_(False)
    return linear


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "int8": int8,
    "nf4": four_bits,
    "fp4": lambda linear: four_bits(linear, quant_type="fp4", compress_statistics=False),
    "nf4 in bf16": lambda linear: four_bits(linear, quant_storage=torch.bfloat16),
    "torchao int8": torchao_int8,
    "torchao int4": torchao_int4,
}


def quantized(kind: str) -> nn.Module:
    """A model whose linear layers but the last are quantized."""
    model = llama()
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, KINDS[kind](child))
    return model


class Case:
    def __init__(self, kind: str, checkpointing: bool = False) -> None:
        self.kind = kind
        self.checkpointing = checkpointing

    def build(self) -> nn.Module:
        model = quantized(self.kind)
        if self.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        how = {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
        config = peft.LoraConfig(r=4, lora_dropout=0.1, init_lora_weights=False, **how)
        return peft.get_peft_model(model, config)

    def batch(self, step: int) -> Tensor:
        return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))

    def loss(self, run: Plain, batch: Tensor) -> Tensor:
        return run(input_ids=batch, labels=batch).loss


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
