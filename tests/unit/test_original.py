"""`manage()` finishes, or leaves the model and the optimizer as they were: whatever raises, wherever.

The n-th call that is made in building an engine raises, for one n after the other: of the package's own functions and
of torch's that it calls. Then everything that can be seen of the model is what it was, and manage() succeeds.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gemini_strategy as gs
from gemini_strategy.optim import managed
from gemini_strategy.parameters.slot import Slot
from helpers.ranks import run_ranks, values
from helpers.reference import bits

PACKAGE = str(Path(gs.__file__).parent)


N_SITES = int(os.environ.get("GEMINI_TEST_FAULTS", "150"))  # 0: all of them
PUTTING_BACK = ("restore", "give_up", "_clear_frames")


class _Stop(BaseException):
    """What nobody catches by mistake."""


class Net(nn.Module):
    """Tied, frozen, half-precision and channels_last parameters, buffers, hooks, a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
        self.head, self.tied = nn.Linear(16, 16), nn.Linear(16, 16)
        self.tied.weight = self.head.weight
        self.narrow = nn.Linear(16, 16, bias=False, dtype=torch.bfloat16)
        self.compiled = nn.Linear(16, 16)
        self.compiled.compile(backend="eager")
        self.attention = nn.MultiheadAttention(16, 2)
        self.register_buffer("scale", torch.ones(3))
        self.head.bias.requires_grad_(False)
        self.narrow.eval()
        self.to(memory_format=torch.channels_last)
        self.body[0].register_forward_hook(lambda *_: None)
        self.head.register_full_backward_hook(lambda *_: None)
        self.tied.bias.register_hook(lambda grad: grad)
        self.narrow.weight.register_post_accumulate_grad_hook(_nothing)
        self.tied.forward = self.tied.forward
        self.narrow.weight.note = "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tied(torch.tanh(self.head(self.body(x))))
        x = x + self.narrow(x.bfloat16()).float() + self.compiled(x)
        return self.attention(x, x, x)[0] * self.scale.sum()


def _nothing(parameter: torch.Tensor) -> None:
    pass


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(3, 2, 4, 4)).square().sum().backward()
    optimizer.step()


def _ordinary() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """A model that was trained, with gradients, and an optimizer with states and a scheduler."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    _step(model, optimizer)
    return model, optimizer, {}


def _fresh() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """In another precision, with what cast_model_ keeps beside the weights."""
    model = gs.cast_model_(nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7)), "bf16-true")
    return model, gs.HybridAdam(model.parameters()), {"precision": "16-mixed"}


def _blank() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """On the meta device, in part, with initial values that draw random numbers."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[2] = nn.Linear(7, 3)
    model[0].weight.register_hook(lambda grad: grad)
    return model, torch.optim.AdamW(model.parameters()), {}


def _from_file(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """Values of parameters and buffers from a file, for some that have values and some that have none."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    save_file(model.state_dict(), str(folder / "model.safetensors"))
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, device="meta"))
    how = {"weights": folder / "model.safetensors"}
    return model, torch.optim.AdamW(model.parameters()), how


MODELS = (_ordinary, _fresh, _blank, _from_file)


def _made(make: Callable, folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    torch.manual_seed(5)
    return make(folder) if make is _from_file else make()


# ---- what can be seen ----


def _tensor_facts(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    facts: list[Any] = [id(tensor), type(tensor), tensor.dtype, tensor.device, tensor.stride()]
    facts += [tuple(tensor.shape), tensor.requires_grad, tensor.storage_offset()]
    if not tensor.is_meta:
        facts += [tensor.data_ptr(), tensor.untyped_storage()._cdata]
        facts.append(bits(tensor.detach()).tolist())
    return facts


def _names(table: dict[Any, Any] | None) -> Any:
    return None if table is None else (id(table), [(k, id(v)) for k, v in table.items()])


def _seen(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    seen: dict[str, Any] = {"engine": gs.engine_of(model)}
    for name, module in model.named_modules(remove_duplicate=False):
        seen[f"{name}: class"] = type(module)
        seen[f"{name}: attributes"] = _names(module.__dict__)
        seen[f"{name}: call"] = id(module._compiled_call_impl)
        for key, value in module.__dict__.items():
            if isinstance(value, dict):
                seen[f"{name}: {key}"] = _names(value)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            seen[f"{name}: tensor {key}"] = _tensor_facts(tensor)
    for name, p in model.named_parameters():
        seen[f"{name}: grad"] = _tensor_facts(p.grad)
        seen[f"{name}: attributes"] = _names(p.__dict__)
        seen[f"{name}: hooks"] = _names(p._backward_hooks)
        seen[f"{name}: grad hooks"] = _names(p._post_accumulate_grad_hooks)
    seen["optimizer"] = [type(optimizer), _names(optimizer.__dict__), type(optimizer.state)]
    seen["groups"] = [_names(group) for group in optimizer.param_groups]
    for number, (p, state) in enumerate(optimizer.state.items()):
        seen[f"state {number}"] = [id(p), _names(state)]
        seen[f"state {number}: tensors"] = [_tensor_facts(v) for v in state.values()]
    seen["random numbers"] = torch.get_rng_state().tolist()
    seen["modes"] = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device()]
    seen["hooks of saved tensors"] = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return seen


def _assert_same(now: dict[str, Any], then: dict[str, Any]) -> None:
    assert [key for key in {**then, **now} if now.get(key) != then.get(key)] == []


# ---- faults ----


Site = tuple[str, int, str]  # function, line, what it calls in C


class _Fault:
    """Inside, the n-th call at one place raises: of a function of the package, or by it of one in C."""

    def __init__(self, site: Site | None = None, n: int = 1) -> None:
        self._site, self._left = site, n
        self.counts: dict[Site, int] = {}
        self.has_raised = False

    def _seen(self, frame: Any, event: str, function: Any) -> None:
        if event not in ("call", "c_call"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name == "<genexpr>":
            return  # (a generator is called, too, when it is thrown away, where nothing can be raised)
        called = function.__name__ if event == "c_call" else ""
        if called in ("__enter__", "__exit__"):
            return  # (an error in the place of an __exit__ of torch's leaves on what it would have switched off)
        site = (code.co_qualname, frame.f_lineno, called)
        if self._site is not None and site != self._site:
            return
        if any(f.f_code.co_name in PUTTING_BACK for f in _callers(frame)):
            return  # what puts things back is not to be hit
        self.counts[site] = self.counts.get(site, 0) + 1
        if self.counts[site] == self._left:
            sys.setprofile(None)
            self.has_raised = True
            raise _Stop(f"{site}, call {self._left}")

    def __enter__(self) -> _Fault:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *args: object) -> None:
        sys.setprofile(None)


def _callers(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _calls(make: Callable, folder: Path) -> dict[Site, int]:
    """How often each place is passed."""
    model, optimizer, how = _made(make, folder)
    fault = _Fault(n=1 << 60)
    with fault:
        engine = gs.manage(model, optimizer, device="cpu", **how)
    engine.close()
    return fault.counts


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_fault_anywhere_changes_nothing(make: Callable, tmp_path: Path) -> None:
    _calls(make, tmp_path)  # what is done once per process
    counts = _calls(make, tmp_path)
    assert len(counts) > 300
    draw = random.Random(make.__name__)
    n_raised = 0
    model, optimizer, how = _made(make, tmp_path)
    before = _seen(model, optimizer)
    for site in draw.sample(sorted(counts), N_SITES or len(counts)):
        fault = _Fault(site, draw.randint(1, counts[site]))
        try:
            with fault:
                engine = gs.manage(model, optimizer, device="cpu", **how)
        except BaseException as error:
            assert fault.has_raised, error
            _assert_same(_seen(model, optimizer), before)
            n_raised += 1
            continue
        # It was passed less often this time, or the error was met by somebody who could do without.
        assert engine.model is model
        engine.close()
        model, optimizer, how = _made(make, tmp_path)
        before = _seen(model, optimizer)
    assert n_raised > 0.9 * (N_SITES or len(counts))
    engine = gs.manage(model, optimizer, device="cpu", **how)  # nothing is left in its way
    engine.close()


def test_a_second_try_where_the_first_ones_error_is_handled() -> None:
    """The error's frames held tensors of the first try."""
    model, optimizer, _ = _ordinary()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Slot, "write_grad", _boom)
            gs.manage(model, optimizer, device="cpu")
    except _Stop:
        engine = gs.manage(model, optimizer, device="cpu")
    engine.close()


def _boom(*_: Any) -> None:
    raise _Stop("boom")


def _fail_on_one(rank: int, size: int) -> str:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    model[1].running_mean.fill_(rank)
    optimizer = torch.optim.AdamW(model.parameters())
    before = _seen(model, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(managed, "install", _boom)
        else:  # the others meet that here
            patch.setattr(managed, "install", lambda engine, _: engine.ranks.gather("a meeting"))
        with pytest.raises((_Stop, gs.GeminiError)) as error:
            gs.manage(model, optimizer, device="cpu")
    _assert_same(_seen(model, optimizer), before)
    engine = gs.manage(model, optimizer, device="cpu")
    engine.close()
    return str(error.value)


def test_a_fault_on_one_rank_changes_no_model(tmp_path: Path) -> None:
    others, own = values(run_ranks(2, tmp_path, _fail_on_one))
    assert own == "boom" and "rank 1 said: manage(): _Stop: boom" in others
