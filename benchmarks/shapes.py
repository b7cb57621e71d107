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


SHAPES = {
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
}
