"""Checkpoints of models whose optimizer steps by itself: resume, state dicts, close; the reference is the run alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.optim import Optimizer

import gemini_strategy as gs
from gemini_strategy.checkpoint.manifest import Manifest
from helpers.reference import bits
from helpers.saving import Gate, contents

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

# ---- optimizers ------------------------------------------------------------------------------------


class Blocked(Optimizer):
    """A momentum in 8 bits, by blocks of 32, through a table that all parameters share."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})
        self.table = torch.linspace(-1, 1, 255)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                n_blocks = -(-p.numel() // 32)
                if not state:
                    state["step"] = 0
                    state["codes"] = torch.full_like(p, 127, dtype=torch.uint8)
                    state["absmax"] = torch.zeros(n_blocks, dtype=torch.float32, device=p.device)
                    state["table"] = self.table
                state["step"] += 1
                full = torch.zeros(n_blocks * 32)
                flat = full[: p.numel()]
                flat.copy_(state["table"][state["codes"].long()].reshape(-1))
                full.mul_(state["absmax"].repeat_interleave(32)).mul_(0.9)
                flat.add_(p.grad.reshape(-1).float())
                blocks = full.view(-1, 32)
                absmax = blocks.abs().amax(1)
                state["absmax"].copy_(absmax)
                scaled = blocks / absmax.clamp(min=1e-12)[:, None]
                codes = ((scaled + 1) * 127).round().to(torch.uint8).view(-1)
                state["codes"].copy_(codes[: p.numel()].view(p.shape))
                p.sub_(flat.view(p.shape).to(p.dtype), alpha=group["lr"])

    def load_state_dict(self, state_dict: Any) -> None:
        """torch's rounds all that a state has to the parameter's dtype."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for key, entry in state_dict["state"].items():
            own = self.state[params[key]]
            own.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()})
            own["table"] = self.table


class Counted(Optimizer):
    """Its step size depends on a count in its group, and on one of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 / (group["count"] + 1))
                    p.sub_(average, alpha=group["lr"] / (self.calls + 2) ** 0.5)


class Halves(Tensor):
    """A tensor kept as its sign and its size."""

    def __new__(cls, sign: Tensor, size: Tensor) -> Halves:
        kind = {"dtype": torch.float32, "device": size.device}
        return Tensor._make_wrapper_subclass(cls, size.shape, strides=size.stride(), **kind)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, sign: Tensor, size: Tensor) -> None:
        self.sign_bits, self.size_bits = sign, size

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["sign_bits", "size_bits"], ("v1", torch.float32)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["sign_bits"], inner["size_bits"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            inner = [func(x, *args[1:], **kwargs) for x in (args[0].sign_bits, args[0].size_bits)]
            return cls(*inner)
        if func is torch.ops.aten._to_copy.default:
            where = {"device": kwargs.get("device")}
            return cls(
                args[0].sign_bits.to(**where, copy=True), args[0].size_bits.to(**where, copy=True)
            )
        if func is torch.ops.aten.copy_.default:
            values = args[1].plain() if isinstance(args[1], Halves) else args[1]
            args[0].sign_bits.copy_(values.signbit())
            args[0].size_bits.copy_(values.abs())
            return args[0]
        raise NotImplementedError(func)

    def plain(self) -> Tensor:
        return torch.where(self.sign_bits, -self.size_bits.float(), self.size_bits.float())


class Wrapped(Optimizer):
    """A momentum of another class of tensors, with a counter on the host beside it."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    sign = torch.zeros_like(p, dtype=torch.bool)
                    state["momentum"] = Halves(sign, torch.zeros_like(p, dtype=torch.bfloat16))
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                momentum = state["momentum"].plain().mul_(0.9).add_(p.grad.float())
                state["momentum"].copy_(momentum)
                p.sub_(momentum.to(p.dtype), alpha=group["lr"] / (1 + 0.1 * float(state["step"])))


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "blocked": Blocked,
    "counted": Counted,
    "wrapped": Wrapped,
}
OTHERS: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "failing": lambda p: Failing(p, lr=0.05, momentum=0.9),
    "centered": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
each = pytest.mark.parametrize("name", OPTIMIZERS)


# ---- runs ------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A transposed weight, one that is never used, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)
        self.turned = nn.Parameter(torch.randn(4, 64).t())
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.randn(64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(nn.functional.gelu(self.first(x))) * self.frozen
        return hidden @ self.turned


class Run:
    """A model and its optimizer, managed or not."""

    def __init__(self, name: str, precision: str | None = None, seed: int = 0, **how: Any) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        if precision is None:
            self.model.to(how.pop("dtype", torch.float32))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [{"params": trained[:3]}, {"params": trained[3:], "lr": 0.004}]
        self.optimizer = (OPTIMIZERS | OTHERS)[name](groups)
        self.engine: Any = None
        if precision is not None:
            self.manage(precision, **how)

    def manage(self, precision: str | None, **how: Any) -> None:
        given = {"device": "cpu", "chunk_size": 8192, "initial_scale": 256.0} | how
        self.engine = gs.manage(self.model, self.optimizer, precision=precision, **given)

    def close(self, **how: Any) -> Run:
        self.engine.close(**how)
        self.engine = None
        return self

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            source = torch.Generator().manual_seed(step)
            x = torch.randn(8, 16, generator=source)
            is_mixed = self.engine is not None and "mixed" in str(self.engine.precision)
            x = x if is_mixed else x.to(self.model.first.weight.dtype)
            loss = self.model(x).float().square().mean()
            if self.engine is None:
                loss.backward()
            else:
                self.engine.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def masters(self) -> dict[str, Tensor]:
        if self.engine is None:
            return dict(self.model.state_dict())
        return dict(self.engine.model_state_dict())


def flat(value: Any) -> list[Any]:
    """Everything in a state, so that equal lists are equal bits."""
    if isinstance(value, Tensor):
        if isinstance(value, Halves):
            return ["halves", flat(value.sign_bits), flat(value.size_bits)]
        return [str(value.dtype), tuple(value.shape), bits(value).tolist()]
    if isinstance(value, dict):
        return [[key, flat(value[key])] for key in sorted(value, key=str)]
    if isinstance(value, list | tuple):
        return [flat(item) for item in value]
    return [value]


def outcome(run: Run) -> list[Any]:
    own = {k: v for k, v in vars(run.optimizer).items() if k in ("calls", "table")}
    return [flat(run.masters()), flat(run.optimizer.state_dict()), flat(own)]


WAYS = [
    {"placement_policy": "cpu"},
    {"placement_policy": "cuda"},
    {"device_budget": 1 << 19, "chunk_size": 1 << 16},
]


# ---- engine.save and engine.load -------------------------------------------------------------------


@each
@pytest.mark.parametrize("precision", PRECISIONS)
def test_resume_is_exact(name: str, precision: str, tmp_path: Path) -> None:
    run = Run(name, precision).train(0, 4)
    run.engine.save(tmp_path / "saved", {"step": 4})
    saved = outcome(run)
    want = outcome(run.train(4, 7))
    number = [*OPTIMIZERS].index(name) + PRECISIONS.index(precision)
    again = Run(name, precision, seed=5, **WAYS[number % len(WAYS)]).train(0, number % 3)
    assert again.engine.load(tmp_path / "saved") == {"step": 4}
    assert outcome(again) == saved
    assert outcome(again.train(4, 7)) == want


@each
def test_it_is_the_run_without_us(name: str, tmp_path: Path) -> None:
    """Saved, loaded elsewhere, closed: as the loop alone, with its optimizer."""
    want = outcome(Run(name).train(0, 7))
    run = Run(name, "32-true").train(0, 3)
    run.engine.save(tmp_path / "saved")
    again = Run(name, "32-true", seed=3, placement_policy="cuda")
    again.engine.load(tmp_path / "saved")
    again.train(3, 5).close()
    assert outcome(again.train(5, 7)) == want


def test_shared_tables_are_there_once(tmp_path: Path) -> None:
    """And stay one tensor, in a checkpoint, in a state dict and after close()."""
    run = Run("blocked", "32-true").train(0, 2)
    run.engine.save(tmp_path / "saved")
    names = [name for name in Manifest(tmp_path / "saved").tensors if name.endswith("table")]
    assert names == ["optimizer_0.state.turned.table"]
    again = Run("blocked", "32-true", seed=4)
    again.engine.load(tmp_path / "saved")
    for states in (
        again.optimizer.state_dict()["state"],
        again.engine.state_dict()["optimizer"]["state"],
        again.close().optimizer.state,
    ):
        assert len(states) == 5 and len({id(entry["table"]) for entry in states.values()}) == 1


@pytest.mark.parametrize("name", ["rmsprop", "blocked", "wrapped", "counted"])
@pytest.mark.parametrize("how", [{"placement_policy": "cpu"}, {}], ids=["cpu", "auto"])
def test_in_the_background(
    name: str, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of the call, though steps come before anything is written."""
    gate = Gate(monkeypatch)
    run = Run(name, "bf16-true", **how).train(0, 3)
    run.engine.save(tmp_path / "now")
    saving = run.engine.save(tmp_path / "later", background=True)
    run.train(3, 5)
    gate.open()
    assert contents(saving.wait()) == contents(tmp_path / "now")
    assert saving.copied_bytes > 0
    again = Run(name, "bf16-true", seed=8)
    again.engine.load(tmp_path / "later")
    assert outcome(again.train(3, 5)) == outcome(run)


def test_torchs_tools_read_it(tmp_path: Path) -> None:
    for name in ("blocked", "wrapped"):
        run = Run(name, "32-true").train(0, 2)
        run.engine.save(tmp_path / name)
        dcp_to_torch_save(tmp_path / name, tmp_path / "one.pt")
        states = torch.load(tmp_path / "one.pt")["optimizer_0"]["state"]
        assert len(states) == 5
        for key, got in states.items():
            want = run.optimizer.state[run.model.get_parameter(key)]
            if name == "blocked":
                assert got["step"] == want["step"] and torch.equal(got["codes"], want["codes"])
            else:
                assert torch.equal(got["momentum"]["size_bits"], want["momentum"].size_bits)
                assert torch.equal(got["step"], want["step"])


# ---- what does not fit ------------------------------------------------------------------------------


def _refused(run: Run, call: Callable[[], Any], *texts: str) -> None:
    """The call fails, its text has these, and nothing has changed."""
    before = outcome(run)
    with pytest.raises((gs.GeminiError, ValueError)) as error:
        call()
    assert all(text in str(error.value) for text in texts), str(error.value)
    assert outcome(run) == before


def test_of_another_optimizer(tmp_path: Path) -> None:
    adam = Run("adam", "32-true").train(0, 2)
    adam.engine.save(tmp_path / "adam")
    sgd = Run("sgd", "32-true").train(0, 2)
    sgd.engine.save(tmp_path / "sgd")
    _refused(sgd, lambda: sgd.engine.load(tmp_path / "adam"), "AdamW", "SGD", "model_only=True")
    _refused(adam, lambda: adam.engine.load(tmp_path / "sgd"), "AdamW", "SGD", "model_only=True")
    amsgrad = Run("amsgrad", "32-true", seed=3)
    _refused(amsgrad, lambda: amsgrad.engine.load(tmp_path / "adam"), "AdamW", "steps")
    for run, other in ((sgd, adam), (adam, sgd), (amsgrad, adam), (amsgrad, sgd)):
        state = other.optimizer.state_dict()
        _refused(run, lambda run=run, state=state: run.optimizer.load_state_dict(state), "turned")
        whole = other.engine.state_dict()
        _refused(run, lambda run=run, whole=whole: run.engine.load_state_dict(whole), "turned")
    sgd.engine.load(tmp_path / "adam", model_only=True)
    assert flat(sgd.masters()) == flat(adam.masters())


def test_of_another_set_up(tmp_path: Path) -> None:
    """The same class makes other states then: they are named."""
    run = Run("rmsprop", "32-true").train(0, 2)
    run.engine.save(tmp_path / "saved")
    other = Run("centered", "32-true", seed=2)
    _refused(other, lambda: other.engine.load(tmp_path / "saved"), "turned", "grad_avg")
    other.train(0, 1).engine.save(tmp_path / "other")
    _refused(run, lambda: run.engine.load(tmp_path / "other"), "turned", "grad_avg")
    state = other.optimizer.state_dict()
    _refused(run, lambda: run.optimizer.load_state_dict(state), "turned", "grad_avg")
    low = Run("rmsprop", "bf16-true", seed=2)
    _refused(
        low, lambda: low.engine.load(tmp_path / "saved"), "float32", "bfloat16", "momentum_buffer"
    )


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    run = Run("blocked", "32-true").train(0, 2)
    run.engine.save(tmp_path / "saved")
    piece = Manifest(tmp_path / "saved").tensors["optimizer_0.state.second.weight.codes"].pieces[0]
    with open(tmp_path / "saved" / piece.file, "r+b") as file:
        file.seek(piece.offset + 5)
        byte = file.read(1)
        file.seek(piece.offset + 5)
        file.write(bytes([byte[0] ^ 1]))
    again = Run("blocked", "32-true", seed=2).train(0, 1)
    _refused(again, lambda: again.engine.load(tmp_path / "saved"), "damaged")


def test_what_is_not_plain_is_named(tmp_path: Path) -> None:
    run = Run("sgd", "32-true").train(0, 1)
    run.optimizer.state[run.model.first.weight]["mine"] = object()
    _refused_save = tmp_path / "saved"
    with pytest.raises(
        gs.GeminiError, match=r"optimizer.state of first.weight\['mine'\] is a object"
    ):
        run.engine.save(_refused_save)
    assert not _refused_save.exists()
    del run.optimizer.state[run.model.first.weight]["mine"]
    run.engine.save(_refused_save)


# ---- state dicts ------------------------------------------------------------------------------------


@each
def test_state_dicts_of_the_optimizer_alone(name: str, tmp_path: Path) -> None:
    """A state dict of the loop alone goes into a managed run, and back, through files."""
    want, plain = outcome(Run(name).train(0, 7)), Run(name).train(0, 3)
    assert flat(Run(name, "32-true").train(0, 3).optimizer.state_dict()) == flat(
        plain.optimizer.state_dict()
    )
    _through_a_file(plain, run := Run(name, "32-true", seed=3).train(0, 1), tmp_path)
    assert outcome(run.train(3, 5)) == outcome(plain.train(3, 5))
    _through_a_file(run, again := Run(name, seed=4), tmp_path)
    assert outcome(again.train(5, 7)) == want
    assert outcome(run.train(5, 7)) == want


def _through_a_file(source: Run, target: Run, folder: Path) -> None:
    state = {"model": source.model.state_dict(), "optimizer": source.optimizer.state_dict()}
    state["own"] = getattr(source.optimizer, "calls", None)  # which torch's state dicts do not have
    torch.save(state, folder / "file.pt")
    with torch.serialization.safe_globals([Halves]):
        loaded = torch.load(folder / "file.pt")
    target.model.load_state_dict(loaded["model"])
    target.optimizer.load_state_dict(loaded["optimizer"])
    if loaded["own"] is not None:
        target.optimizer.calls = loaded["own"]


@each
@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_the_engines_state_dict(name: str, precision: str) -> None:
    run = Run(name, precision).train(0, 3)
    state = copy.deepcopy(run.engine.state_dict())
    again = Run(name, precision, seed=3).train(0, 1)
    again.engine.load_state_dict(state)
    if name == "counted":
        again.optimizer.calls = run.optimizer.calls
    assert outcome(again) == outcome(run)
    assert outcome(again.train(3, 6)) == outcome(run.train(3, 6))


@pytest.mark.parametrize("optimizer_first", [False, True])
def test_masters_of_a_model_that_came_in_16_bits(optimizer_first: bool) -> None:
    """Its own state dict has 16 bits of them, and the optimizer's has what these lack."""
    run = Run("sgd", dtype=torch.bfloat16)
    run.manage("bf16-mixed")
    state = copy.deepcopy([run.train(0, 3).model.state_dict(), run.optimizer.state_dict()])
    again = Run("sgd", dtype=torch.bfloat16, seed=3)
    again.manage("bf16-mixed")
    loads = [
        lambda: again.model.load_state_dict(state[0]),
        lambda: again.optimizer.load_state_dict(state[1]),
    ]
    for load in reversed(loads) if optimizer_first else loads:
        load()
    assert outcome(again) == outcome(run)
    assert outcome(again.train(3, 5)) == outcome(run.train(3, 5))
    Run("sgd", dtype=torch.bfloat16).optimizer.load_state_dict(state[1])


# ---- close ------------------------------------------------------------------------------------------


@each
def test_closing_in_16_bits(name: str) -> None:
    """A model that came in bf16 goes on alone, and under an engine again, as if there had been none."""
    bf16 = torch.bfloat16
    want = Run(name, dtype=bf16).train(0, 7)
    run = Run(name, dtype=bf16)
    run.manage("bf16-true")
    run.train(0, 2).close()
    assert type(run.optimizer.state) is type(want.optimizer.state)
    run.train(2, 4).manage("bf16-true", placement_policy="cpu")
    run.train(4, 6).close()
    assert outcome(run.train(6, 7)) == outcome(want)


@each
def test_closing_without_states(name: str) -> None:
    """They begin anew, what is in the groups goes on."""
    want = Run(name).train(0, 3)
    want.optimizer.state.clear()
    run = Run(name, "32-true").train(0, 3).close(with_states=False)
    assert not run.optimizer.state
    assert outcome(run.train(3, 5)) == outcome(want.train(3, 5))


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step()
        if self.fails:
            raise OSError("the disk is full")


def test_closing_after_an_error(tmp_path: Path) -> None:
    """A step() that has raised leaves no states, and a checkpoint goes on."""
    run = Run("failing", "32-true").train(0, 3)
    run.engine.save(tmp_path / "saved")
    want = outcome(run.train(3, 5))
    again = Run("failing", "32-true", seed=2)
    again.engine.load(tmp_path / "saved")
    again.optimizer.fails = True
    with pytest.raises(gs.GeminiError, match="the disk is full"):
        again.train(3, 4)
    with pytest.warns(RuntimeWarning, match="the optimizer's states are gone"):
        again.close()
    assert not again.optimizer.state and type(again.optimizer) is Failing
    again.optimizer.fails = False
    again.manage("32-true")
    again.engine.load(tmp_path / "saved")
    assert outcome(again.train(3, 5)) == want


# ---- what a program has -----------------------------------------------------------------------------


def test_entries_that_are_kept_do_not_hold_the_optimizer_back() -> None:
    """Counters in them are copies, which a step does not write."""
    for name in ("amsgrad", "wrapped"):
        want = outcome(Run(name).train(0, 5))
        run = Run(name, "32-true").train(0, 2)
        kept = [run.optimizer.state_dict(), dict(run.optimizer.state)]
        seen = flat(kept[0])
        run.train(2, 4)
        assert flat(kept[0]) == seen
        assert outcome(run.train(4, 5)) == want


def test_what_is_written_to_a_state_dict_is_written_to_the_states() -> None:
    """As in torch: its tensors are the optimizer's own until the next step."""
    want, run = Run("rmsprop").train(0, 3), Run("rmsprop", "32-true").train(0, 3)
    for each_run in (want, run):
        for entry in each_run.optimizer.state_dict()["state"].values():
            entry["square_avg"].mul_(2)
    assert outcome(run.train(3, 5)) == outcome(want.train(3, 5))


# ---- several optimizers -----------------------------------------------------------------------------


class Two:
    """One model with two optimizers, each of other parameters."""

    def __init__(self, precision: str, seed: int = 0, **how: Any) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        matrices = [p for p in self.model.parameters() if p.requires_grad and p.dim() == 2]
        rest = [p for p in self.model.parameters() if p.requires_grad and p.dim() == 1]
        self.optimizers = [Blocked(matrices), Counted(rest)]
        given = {"device": "cpu", "chunk_size": 8192} | how
        self.engine = gs.manage(self.model, self.optimizers, precision=precision, **given)

    def train(self, first: int, last: int) -> Two:
        for step in range(first, last):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            self.engine.backward(
                self.model(x.to(self.model.first.weight.dtype)).float().square().mean()
            )
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return self

    def outcome(self) -> list[Any]:
        states = [flat(optimizer.state_dict()) for optimizer in self.optimizers]
        return [flat(self.engine.model_state_dict()), states, self.optimizers[1].calls]


def test_two_optimizers_of_one_model(tmp_path: Path) -> None:
    run = Two("bf16-true").train(0, 3)
    run.engine.save(tmp_path / "saved")
    torch.save(run.engine.state_dict(), tmp_path / "file.pt")
    saved = run.outcome()
    want = run.train(3, 6).outcome()
    again = Two("bf16-true", seed=2, placement_policy="cpu").train(0, 1)
    again.engine.load(tmp_path / "saved")
    assert again.outcome() == saved
    assert again.train(3, 6).outcome() == want
    other = Two("bf16-true", seed=3)
    other.engine.load_state_dict(torch.load(tmp_path / "file.pt"))
    other.optimizers[1].calls = 3
    assert other.outcome() == saved
    assert other.train(3, 6).outcome() == want
    one = Run("blocked", "bf16-true")
    _refused(one, lambda: one.engine.load(tmp_path / "saved"), "Blocked and Counted", "Blocked")
    with pytest.raises(ValueError, match="has 2 optimizers"):
        other.engine.load_state_dict(one.engine.state_dict())
    assert other.outcome() == want
