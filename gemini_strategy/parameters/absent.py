"""Absent tensors: shape, dtype, device and a place in autograd, but no bytes; what needs bytes is served.

A managed parameter outside its module, a gradient that the engine holds, an entry of an optimizer's state is an
ordinary `torch.Tensor` whose storage is absent and whose dispatch keys have one more. The dispatcher therefore brings
every operation on it here, whoever asks: eager code, TorchScript, vmap, autograd's own nodes, constructors of sparse
and nested tensors. This is below autograd: leaves, graphs, views and versions are torch's own, and need nothing of
us.

Invariants
    1. No kernel gets an absent tensor: `serve` puts a plain one of the same geometry, from the tensor's home, in its
       place. What reads no bytes (views, metadata) passes through, so that a view of an absent tensor is absent
       (`PASSED`).
    2. What an operation writes is its home's before the operation returns, or at the end of the lease that it wrote
       through. A collective is waited for where that is before its bytes come (collectives.py).
    3. What takes memory or numbers past the dispatcher (NumPy, DLPack, addresses, pickle, float()) asks at a door first
       (doors.py).
    4. What asks at no door (a C++ extension without dispatch) finds NaN that cannot be written on the host, and an
       error with the parameter's name on CUDA; never another chunk's bytes.

The key is the one that torch reserves for fake tensors made outside of its Python (DispatchKey::Fake): no tensor of
torch's own has it, and `install` refuses a torch in which somebody else serves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gemini_strategy import _C, _torch
from gemini_strategy._torch import tree_flatten, tree_map, tree_unflatten
from gemini_strategy.errors import GeminiError, GuardError
from gemini_strategy.parameters import collectives, gate, keyed, order
from gemini_strategy.weakly import WeakSet

KEY = _torch.dispatch_key("Fake")
KEYS = _torch.DispatchKeySet(KEY)
_PLAINLY = KEYS | keyed.MODES | gate.KEYS
set_data = keyed.set_data
_address = _torch.storage_address

# Views, changes of metadata, and what asks for metadata alone.
_PASSED = """
    _conj _has_compatible_shallow_copy_type _neg_view
    alias as_strided as_strided_ detach detach_ diagonal expand permute select.int
    slice.Tensor split.Tensor split_with_sizes squeeze squeeze.dim squeeze.dims squeeze_ squeeze_.dim
    squeeze_.dims t t_ transpose.int transpose_ unbind.int unfold unsqueeze unsqueeze_ view view.dtype
    _reshape_alias lift_fresh is_set_to is_same_size is_pinned empty_like new_empty new_empty_strided
    new_zeros new_ones new_full zeros_like ones_like full_like rand_like randn_like randint_like
    randint_like.low_dtype
"""
PASSED = frozenset(_PASSED.split())
# They write arguments that their schemas call read.
_WRITES_UNSAID = {
    "aten::batch_norm",
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::miopen_batch_norm",
    "aten::instance_norm",
    "aten::_batch_norm_impl_index",
    "aten::fused_moving_avg_obs_fake_quant",
}
_OVER_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
# Their schemas say what they write; of others nobody knows.
_TOLD = ("aten", "prims", "prim", "bitsandbytes", "torchao")
_FIXED = "its size is fixed; gemini_strategy.engine_of(model).close() first"
_REFUSED = {
    "aten::set_": "its storage is the engine's; use copy_() or p.data = value",
    "aten::resize_": _FIXED,
    "aten::resize_as_": _FIXED,
}


class Home:
    """Where the bytes of an absent tensor are.

    Attributes:
        name: of the parameter, for errors.
        key: of the parameter's field that it is (homes.py); "" for what is none, or none any more.
        is_gone: it has no bytes any more: whoever asks is told why.
        memory: the tensor has memory of its own that `open` brings up to date (an entry of a state dict), or None.
    """

    name = ""
    key = ""
    is_gone = False
    memory: torch.Tensor | None = None

    def open(self, is_written: bool) -> torch.Tensor:
        """A plain tensor with the present values, in the geometry of the whole."""
        raise NotImplementedError

    def write(self, values: torch.Tensor) -> None:
        """`values`, in the geometry of what `open` gives, are the present ones: what it gave may be a copy."""

    @property
    def unit(self) -> Any:
        """Of a parameter: one that shows it; else None."""
        return None

    def borrow(self) -> bool:
        """Enters that while a module runs that has it below it; whether it did: see borrowing.py."""
        return False

    def takes_late(self) -> bool:
        """Whether what is written into what `open` gave counts when it comes after `write`, too."""
        return False

    def note_same(self) -> None:
        """Its bytes were written with themselves."""

    def replace(self, shown: torch.Tensor, value: torch.Tensor) -> None:
        """`shown.data = value`, of one of its tensors."""
        set_data(shown, value)

    def is_of(self, slot: Any, key: str) -> bool:
        """Whether it is this field of this slot."""
        return False


class _Gone(Home):
    is_gone = True

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        self.why = why

    def open(self, is_written: bool) -> torch.Tensor:
        raise GuardError(f"{self.name}: {self.why}")


class _Kept(Home):
    def __init__(self, name: str, values: torch.Tensor, is_own: bool) -> None:
        self.name = name
        self.values = values
        self.memory = values if is_own else None

    def open(self, is_written: bool) -> torch.Tensor:
        return self.values

    def takes_late(self) -> bool:
        return True


class _Entry(NamedTuple):
    """Of a storage: it stands for as long as anybody has the storage, so its address is nobody else's."""

    home: Home
    anchor: torch.Tensor  # keeps the storage
    n_own: int  # users of a storage that nobody has: torch's wrapper, the anchor, the home

    @property
    def n_users(self) -> int:
        return _torch.storage_use_count(_address(self.anchor)) - self.n_own


_homes: dict[int, _Entry] = {}  # by the storage's address
_n_live = 0  # of them, when last counted
_heavy: set[int] = set()  # addresses of homes with memory of their own
_n_heavy = 0  # of them, when last swept
# Of the open engines: doors ask `net.find` which slot's bytes a plain tensor shows.
nets: WeakSet[Any] = WeakSet()


def is_in_use() -> bool:
    """Whether an engine is open, or anybody has an absent tensor."""
    if any(True for _ in nets):
        return True
    drop_unused()
    return bool(_homes)


def n_storages() -> int:
    """How many storages are absent, those included that nobody has any more."""
    return len(_homes)


def is_absent(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _torch.dispatch_keys(value).has(KEY)


def tensor(
    home: Home,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    is_gated: bool = False,
) -> torch.Tensor:
    """A tensor whose bytes are `home`'s, for as long as any tensor has its storage.

    `home` must not keep its engine; the strides are dense. is_gated: it is to be a parameter's data.
    """
    global _n_live
    if 8 * (len(_heavy) - _n_heavy) >= _n_heavy:  # an eighth more: a sweep looks at all
        sweep()
    if len(_homes) > 2 * _n_live + 16:  # now and then
        drop_unused()
        _n_live = len(_homes)
    storage = None
    if home.memory is not None:
        storage = home.memory.untyped_storage()
    elif device.type == "cpu":
        size = math.prod(shape) * dtype.itemsize
        storage = _torch.storage_from_address(_C.absent_range(size), device, size)
    keys = KEYS | gate.KEYS if is_gated else KEYS
    result = keyed.tensor(keys, storage, shape, strides, dtype, device)
    if home.memory is None and device.type == "cpu":
        _torch.refuse_writing(result)
    elif home.memory is None:
        text = f"{home.name} is not here: its module is not running (p.clone() gives its values)"
        _torch.refuse_access(_address(result), text)
    storage = None  # the tensor has it, too
    address = _address(result)
    anchor = _torch.TensorBase.data.__get__(result)  # no view, which would keep it
    entry = _Entry(home, anchor, _torch.storage_use_count(address) - 1)
    if home.memory is not None:
        _heavy.add(address)
    _homes[address] = entry
    return result


def forget(shown: torch.Tensor, why: str) -> None:
    """The bytes of the storage of `shown` are gone: whoever still has it is told `why`."""
    _move(shown, lambda name: _Gone(name, why))


def keep(shown: torch.Tensor, values: torch.Tensor) -> None:
    """The storage of `shown` stands for `values` from now on, whatever becomes of its home."""
    is_own = _address(values) == _address(shown)
    _move(shown, lambda name: _Kept(name, values, is_own))


def _move(shown: torch.Tensor, make: Callable[[str], Home]) -> None:
    address = _address(shown)
    before = _homes.get(address)
    if before is not None:  # else nobody has it any more
        home = make(before.home.name)
        # The old home goes; if it does not, this is one too few, and the tensor is kept.
        n_own = before.n_own - (before.home.memory is not None) + (home.memory is not None)
        _homes[address] = _Entry(home, before.anchor, n_own)


def anchor_of(shown: torch.Tensor) -> torch.Tensor:
    """A tensor with the storage of an absent one that is none of its users."""
    return _homes[_address(shown)].anchor


def n_users(shown: torch.Tensor) -> int:
    """How many tensors have the storage of an absent one, itself included."""
    return _homes[_address(shown)].n_users


def plain(shown: torch.Tensor, is_written: bool = False) -> torch.Tensor:
    """An absent tensor's values, in its geometry: its memory where it has some, else a copy or a lease."""
    with plainly(), torch.no_grad():
        return like(home_of(shown).open(is_written), shown)


def drop_unused() -> None:
    """Lets go of every storage that nobody has any more."""
    _drop(list(_homes))


def sweep() -> None:
    """The same for those with memory: state dicts are as large as the model."""
    _drop(list(_heavy))


def _drop(addresses: list[int]) -> None:
    global _n_heavy
    # Threads and finalizers may come in anywhere: what `entries` has keeps its address until the end.
    entries = [(a, _homes.get(a)) for a in addresses]
    for address, entry in entries:
        if entry is not None and entry.n_users <= 0:
            _homes.pop(address, None)
            _heavy.discard(address)
    _n_heavy = len(_heavy)


def _home_at(address: int) -> Home:
    found = _homes.get(address)
    if found is None:
        raise GuardError(
            "a tensor without bytes: what it showed was a managed model's, which is gone"
        )
    return found.home


def home_of(value: torch.Tensor) -> Home:
    return _home_at(_address(value))


def _name_of(value: Any) -> str | None:
    is_one = isinstance(value, torch.Tensor) and is_absent(value)
    return home_of(value).name if is_one else None


def plainly() -> Any:
    """A context without this module and without the caller's modes (FakeTensorMode and the like).

    torch's own: an interrupt in one that is written in Python could leave the keys off.
    """
    return _torch.ExcludeDispatchKeyGuard(_PLAINLY)


def like(base: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """`base`, the whole of a home, as a view of its absent tensor: its geometry, conjugate and negative as that is."""
    if shown.dtype != base.dtype:
        n = shown.element_size() // math.gcd(shown.element_size(), base.element_size())
        base = order.flat(base)[: base.numel() // n * n].view(shown.dtype)
    if (shown.shape, shown.stride(), shown.storage_offset()) != (base.shape, base.stride(), 0):
        base = base.as_strided(shown.shape, shown.stride(), shown.storage_offset())
    return keyed.with_bits(base, shown.is_conj(), shown.is_neg())


# ---- operations ----


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int] | None:
    """id() of the tensors that the operation may write; None: of any."""
    schema = op._schema
    namespace = schema.name.split("::")[0]
    if collectives.only_reads(schema.name):
        return set()
    if namespace not in _TOLD or schema.name in _WRITES_UNSAID:
        return None
    if not schema.is_mutable:
        return set()
    named = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
    return {
        id(item)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for item in tree_flatten(named.get(argument.name))[0]
    }


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two absent tensors are one view of the same bytes."""
    views = {(_address(t), t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (a, b)}
    return len(views) == 1


def _one_by_one(op: Any, n: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation over lists of n, element after element: not everything has to have room at once."""
    named = dict(zip([a.name for a in op._schema.arguments], args, strict=False)) | kwargs

    def at(i: int, name: str, value: Any) -> Any:
        is_list = isinstance(value, list | tuple) or name == "scalars"  # these in a tensor, too
        return value[i : i + 1] if is_list and len(value) == n else value

    results = [op(**{k: at(i, k, v) for k, v in named.items()}) for i in range(n)]
    if results[0] is None:
        return None
    if isinstance(results[0][0], list | tuple):
        return tuple(
            [item for result in results for item in result[k]] for k in range(len(results[0]))
        )
    return [item for result in results for item in result]


def _borrow(homes: Sequence[Home]) -> bool:
    """Whether the parameters that an operation reads are shown from now on, if they are one module's."""
    units = {home.unit for home in homes}
    return len(units) == 1 and None not in units and homes[0].borrow()


def _borrow_arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The same of an operation's arguments, where it only reads."""
    if _written(op, args, kwargs) != set():
        return False
    return _borrow([home_of(v) for v in (*args, *kwargs.values()) if is_absent(v)])


def serve(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The dispatcher's kernel for every operation with an absent tensor among its arguments."""
    name = op._schema.name
    flat, spec = tree_flatten((args, kwargs))
    # Once: a thread that enters the parameter's unit meanwhile gives it another storage.
    found = [(i, item, _address(item)) for i, item in enumerate(flat) if is_absent(item)]
    absent = [
        (i, item, address) for i, item, address in found if address in _homes or is_absent(item)
    ]
    if not absent:
        return op(*args, **kwargs)
    if len(absent) > 1 and name.startswith(_OVER_LISTS):
        lists = [a for a in args if isinstance(a, list | tuple) and any(map(torch.is_tensor, a))]
        n = max(map(len, lists), default=0)  # a fused operation on one tensor has no such list
        if n > 1:
            return _one_by_one(op, n, args, kwargs)
    if name in _REFUSED and (absent[0][0] == 0 or name == "aten::set_"):
        raise GuardError(f"{_home_at(absent[0][2]).name}: {name.split('::')[1]}: {_REFUSED[name]}")
    if _torch.dispatch_mode(_torch.DispatchModeKey.FAKE) is not None:
        raise GuardError(
            f"{_home_at(absent[0][2]).name}: a fake mode has no use for managed values: "
            "gemini_strategy.engine_of(model).close() first"
        )
    if name == "aten::copy_" and len(absent) > 1 and _is_same(*args[:2]):
        _home_at(absent[0][2]).note_same()
        return args[0]
    writes = _written(op, args, kwargs)
    if writes == set() and _borrow([_home_at(a) for _, _, a in absent]):
        return op(*args, **kwargs)
    opened: dict[int, tuple[Home, torch.Tensor, bool]] = {}
    for _, item, address in absent:
        is_written = writes is None or id(item) in writes
        if address not in opened or (is_written and not opened[address][2]):
            opened[address] = (_home_at(address), item, is_written)
    hasty = [
        home for home, _, is_written in opened.values() if is_written and not home.takes_late()
    ]
    for home in hasty:
        collectives.check(name, home.name)
    with plainly():
        bases = {a: home.open(is_written) for a, (home, _, is_written) in opened.items()}
        shown_as: dict[int, torch.Tensor] = {}
        for i, item, address in absent:
            flat[i] = like(bases[address], item)
            shown_as[id(flat[i])] = item
    args, kwargs = tree_unflatten(flat, spec)
    kept = {id(item) for item in flat}
    # Of most operations torch has counted the write by now. Of those over lists the kernel counts it.
    counted = {i: flat[i]._version for i, _, _ in absent if not flat[i].is_inference()}
    result = op(*args, **kwargs)
    written = [bases[a] for a, (_, _, is_written) in opened.items() if is_written]
    collectives.wait(name, bool(hasty), written, result)
    of_base = {_address(base): a for a, base in bases.items()}

    def returned(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in shown_as:
            return shown_as[id(value)]
        if id(value) in kept or not _torch.has_storage(value) or _address(value) not in of_base:
            return value
        anchor = _homes[of_base[_address(value)]].anchor
        return like(anchor.detach(), value)  # a view: absent, too

    with plainly():
        result = tree_map(returned, result)
        resized = [each for each in absent if flat[each[0]].shape != each[1].shape]
        for i, item, _ in absent:
            if i in counted and flat[i]._version != counted[i] and not item.is_inference():
                torch.autograd.graph.increment_version(item)
        for i, item, _ in resized:  # torch resizes what `out=` names
            flat[i].as_strided_(item.shape, item.stride(), item.storage_offset())
        for address, (home, _, is_written) in opened.items():
            if is_written:
                home.write(bases[address])
    for _, _, address in resized:
        raise GuardError(f"{_home_at(address).name}: out=: {_FIXED}")
    return result


# ---- plain tensors ----


def slot_behind(value: Any) -> Any:
    """The slot whose bytes a plain tensor shows, or None."""
    if isinstance(value, _torch.FakeTensor):  # it has none
        return None
    for net in list(nets):
        try:
            slot = net.find(value)
        except RuntimeError:  # no address at all: not ours
            return None
        if slot is not None:
            return slot
    return None


# ---- the kernel ----

_libraries: list[torch.library.Library] = []


def install() -> None:
    """Puts the kernel in place, once per process; without absent tensors nothing changes.

    Raises:
        GeminiError: this torch serves the key itself.
    """
    if _libraries:
        return
    for key, name in ((KEY, "Fake"), (gate.KEY, "DeferredInit")):
        if _torch.has_backend_fallback(key):
            raise GeminiError(
                f"torch {torch.__version__} uses the dispatch key {name} itself, by which managed parameters are served"
            )
    # `with torch.device(...)` remembers by identity, at its first use, the functions that it gives a device.
    _torch.device_constructors()
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(serve, "Fake")
    passed = torch.library.Library("aten", "IMPL")
    for name in PASSED:
        passed.impl(name, torch.library.fallthrough_kernel, "Fake")
    gate.install(everything, passed, _name_of, _borrow_arguments)
    _libraries.extend([everything, passed])
