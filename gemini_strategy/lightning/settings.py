# The arguments of the strategies: those of manage(), and what Lightning and its ranks need beside them.
#
# The tables say each once (arguments.py). Nothing here imports Lightning: a strategy's class has the types of its tree.

from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from gemini_strategy.arguments import Argument, Arguments, choice, table
from gemini_strategy.precision import LOSS_SCALING, LossScaling
from gemini_strategy.settings import Chunks, Outputs, Values

_Mesh = tuple[int, int] | DeviceMesh | Literal["hybrid"] | None

# By their place, too, as the originals have them; what a strategy lacks of these it leaves out.
ORIGINALS = (
    "use_chunk", "chunk_size", "enable_distributed_storage", "placement_policy", "force_outputs_fp32",
    "gpu_margin_mem_ratio", "chunk_search_range", "chunk_search_n_grids", "min_chunk_size", *LOSS_SCALING,
    "accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin", "precision",
)  # fmt: skip
# What manage() gets as it is.
TO_MANAGE = (*Chunks.__annotations__, *LOSS_SCALING, *Outputs.__annotations__)


def _check_true(arguments: Arguments, name: str) -> None:
    is_true = arguments.given[name] is True
    arguments.check(is_true, name, "True: parameters always live in chunks")


def _check_timeout(arguments: Arguments, name: str) -> None:
    timeout = arguments.given[name]
    if isinstance(timeout, timedelta):
        arguments.check(timeout > timedelta(0), name, "a timedelta longer than 0, or seconds")
    else:
        arguments.check_number(name, 0, 1e9, is_exclusive=True)


def _check_mesh(arguments: Arguments, name: str) -> None:
    mesh = arguments.given[name]
    if isinstance(mesh, tuple | list):
        is_mesh = len(mesh) == 2 and all(type(size) is int and size >= 1 for size in mesh)
    else:
        is_mesh = mesh in (None, "hybrid") if not isinstance(mesh, DeviceMesh) else mesh.ndim <= 2
    allowed = "None, (replicas, shards), 'hybrid' or a DeviceMesh of one or two dimensions"
    arguments.check(is_mesh, name, allowed)
    if mesh is not None and not arguments.given["enable_distributed_storage"]:
        raise ValueError(
            f"{arguments.call}(enable_distributed_storage=False, device_mesh=...): without shared chunks there is"
            " nothing to share over a mesh; give one of the two."
        )


@table
class _OfLightning(Chunks, LossScaling, Values, total=False):
    """What the strategies of a Trainer and of Fabric both take.

    Args:
        accelerator: the tree's ``CPUAccelerator`` or ``CUDAAccelerator``; normally the Trainer's or
            Fabric's argument.
        parallel_devices: this machine's devices; normally the Trainer's or Fabric's ``devices``.
        cluster_environment: a cluster environment of the tree; None: the one that Lightning finds.
        checkpoint_io: how checkpoint files are written and read.
        timeout: how long one collective between several devices may take, a timedelta or seconds.
            One device makes none.
        process_group_backend: what torch.distributed uses for the collectives of Lightning and the
            module, with several devices: ``"nccl"``, ``"gloo"`` or ``"cpu:gloo,cuda:nccl"``; None:
            as the devices are. The engine's own collectives do not use it.
        device_mesh: how several devices share the chunks: ``(replicas, shards)``, a ``DeviceMesh``
            of one dimension (shards) or two (replicas, shards), or ``"hybrid"`` for a replica on
            each machine, shared by its devices. None: all devices share them.
    """

    accelerator: Annotated[Any, Argument(None)]
    parallel_devices: Annotated[list[torch.device] | None, Argument(None)]
    cluster_environment: Annotated[Any, Argument(None)]
    checkpoint_io: Annotated[Any, Argument(None)]
    timeout: Annotated[timedelta | float, Argument(timedelta(seconds=300), _check_timeout)]
    process_group_backend: Annotated[
        str | None, Argument(None, choice(None, "nccl", "gloo", "cpu:gloo,cuda:nccl"))
    ]
    device_mesh: Annotated[_Mesh, Argument(None, _check_mesh)]


@table
class OfTrainer(_OfLightning, Outputs, total=False):
    """The arguments of the strategy for a Trainer.

    Args:
        use_chunk: must be True: parameters always live in chunks.
        precision_plugin: ``Precision``, ``MixedPrecision`` or ``HalfPrecision`` of the tree; it
            wins over ``Trainer(precision=...)``.
        checkpoint_weights_only: `weights_only` of ``torch.load`` where ``fit``, ``validate``,
            ``test`` or ``predict`` were given none. None: torch's default, which loads nothing but
            tensors and plain values; False for trusted files with other objects in them.
        state_dict_type: ``"full"``: a checkpoint is one file, which rank 0 writes and any strategy
            loads. ``"sharded"``: it is a folder, to which each rank writes its part straight from
            where it is: the host needs no second copy of the model. Any number of devices goes on
            from it, random numbers included, and ``python -m
            lightning.pytorch.utilities.consolidate_checkpoint`` makes one file of it.
        update_schedule: ``"auto"``: updates run inside the backward that ends a step when nothing
            needs its gradients afterwards (no clipping, no loss scale, no hook of the module or a
            callback that may read them), and under the next forward otherwise; ``"deferred"``:
            always under the next forward. The bits are the same. An error inside a backward that
            updates closes the engine.
        report: tell the table of the plan when there is one, and at the end what was planned beside
            what was measured, at Lightning's log level INFO.
    """

    use_chunk: Annotated[bool, Argument(True, _check_true)]
    precision_plugin: Annotated[Any, Argument(None)]
    checkpoint_weights_only: Annotated[bool | None, Argument(None, choice(None, True, False))]
    state_dict_type: Annotated[
        Literal["full", "sharded"], Argument("full", choice("full", "sharded"))
    ]
    update_schedule: Annotated[
        Literal["auto", "deferred"], Argument("auto", choice("auto", "deferred"))
    ]
    report: Annotated[bool, Argument(True, Arguments.check_bool)]


@table
class OfFabric(_OfLightning, total=False):
    """The arguments of the strategy for Fabric.

    Args:
        precision: ``Precision``, ``MixedPrecision`` or ``HalfPrecision`` of the tree's Fabric; it
            wins over ``Fabric(precision=...)``.
        report: print what is planned and what was measured, as
            ``gemini_strategy.manage(report=...)`` does.
    """

    precision: Annotated[Any, Argument(None)]
    report: Annotated[bool | None, Argument(None, choice(None, True, False))]
