"""Colossal-AI's ways in, over the engine of `manage()`: `import gemini_strategy.colossalai as colossalai`.

    colossalai.launch_from_torch(config)
    with colossalai.ZeroInitContext(device, shard_strategy, shard_param=True):
        model = build()
    engine, train_dataloader, *_ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

and of 0.5 `Booster(plugin=GeminiPlugin())`, `GeminiDDP`, `GeminiOptimizer`. All names stand here.
docs/originals.md says what became of what.
"""

from gemini_strategy.colossalai.booster import Booster, GeminiPlugin
from gemini_strategy.colossalai.gemini import GeminiDDP, GeminiOptimizer
from gemini_strategy.colossalai.launch import (
    AMP_TYPE,
    get_current_device,
    global_context,
    launch_from_torch,
)
from gemini_strategy.colossalai.optimizers import CPUAdam, FusedAdam, HybridAdam
from gemini_strategy.colossalai.training import initialize
from gemini_strategy.colossalai.zero import (
    BucketTensorShardStrategy,
    TensorShardStrategy,
    ZeroInitContext,
)

__all__ = [
    "AMP_TYPE",
    "Booster",
    "BucketTensorShardStrategy",
    "CPUAdam",
    "FusedAdam",
    "GeminiDDP",
    "GeminiOptimizer",
    "GeminiPlugin",
    "HybridAdam",
    "TensorShardStrategy",
    "ZeroInitContext",
    "get_current_device",
    "global_context",
    "initialize",
    "launch_from_torch",
]
