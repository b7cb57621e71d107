"""The names of torch that are not public: all that this package uses stand here, and are looked up at its import.

Of a module that takes a second to import only the code is read then, and the name is looked up when it is used.

What comes from torch.fx.experimental, torch.utils._pytree and torch._guards is of this kind, too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from importlib.abc import InspectLoader
from importlib.machinery import PathFinder
from typing import Any

import torch

from gemini_strategy import _C

NAMES: list[str] = []  # all that were looked up
_missing: list[str] = []


def _private(path: str) -> Any:
    """What torch has under a dotted path, a module of its own included."""
    NAMES.append(path)
    try:
        return functools.reduce(getattr, path.split(".")[1:], torch)
    except AttributeError:
        pass
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        _missing.append(path)
        return None


def _cuda_private(path: str) -> Any:
    """The same for a name that builds for the CPU may lack; nothing asks for it there."""
    return _private(path) if torch.version.cuda is not None else None


def _generator_cell(path: str) -> Any:
    """The cell in which a context manager that contextlib has made of a generator has that generator."""
    function = _private(path)
    cells = getattr(function, "__closure__", None) or ()
    if function is not None and [cell.cell_contents for cell in cells] != [
        inspect.unwrap(function)
    ]:
        _missing.append(f"the generator of {path}")
    return next(iter(cells), None)


def _in_code(path: str) -> str:
    """A path whose last name stands in its module's code. It is read, not run: that would take a second."""
    module, _, name = path.rpartition(".")
    above, places, loader = "torch", torch.__path__, None
    for part in module.split(".")[1:]:
        above = f"{above}.{part}"
        spec = PathFinder.find_spec(above, places)
        loader = None if spec is None else spec.loader
        places = [] if spec is None else spec.submodule_search_locations or []
    code = loader.get_code(module) if isinstance(loader, InspectLoader) else None
    if code is None or name not in code.co_names:
        _missing.append(path)
    return path


# ---- tensors and their storages ----

TensorBase: Any = _private("torch._C.TensorBase")
make_subclass = _private("torch.Tensor._make_subclass")
make_wrapper_subclass = _private("torch.Tensor._make_wrapper_subclass")
DisableFuncTorch: Any = _private("torch._C._DisableFuncTorch")
swap_tensor_impl = _private("torch._C._swap_tensor_impl")
neg_view = _private("torch._neg_view")
has_storage = _private("torch._C._has_storage")
storage_address = _private("torch._C._storage_address")
storage_use_count = _private("torch._C._storage_Use_Count")
storage_from_address = _private("torch._C._construct_storage_from_data_pointer")
refuse_writing = _private("torch._C._set_throw_on_mutable_data_ptr")
refuse_access = _cuda_private("torch._C._set_storage_data_ptr_access_error_msg")

# ---- dispatch ----

DispatchKey: Any = _private("torch._C.DispatchKey")
DispatchKeySet: Any = _private("torch._C.DispatchKeySet")
ExcludeDispatchKeyGuard: Any = _private("torch._C._ExcludeDispatchKeyGuard")
ForceDispatchKeyGuard: Any = _private("torch._C._ForceDispatchKeyGuard")
excluded_keys = _private("torch._C._dispatch_tls_local_exclude_set")
included_keys = _private("torch._C._dispatch_tls_local_include_set")
DispatchModeKey: Any = _private("torch._C._TorchDispatchModeKey")
dispatch_key = _private("torch._C._dispatch_key_parse")
dispatch_keys = _private("torch._C._dispatch_keys")
dispatch_mode = _private("torch._C._get_dispatch_mode")
DispatchMode: Any = _private("torch.utils._python_dispatch.TorchDispatchMode")
n_dispatch_modes = _private("torch._C._len_torch_dispatch_stack")
without_modes = _private("torch.utils._python_dispatch._disable_current_modes")
has_backend_fallback = _private("torch._C._dispatch_has_backend_fallback")
all_operator_names = _private("torch._C._dispatch_get_all_op_names")
DisableTorchFunctionSubclass: Any = _private("torch._C.DisableTorchFunctionSubclass")
disabled_torch_function = _private("torch._C._disabled_torch_function_impl")
exclude_key = _private("torch._C._dispatch_tls_set_dispatch_key_excluded")
n_dispatch_modes = _private("torch._C._len_torch_dispatch_stack")

# ---- tracing, scripting, autograd ----

tracing_state = _private("torch._C._get_tracing_state")
is_tracing = _private("torch._C._is_tracing")
# torch.inference_mode is a context in Python: an interrupt in it leaves torch's guard to the garbage collector, which
# puts the dispatch keys back that were excluded when it began.
InferenceMode: Any = _private("torch._C._InferenceMode")
has_autocast = _private("torch._C.is_autocast_enabled")  # public as torch's own
detect_fake_mode = _private("torch._guards.detect_fake_mode")
current_node = _private("torch._C._current_autograd_node")
current_task = _private("torch._C._current_graph_task_id")
has_saved_tensors_hooks = _private("torch._C._autograd._saved_tensors_hooks_is_enabled")
top_saved_tensors_hooks = _private("torch._C._autograd._top_saved_tensors_default_hooks")
push_saved_tensors_hooks = _private("torch._C._autograd._push_saved_tensors_default_hooks")
pop_saved_tensors_hooks = _private("torch._C._autograd._pop_saved_tensors_default_hooks")
disabling_saved_tensors_hooks = _generator_cell("torch.autograd.graph.disable_saved_tensors_hooks")
proxy_tensor: Any = _private("torch.fx.experimental.proxy_tensor")
# The module that asks for addresses to make fake tensors.
META_CONVERTER = "torch._subclasses.meta_utils"
_COMPILER_CALLBACKS = _in_code("torch._dynamo.callback.CompilationCallbackHandler")
recursive_scripting: Any = _private("torch.jit._recursive")
optimizer: Any = importlib.import_module("torch.optim.optimizer")  # torch.optim hides it
FOREACH_TYPES = "_foreach_supported_types"
_private(f"torch.optim.optimizer.{FOREACH_TYPES}")
register_builtin = _private("torch.jit._builtins._register_builtin")
is_wrapper_subclass = _private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
execution_engine: Any = _private("torch.autograd.Variable._execution_engine")
device_constructors = _private("torch.utils._device._device_constructors")

# ---- trees of values, modules, processes ----

tree_flatten = _private("torch.utils._pytree.tree_flatten")
tree_map = _private("torch.utils._pytree.tree_map")
tree_unflatten = _private("torch.utils._pytree.tree_unflatten")
COMPILED_CALL = "_compiled_call_impl"  # of a module: where it is not None, torch calls it
_private(f"torch.nn.Module.{COMPILED_CALL}")
_private("torch.nn.Module._call_impl")
BatchNormBase: Any = _private("torch.nn.modules.batchnorm._NormBase")
wait_tensor = _private("torch.ops._c10d_functional.wait_tensor")
unbox_work = _private("torch.distributed.Work.unbox")
set_process_group_timeout = _private("torch.distributed.distributed_c10d._set_pg_timeout")

# Of a function: its calls are not traced. torch.compiler.disable does the same, and imports the compiler at once.
untraced = _private("torch._disable_dynamo")

optimizers_pre_hooks: Any = _private("torch.optim.optimizer._global_optimizer_pre_hooks")
optimizers_post_hooks: Any = _private("torch.optim.optimizer._global_optimizer_post_hooks")

# ---- files ----

FakeTensor: Any = _private("torch._subclasses.fake_tensor.FakeTensor")
FakeTensorMode: Any = _private("torch._subclasses.fake_tensor.FakeTensorMode")
_STORAGE_INFO = _in_code("torch.distributed.checkpoint.filesystem._StorageInfo")
ArchiveReader: Any = _private("torch._C.PyTorchFileReader")

# ---- CUDA ----

current_raw_stream = _cuda_private("torch._C._cuda_getCurrentRawStream")
begin_allocate_to_pool = _cuda_private("torch._C._cuda_beginAllocateToPool")
end_allocate_to_pool = _cuda_private("torch._C._cuda_endAllocateToPool")
release_pool = _cuda_private("torch._C._cuda_releasePool")
is_history_enabled = _cuda_private("torch._C._cuda_isHistoryEnabled")
record_memory_history = _cuda_private("torch.cuda.memory._record_memory_history")
memory_snapshot = _cuda_private("torch.cuda.memory._snapshot")


def driver_version() -> str:
    """The CUDA that the driver offers; of a torch that does not tell, the CUDA that it was built for."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(torch.version.cuda if ask is None else ask())


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a plain tensor has its elements; its address is not given away (doors.py)."""
    address = TensorBase.data_ptr(tensor)
    return address, tensor.dtype, tensor.shape, tensor.stride()


def storage_id(storage: Any) -> int:
    """The same for all that torch makes of one storage, as long as it lives."""
    return int(storage._cdata)


def storage_info() -> Any:
    """torch.distributed.checkpoint's record of where something stands. The first call imports that.

    Raises:
        ImportError: this torch lacks it.
    """
    found = _private(_STORAGE_INFO)
    _refuse_missing()
    return found


def _refuse_missing() -> None:
    if _missing:
        lacked = ", ".join(_missing)
        _missing.clear()
        raise ImportError(
            f"torch {torch.__version__} lacks {lacked}, by which gemini_strategy manages parameters: "
            "install torch 2.11 to 2.13, which have them, or a gemini_strategy that is made for this torch"
        )


_refuse_missing()
# The core looks functions up in the libtorch that is loaded. Every module that gives it a tensor imports this one.
_C.torch_abi_init()


def compiler_callbacks() -> Any:
    """The class whose install_callbacks() is the context around all that Dynamo compiles.

    None before a program has imported the compiler, which takes a second.
    """
    module, _, name = _COMPILER_CALLBACKS.rpartition(".")
    return getattr(sys.modules.get(module), name, None)
