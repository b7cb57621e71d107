"""First values for models that are built on the meta device, for each rank those of its own shards alone."""

import torch
from models import draw, fill_buffers
from torch import nn


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
        fill_buffers(model)
