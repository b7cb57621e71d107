"""Sizes of the models of models.py by name, without torch: a driver knows them before a run starts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Width, depth and vocabulary of an OPT or GPT-2 model; its feed-forward width is 4 times `hidden`."""

    hidden: int
    blocks: int
    heads: int
    vocabulary: int = 50272
    positions: int = 2048
    family: str = "opt"


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama or Qwen2 model; input and output embeddings are two parameters."""

    hidden: int
    layers: int
    heads: int
    key_heads: int
    feed_forward: int
    vocabulary: int = 128256
    family: str = "llama"


SHAPES: dict[str, Shape | LlamaShape] = {
    "opt-1.5b": Shape(hidden=2048, blocks=28, heads=32),
    "opt-3.4b": Shape(hidden=4096, blocks=16, heads=32),
    "opt-5b": Shape(hidden=4096, blocks=24, heads=32),
    "opt-6.7b": Shape(hidden=4096, blocks=32, heads=32),
    "opt-14b": Shape(hidden=5120, blocks=44, heads=40),
    # 4.2, 10.3, 15.1, 19.5, 20.6 and 21.0 G parameters
    "gpt2-4b": Shape(2304, 64, 16, vocabulary=50257, positions=1024, family="gpt2"),
    "gpt2-10b": Shape(4096, 50, 16, vocabulary=50257, positions=1024, family="gpt2"),
    "gpt2-15b": Shape(4096, 74, 16, vocabulary=50257, positions=1024, family="gpt2"),
    "gpt2-19b": Shape(4096, 96, 16, vocabulary=50257, positions=1024, family="gpt2"),
    "gpt2-20b": Shape(8192, 25, 16, vocabulary=50257, positions=1024, family="gpt2"),
    "gpt2-21b": Shape(4096, 103, 16, vocabulary=50257, positions=1024, family="gpt2"),
    "gpt2-tiny": Shape(64, 3, 4, vocabulary=512, positions=128, family="gpt2"),
    "tiny": Shape(hidden=64, blocks=3, heads=4, vocabulary=512, positions=128),
    "llama-1b": LlamaShape(2048, 16, 32, 8, 8192),  # 1.50 G parameters
    "llama-8b": LlamaShape(4096, 32, 32, 8, 14336),  # 8.03 G
    "llama-13b": LlamaShape(5120, 40, 40, 40, 13824, 32000),  # 13.0 G
    "llama-18b": LlamaShape(6144, 39, 48, 48, 16384, 32000),  # 18.1 G
    "llama-30b": LlamaShape(6656, 60, 52, 52, 17920, 32000),  # 32.5 G
    "qwen-14b": LlamaShape(5120, 48, 40, 8, 13824, 152064, family="qwen2"),  # 14.8 G
    "llama-tiny": LlamaShape(64, 3, 4, 2, 128, 512),
}
