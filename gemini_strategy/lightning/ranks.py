# The ranks of a Trainer or of Fabric: one process for each device, how they start, what they say to each other.
#
# A class for the strategies of each Lightning tree to inherit from; nothing here imports Lightning. What only the ranks
# of a Trainer do is in trainer_ranks.py.
#
# Barriers, objects and decisions travel between hosts (gloo) also where tensors travel over NCCL: they then wait for no
# kernel, and an error names the rank that is missing where NCCL would hang and then end the process.
#
# Invariants
#   1. One device: no launcher, no process group, nothing collective. Notebooks and debuggers keep working.
#   2. A rank that fails ends its part of the collectives, so that no other waits for it.

import copy
import zipfile
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities import apply_to_collection
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gemini_strategy import _torch
from gemini_strategy.errors import GeminiDeviceError, GeminiError
from gemini_strategy.lightning.trees import Tree

MAPPED_BYTES = 1 << 20  # smaller tensors of a checkpoint are read, not mapped
TRAINERS_NAMES = ("state_dict", "optimizer_states")  # of what is copied into chunks
MESH_NAMES = ("replicate", "shard")
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.int64}
# How long processes may take to start: one may be importing what another has in its cache.
START_PATIENCE = timedelta(seconds=300)
# How long a checkpoint may take to write. A rank that dies meanwhile is seen at once, one that stops is not.
FILE_PATIENCE = timedelta(hours=1)

# The gloo group beside a default group of another kind, and that default group: one for all strategies.
_between_hosts: tuple[Any, Any] = globals().get("_between_hosts", (None, None))


def _asked(name: str, alone: int, doc: str) -> Any:
    """What the cluster environment says; `alone` without one."""

    def ask(strategy: Any) -> int:
        environment = strategy.cluster_environment
        if environment is None:
            return alone
        try:
            return getattr(environment, name)()  # type: ignore[no-any-return]
        except KeyError:
            # A SLURMEnvironment that was given where SLURM has started nothing: its variables are not set.
            if strategy.num_nodes * strategy.num_processes > 1:
                raise
            return alone

    return property(ask, doc=doc)


class RankProcesses:
    """To be inherited from before the tree's `ParallelStrategy`."""

    _tree: Tree
    _call: str  # what makes the strategy, for errors,
    _runner: str  # and what uses it: "Trainer" or "Fabric"
    _launcher_class: type
    _misconfiguration: type[Exception]
    accelerator: Any
    cluster_environment: Any
    launcher: Any
    process_group_backend: str | None
    timeout: timedelta
    device_mesh: Any  # what the user gave
    _parallel_devices: list[torch.device] | None
    _num_nodes = 1
    _mesh: DeviceMesh | None = None  # what it means for this run,
    _mesh_of: Any = None  # which has this default group

    def _engines(self) -> Iterable[Any]:
        """The open engines that these ranks have together."""
        raise NotImplementedError

    # -- who is who ----------------------------------------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this machine, one for each device."""
        return len(self._parallel_devices or ())

    @property
    def root_device(self) -> torch.device:
        devices = self._parallel_devices or [torch.device("cpu")]
        # A Trainer with one device may also be made in a process that has been rank 2 of another Trainer's.
        return devices[self.local_rank if len(devices) > 1 else 0]

    @property
    def is_distributed(self) -> bool:
        """Whether data must be split between ranks."""
        return self.world_size > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Whatever shares the weights: each rank has batches of its own.
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    world_size = _asked("world_size", 1, "Number of ranks.")
    global_rank = _asked("global_rank", 0, "This process among all ranks.")
    local_rank = _asked("local_rank", 0, "This process among those of its machine.")
    node_rank = _asked("node_rank", 0, "This machine among all.")

    def set_world_ranks(self) -> None:
        """Called when the Trainer is constructed, before the launcher is chosen."""
        if self.num_nodes * self.num_processes <= 1 or self.cluster_environment is None:
            return
        environment = self.cluster_environment
        environment.set_global_rank(
            environment.node_rank() * self.num_processes + environment.local_rank()
        )
        environment.set_world_size(self.num_nodes * self.num_processes)
        # Where somebody else starts the processes, the setters do nothing: the getter knows.
        for only in (rank_zero_only, self._tree.fabric.utilities.rank_zero.rank_zero_only):
            only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        # The last call in Trainer's construction, hence the place to find that torchrun or SLURM started another number
        # of processes.
        wanted = self.num_nodes * max(self.num_processes, 1)
        if self.world_size != wanted:
            per_node = max(self.num_processes, 1)
            raise self._misconfiguration(
                f"strategy='gemini': {self._runner}(devices={per_node}, num_nodes={self.num_nodes}) is for"
                f" {wanted} processes, one for each device, but {type(self.cluster_environment).__name__} reports"
                f" {self.world_size}."
            )
        replicas, shards = self.device_mesh if isinstance(self.device_mesh, tuple) else (1, wanted)
        if replicas * shards != wanted:
            raise self._misconfiguration(
                f"{self._call}(device_mesh={self.device_mesh!r}): {replicas} replicas of {shards} shards need"
                f" {replicas * shards} devices, and the {self._runner} has {wanted}."
            )
        if wanted > 1:
            # Also where the processes are there already: it then checks their number, and shares the cores.
            self._launcher = self._launcher_class(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    # -- the groups ----------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()  # type: ignore[misc]
        if self.is_distributed:
            self._join()

    def _join(self) -> None:
        distributed = self._tree.fabric.utilities.distributed
        self._tree.fabric.utilities.seed.reset_seed()  # the launched processes have not called seed_everything yet
        self.set_world_ranks()
        device = self.root_device
        if self.process_group_backend == "nccl" and device.type == "cpu":
            raise self._misconfiguration(
                f"{self._call}(process_group_backend='nccl') is for CUDA; with {self._runner}(accelerator='cpu')"
                " leave it None."
            )
        was_initialized = dist.is_initialized()
        distributed._init_dist_connection(
            self.cluster_environment,
            self.process_group_backend
            or distributed._get_default_process_group_backend_for_device(device),
            timeout=max(self.timeout, START_PATIENCE),
            device_id=None if device.type == "cpu" else device,
        )
        if not was_initialized and self.timeout < START_PATIENCE:
            _torch.set_process_group_timeout(self.timeout)
        here = (dist.get_rank(), dist.get_world_size())
        if here != (self.global_rank, self.world_size):
            raise GeminiError(
                f"strategy='gemini': this process is rank {self.global_rank} of {self.world_size} for the"
                f" {self._runner}, but torch.distributed was initialised before as rank {here[0]} of {here[1]}."
            )
        if self._hosts is not None and self._mesh_of is not dist.group.WORLD:
            self._mesh, self._mesh_of = self._make_mesh(device), dist.group.WORLD

    @property
    def _is_connected(self) -> bool:
        """Whether there are other ranks to talk to; before the first stage a Trainer talks to itself."""
        return self.is_distributed and dist.is_available() and dist.is_initialized()

    @property
    def _hosts(self) -> Any:
        """The group for what travels between hosts; all ranks ask for it first at the same place."""
        global _between_hosts
        world = dist.group.WORLD
        if _between_hosts[0] is not world:
            is_gloo = dist.get_backend() == "gloo"
            hosts = world if is_gloo else dist.new_group(backend="gloo", timeout=self.timeout)
            _between_hosts = (world, hosts)
        return _between_hosts[1]

    def _make_mesh(self, device: torch.device) -> DeviceMesh | None:
        mesh = self.device_mesh
        if mesh is None:
            return None
        if isinstance(mesh, DeviceMesh):
            members = mesh.mesh.flatten().tolist()
            if members[0] != 0 or sorted(members) != list(range(self.world_size)):
                raise self._misconfiguration(
                    f"{self._call}(device_mesh=...): the mesh has the ranks {members}; it needs all"
                    f" {self.world_size} of the {self._runner}, and rank 0 first."
                )
            return mesh
        shape = (self.num_nodes, self.num_processes) if mesh == "hybrid" else mesh
        return init_device_mesh(device.type, shape, mesh_dim_names=MESH_NAMES)

    def _rank_arguments(self) -> dict[str, Any]:
        """What manage() is told of the ranks."""
        if self.is_distributed:
            return {"mesh": self._mesh, "timeout": self.timeout.total_seconds()}
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # One device, in a process that is one of several: this engine is its own.
            rank = dist.get_rank()
            return {"mesh": dist.new_group([rank], backend="gloo", use_local_synchronization=True)}
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # Groups cannot be copied or pickled; the next setup_environment finds or makes them.
        return {**super().__getstate__(), "_mesh": None, "_mesh_of": None}  # type: ignore[misc]

    # -- what ranks say to each other ----------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean (or what `reduce_op` names) of a tensor or a number over the ranks, on all of them.

        The tensor given stays as it is. Half precision is added up in fp32. What is neither comes back as it is.
        """
        is_number = isinstance(tensor, int | float)
        if not self._is_connected or not (is_number or isinstance(tensor, Tensor)):
            return tensor
        name = _operation(reduce_op)
        if is_number:
            kind = torch.float64 if name == "mean" or isinstance(tensor, float) else torch.int64
            number = torch.tensor(tensor, dtype=kind, device="cpu")
            return self._reduced(number, self._hosts if group is None else group, name).item()
        return self._reduced(tensor.detach(), group, name).to(tensor.device, tensor.dtype)

    def _reduced(self, tensor: Tensor, group: Any, name: str) -> Tensor:
        total = tensor.to(self._device_of(group), _WIDE.get(tensor.dtype, tensor.dtype), copy=True)
        total = total.contiguous()
        with self._named(f"reduce ({name}) of {tuple(tensor.shape)}"):
            dist.all_reduce(
                total, getattr(dist.ReduceOp, "SUM" if name == "mean" else name.upper()), group
            )
        if name == "mean":
            total = total / dist.get_world_size(group)
        return total

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked; of one shape on all. With `sync_grads` gradients flow back to each."""
        if not self._is_connected:
            # Lightning adds no dimension for the ranks when there is only one.
            return tensor
        moved = tensor.to(self._device_of(group))
        with self._named(f"all_gather of {tuple(tensor.shape)}"):
            gathered: Tensor = super().all_gather(moved, group, sync_grads)  # type: ignore[misc]
        return gathered.to(tensor.device)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Rank `src`'s object, on all ranks."""
        if not self._is_connected:
            return obj
        box = [obj]
        with self._named(f"broadcast from rank {src}"):
            dist.broadcast_object_list(box, src, self._hosts)
        return box[0]

    def barrier(self, name: str | None = None) -> None:
        self._meet(name, self.timeout)

    def _meet(self, name: str | None, patience: timedelta) -> None:
        if self._is_connected:
            with self._named(f"barrier {name!r}"):
                dist.monitored_barrier(self._hosts, patience, wait_all_ranks=True)

    def _meet_after_file(self, name: str | None) -> None:
        """A barrier that waits for a file that rank 0 alone writes."""
        self._meet(name, max(self.timeout, FILE_PATIENCE))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 (Lightning's name)
        """Whether all ranks, or with `all=False` any of them, decided so."""
        if not self._is_connected:
            return bool(decision)
        vote = torch.tensor(int(bool(decision)), device="cpu")
        with self._named("reduce_boolean_decision"):
            dist.all_reduce(vote, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX, self._hosts)
        return bool(vote)

    def _device_of(self, group: Any) -> torch.device:
        """Where the tensors of a group's collectives must be."""
        return torch.device("cpu") if "nccl" not in dist.get_backend(group) else self.root_device

    @contextmanager
    def _named(self, operation: str) -> Generator[None, None, None]:
        try:
            yield
        except GeminiError:
            raise
        except RuntimeError as error:
            failure = GeminiDeviceError(
                f"rank {self.global_rank} of {self.world_size}, {operation}: {error}"
            )
            for engine in self._engines():  # the others may wait in its collectives, and hear there
                failure = engine.ranks.failed(failure)
            raise failure from error

    @contextmanager
    def _explaining(self) -> Generator[None, None, None]:
        """Around a module's own steps, where units are entered: an error about other ranks says what those said."""
        with ExitStack() as stack:
            for engine in self._engines():
                stack.enter_context(engine.ranks.explaining())
            yield


def is_mappable(path: Any) -> bool:
    return Path(path).is_file() and zipfile.is_zipfile(path)


def load_mapped(
    path: Any, weights_only: bool | None, copied: Collection[str] | None = TRAINERS_NAMES
) -> Any:
    """torch.load of a file whose large tensors are pages of the file, which all ranks of a host share.

    Only what is copied into chunks, weights and optimizers' states, stays mapped, and of it the large tensors: whoever
    keeps another must not see the file change when it is written again.

    Args:
        path: the file.
        weights_only: as torch.load has it.
        copied: under which names the file has what is copied (default: a Trainer's); None: all of it is.
    """
    checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
    if copied is None:
        return _owned(checkpoint, _own_if_small)
    for key, value in checkpoint.items():
        checkpoint[key] = _owned(value, _own_if_small if key in copied else copy.deepcopy)
    return checkpoint


def _own_if_small(tensor: Tensor) -> Tensor:
    is_large = tensor.untyped_storage().nbytes() >= MAPPED_BYTES
    return tensor if is_large else copy.deepcopy(tensor)


def _owned(value: Any, own: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, dict):  # in place: torch keeps versions in an attribute of a state dict
        value.update({n: apply_to_collection(v, Tensor, own) for n, v in value.items()})
        return value
    return apply_to_collection(value, Tensor, own)


def _operation(reduce_op: Any) -> str:
    if reduce_op is None:
        return "mean"
    name = reduce_op if isinstance(reduce_op, str) else str(reduce_op).rpartition(".")[2]
    name = {"avg": "mean"}.get(name.lower(), name.lower())
    if name != "mean" and not hasattr(dist.ReduceOp, name.upper()):
        raise ValueError(
            f"reduce(reduce_op={reduce_op!r}): expected 'mean', 'sum', 'max', 'min', 'product' or a"
            " torch.distributed.ReduceOp."
        )
    return name
