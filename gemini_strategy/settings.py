"""The arguments of manage(), of which all other doors have theirs, and what they come to: an engine is made of it,
besides a model and an optimizer.

The tables say each argument once (arguments.py): `Chunks` is what all that make engines take.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gemini_strategy.arguments import Argument, Arguments, check_table, choice, number, table
from gemini_strategy.choices import POLICIES, PolicyName, PrecisionName
from gemini_strategy.precision import LossScaling, Precision, check_loss_scaling
from gemini_strategy.ranks.comm import DEFAULT_TIMEOUT
from gemini_strategy.sizes import ChunkSizes
from gemini_strategy.weights.loading import Weights

if TYPE_CHECKING:
    from gemini_strategy.parameters.registration import Registration

_Bytes = int | str | None
_budget = partial(Arguments.check_size, of_total=True)
_count = partial(Arguments.check_count, is_optional=True)


def _ratio(arguments: Arguments, name: str) -> None:
    if arguments.given[name] is not None:
        arguments.check_number(name, 0, 1)


@table
class Sizes(TypedDict, total=False):
    """What there is, what of a model is where, and how large a part.

    Args:
        device_budget: device memory in bytes, "24GB", "24GiB" or a fraction of the device. On CUDA
            everything this process holds there counts, activations included; on the host device
            what the engine places there. None: what the device has.
        host_budget: bytes of host memory for weights, states and gradients, of this rank, and as
            far as it goes for updates of clipped steps; a fraction is one of its even share of the
            host. None: what the host has; of several ranks on it each has an even share. More than
            the machine has, or than this process's control group allows, counts as that, with a
            warning. With "auto" what the host has no room for stays on the device.
        placement_policy: "cuda": everything on the device; "cpu": evicted after every module,
            states on the host; "auto": as much as fits.
        chunk_size: bytes of weights in one chunk; None: chosen from the model and the budget, or
            searched for.
        block_size: bytes of one block of device memory, rounded up to the device's granularity;
            None: chosen.
        chunk_search_range: how far above `min_chunk_size` chunk sizes are searched, bytes of
            weights, for the one that leaves the least unused. Giving this or one of the next two
            asks for the search; what is then left None is 64 MiB, 4096 or 32 MiB. Not together with
            chunk_size.
        chunk_search_n_grids: number of even steps in that range.
        min_chunk_size: smallest chunk size that the search considers, bytes of weights.
    """

    device_budget: Annotated[int | float | str | None, Argument(None, _budget)]
    host_budget: Annotated[int | float | str | None, Argument(None, _budget)]
    placement_policy: Annotated[PolicyName, Argument("auto", choice(*POLICIES))]
    chunk_size: Annotated[_Bytes, Argument(None, Arguments.check_size)]
    block_size: Annotated[_Bytes, Argument(None, Arguments.check_size)]
    chunk_search_range: Annotated[_Bytes, Argument(None, Arguments.check_size)]
    chunk_search_n_grids: Annotated[int | None, Argument(None, _count)]
    min_chunk_size: Annotated[_Bytes, Argument(None, Arguments.check_size)]


@table
class Chunks(Sizes, total=False):
    """That, and what of it an estimate does not ask.

    Args:
        gpu_margin_mem_ratio: "auto" only: the share, in [0, 1], of the device memory left beside
            all weights that may hold optimizer states. None: all of it.
        gradient_dtype: None: gradients are kept and accumulated in the weight's dtype, as torch
            does; torch.float32 or "float32": in fp32.
        threads: worker threads for host arithmetic; None: GEMINI_THREADS, else the cores this
            process may use, less two beside a GPU.
        enable_distributed_storage: whether ranks share the chunks; False: every rank keeps the
            whole state, and gradients are averaged. One rank holds every chunk either way.
    """

    gpu_margin_mem_ratio: Annotated[float | None, Argument(None, _ratio)]
    gradient_dtype: Annotated[
        torch.dtype | Literal["float32"] | None,
        Argument(None, choice(None, torch.float32, "float32")),
    ]
    threads: Annotated[int | None, Argument(None, _count)]
    enable_distributed_storage: Annotated[bool, Argument(True, Arguments.check_bool)]


@table
class Values(TypedDict, total=False):
    """What a model begins with.

    Args:
        weights: a safetensors file, its index, or a Hugging Face folder whose values the model
            takes, as load_state_dict would give them; or such paths by the name of the submodule
            that each is of.
        missing: a parameter on the meta device may have no name in the weights. "refuse" refuses it
            by name; "init" gives it its module's own initial values. Buffers that are never saved
            are always made anew.
    """

    weights: Annotated[Weights | None, Argument(None, Arguments.check_paths)]
    missing: Annotated[Literal["refuse", "init"], Argument("refuse", choice("refuse", "init"))]


@table
class Outputs(TypedDict, total=False):
    """What a model's forward gives.

    Args:
        force_outputs_fp32: cast half-precision tensors to fp32 in what the model's forward returns,
            and in what a LightningModule's `*_step` methods do.
    """

    force_outputs_fp32: Annotated[bool, Argument(False, Arguments.check_bool)]


@table
class Calls(TypedDict, total=False):
    """What manage() and the plugin of accelerate take alike.

    Args:
        report: print to stderr the table of the first plan that is made, and at close() or when the
            process ends what was planned beside what was measured. None: if GEMINI_REPORT=1;
            `engine.report()` gives both at any time.
        timeout: seconds that a rank waits for the others, here and later, before it raises.
    """

    report: Annotated[bool | None, Argument(None, choice(None, True, False))]
    timeout: Annotated[float, Argument(DEFAULT_TIMEOUT, number(0, None, is_exclusive=True))]


@table
class Managed(Chunks, LossScaling, Values, Outputs, Calls, total=False):
    """The arguments of manage().

    Args:
        precision: "32-true", "bf16-true", "bf16-mixed" or "16-mixed"; None keeps the parameters'
            dtypes.
        device: where to compute; None: CUDA if there is a device, else the CPU (the host device),
            with a warning.
        convert_inputs: let the model's forward cast floating-point inputs ("*-true") or run under
            autocast ("*-mixed"); False where the caller does that.
        mesh: the ranks: a DeviceMesh (1-D; or 2-D: replicas, shards), a ProcessGroup, or None: all
            ranks if torch.distributed is initialised, else this process alone.
    """

    precision: Annotated[PrecisionName | None, Argument(None)]
    device: Annotated[torch.device | str | None, Argument(None)]
    convert_inputs: Annotated[bool, Argument(True, Arguments.check_bool)]
    mesh: Annotated[DeviceMesh | ProcessGroup | None, Argument(None)]


def check(call: str, given: Mapping[str, Any], table: type) -> None:
    """The arguments of a table that has `Sizes`, each and together.

    Raises:
        ValueError: one of them is out of its range, or two exclude each other.
    """
    check_table(call, given, table)
    search = ("chunk_search_range", "chunk_search_n_grids", "min_chunk_size")
    asked = [name for name in search if given[name] is not None]
    if given["chunk_size"] is not None and asked:
        raise ValueError(
            f"{call}(chunk_size={given['chunk_size']!r}, {asked[0]}={given[asked[0]]!r}): give the size of a chunk, or "
            "arguments of the search for one, not both."
        )
    ratio, policy = given.get("gpu_margin_mem_ratio"), given["placement_policy"]
    if ratio is not None and policy != "auto":
        raise ValueError(
            f"{call}(gpu_margin_mem_ratio={ratio!r}, placement_policy={policy!r}): the ratio acts with "
            "placement_policy='auto' only; leave it None."
        )
    if "initial_scale" in given:
        check_loss_scaling(call, given)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """In bytes (-1: no limit)."""

    device: torch.device
    precision: Precision
    policy: str
    device_budget: int
    host_budget: int
    host_limit: int = -1  # of homes
    sizes: ChunkSizes
    is_grad_f32: bool
    margin: float | None = None
    convert_inputs: bool
    force_outputs_fp32: bool = False
    threads: int
    rates: tuple[float, ...]
    is_tuned: bool = False
    report: bool | None = None
    weights: Weights | None = None
    missing: str = "refuse"

    def core_arguments(self, registration: "Registration", n_shards: int = 1) -> dict[str, Any]:
        """What the core is made of for a model, by the names of its arguments; a run and an estimate begin here.

        Args:
            registration: of the model.
            n_shards: ranks that share a chunk.
        """
        specs = registration.specs()
        kinds = list(dict.fromkeys(spec[1:] for spec in specs))
        shapes = [(spec[0], spec[1], kinds.index(spec[1:])) for spec in specs]
        is_cuda = self.device.type == "cuda"
        chunk_bytes, block_bytes = self.sizes.choose(shapes, self.device_budget, is_cuda, n_shards)
        unit_params, unit_begin = registration.unit_tables()
        slots, cuts = registration.slots, registration.cuts()
        params = [(*s, slot.name, n) for s, slot, n in zip(specs, slots, cuts, strict=True)]
        return {
            "ordinal": self.device.index if is_cuda else -1,
            "params": params,
            "state_bytes": registration.state_bytes(params, chunk_bytes, n_shards),
            "unit_params": unit_params,
            "unit_begin": unit_begin,
            "unit_names": registration.unit_names(),
            "chunk_bytes": chunk_bytes,
            "block_bytes": block_bytes,
            "device_budget": self.device_budget,
            "host_budget": self.host_budget,
            "host_limit": self.host_limit,
            "policy": POLICIES[self.policy],
            "is_grad_f32": self.is_grad_f32,
            "rates": self.rates,
            "state_share": 1.0 if self.margin is None else self.margin,
            "is_tuned": self.is_tuned,
        }
