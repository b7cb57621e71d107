"""Optimizers that step by themselves on several ranks: the bits of one, whatever a rank has of a parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.optim import rehearsal
from gemini_strategy.optim.adam import clip_coefficient
from helpers.ranks import run_ranks, values
from helpers.sharded import Exact, ExactCase

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

PATIENT = 900.0  # longer than run_ranks waits: whoever sits out this timeout fails
STEPS = 4


class Terms(Exact):
    """With some that are cut between rows, and one whose elements lie column by column (see `built`)."""

    SIZES = (*Exact.SIZES, (40, 128), (96, 128))


class Case(ExactCase):
    def batch(self, step: int) -> list[Tensor]:
        seed = torch.Generator().manual_seed(step)
        sizes = (*Terms.SIZES, (7,), (7,), (41,))
        return [torch.randint(-4, 5, s, generator=seed).float() / 8 for s in sizes]


class Elementwise(torch.optim.Optimizer):
    """Lion, with a state that is a list, one that is a number, and a counter on the host."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(count=0, step=torch.tensor(0.0), kept=[torch.zeros_like(p)])
                state["count"] += 1
                state["step"] += 1
                m = state["kept"][0]
                p.add_((m * group["beta"] + p.grad * 0.1).sign(), alpha=-group["lr"])
                m.mul_(0.99).add_(p.grad, alpha=0.01)


class Counting(torch.optim.Optimizer):
    """Writes its groups and itself."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            rate = group["lr"] / (group["k"] + self.calls)
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("z", p.detach().clone()).sub_(p.grad, alpha=rate)
                    p.lerp_(self.state[p]["z"], 0.5)
            group["k"] += 1


class Blockwise(torch.optim.Optimizer):
    """A momentum in 8 bits, with a scale for each block of elements, and a table that all parameters share."""

    BLOCK = 128

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.table = torch.linspace(-1, 1, 255)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, n = self.state[p], p.numel()
                n_blocks = -(-n // self.BLOCK)
                if not state:
                    state["codes"] = torch.full((n,), 127, dtype=torch.uint8, device=p.device)
                    state["scales"] = torch.zeros(n_blocks, device=p.device)
                    state["table"] = self.table
                m = torch.zeros(n_blocks * self.BLOCK, device=p.device)
                m[:n] = self.table[state["codes"].long()]
                m = m.view(n_blocks, self.BLOCK) * state["scales"][:, None]
                grad = torch.zeros(n_blocks * self.BLOCK, device=p.device)
                grad[:n] = p.grad.reshape(-1).float()
                m = m * 0.9 + grad.view(n_blocks, self.BLOCK)
                scales = m.abs().amax(1)
                codes = (m / scales.clamp(min=1e-8)[:, None] * 127).round() + 127
                state["scales"].copy_(scales)
                state["codes"].copy_(codes.view(-1)[:n])
                p.sub_((m.view(-1)[:n] * group["lr"]).view(p.shape).to(p.dtype))


class Rowwise(torch.optim.Optimizer):
    """Gradients by the root of their mean square, of a row or of all that has no rows."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                rows = p.grad.float().flatten(1) if p.dim() > 1 else p.grad.float().reshape(1, -1)
                found = torch.stack([row.square().sum() for row in rows]) / max(rows.shape[1], 1)
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(found)
                state["mean"].mul_(0.9).add_(found)
                scaled = rows / (state["mean"].sqrt()[:, None] + 1e-6)
                p.sub_((scaled * group["lr"]).view(p.shape).to(p.dtype))


class Whole(torch.optim.Optimizer):
    """A step as long as the parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(m * (group["lr"] * p.norm() / (m.norm() + 1e-6)))


def muon(model: nn.Module) -> list[Any]:
    """As its users have it."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]  # of which one is empty
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.SGD(rest, lr=1e-2, momentum=0.9)]


WHOLES: dict[str, Callable[[nn.Module], Any]] = {
    "blocks": lambda m: Blockwise(m.parameters()),
    "rows": lambda m: Rowwise(m.parameters()),
    "whole": lambda m: Whole(m.parameters()),
    # It divides by the number of elements.
    "adafactor": lambda m: torch.optim.Adafactor([p for p in m.parameters() if p.numel()], lr=1e-2),
    "muon": muon,
}
CUTS = {"own": "element", "blocks": "block", "rows": "row", "whole": "whole", "adafactor": "whole"}
ELEMENTS: dict[str, Callable[[nn.Module], Any]] = {
    "own": lambda m: Elementwise(m.parameters()),
    "counting": lambda m: Counting(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, momentum=0.9),
    "amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(
        [
            {"params": [p for p in m.parameters() if p.dim() < 2], "momentum": 0.0},
            {"params": [p for p in m.parameters() if p.dim() > 1], "momentum": 0.9},
        ],
        lr=1e-2,
    ),
}
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")


def built(precision: str | None, seed: int = 7) -> nn.Module:
    """precision: that the model is cast to, as an ordinary one; None: of what manage() makes one."""
    torch.manual_seed(seed)
    model = Terms().train()
    transposed = model.terms[0].p
    transposed.data = transposed.data.t().contiguous().t()
    if precision == "bf16-true":
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16)
    return model


def all_of(optimizer: Any) -> list[Any]:
    return optimizer if isinstance(optimizer, list) else [optimizer]


def same(got: Any, want: Any, what: str) -> None:
    """The same tree, and the same bits."""
    assert type(got) is type(want), f"{what}: {type(got)}, expected {type(want)}"
    if isinstance(want, Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, what
        if hasattr(want, "__tensor_flatten__"):
            parts = [dict.fromkeys(each.__tensor_flatten__()[0]) for each in (got, want)]
            pair = [{n: getattr(t, n) for n in p} for t, p in zip((got, want), parts, strict=True)]
            same(*pair, what)
            return
        assert torch.equal(got, want), f"{what}: {(got != want).sum()} of {want.numel()} differ"
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), f"{what}: {list(got)}, expected {list(want)}"
        for key in want:
            same(got[key], want[key], f"{what}.{key}")
    elif isinstance(want, list | tuple):
        assert len(got) == len(want), what
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same(a, b, f"{what}.{i}")
    else:
        assert got == want, f"{what}: {got}, expected {want}"


class Reference:
    """The same loop without an engine."""

    def __init__(self, make: Callable[[nn.Module], Any], precision: str) -> None:
        self.model = built(precision)
        self.optimizers = all_of(make(self.model))
        self.case = Case()

    def backward(self, number: int, part: float = 1.0) -> None:
        (self.case.loss(self.model, self.case.batch(number)) * part).backward()

    def finish(self, limit: float | None = None) -> None:
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if limit is not None:
            norm = sum(g.double().square().sum().item() for g in grads) ** 0.5
            for g in grads:
                g.mul_(clip_coefficient(norm, limit))
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self, engine: Any, precision: str) -> None:
        state = engine.model_state_dict(masters=precision != "bf16-true")
        for name, p in self.model.named_parameters():
            if p.requires_grad:
                same(state[name], p.detach(), name)
        for got, want in zip(engine.optimizers(), self.optimizers, strict=True):
            same(got.state_dict(), want.state_dict(), type(want).__name__)
            for key, value in vars(want).items():
                if type(value) in (int, float):
                    assert getattr(got, key) == value, key


class Run:
    """The managed run of one rank."""

    def __init__(
        self, make: Callable[[nn.Module], Any], precision: str, rank: int, size: int, **how: Any
    ) -> None:
        model = built("bf16-true" if precision == "bf16-true" else None, 7 + 100 * rank)
        self.made = make(model)
        how = {"timeout": PATIENT, "chunk_size": 4096, "device": "cpu"} | how
        self.engine = gs.manage(model, self.made, precision=precision, **how)
        self.engine.optimizers = lambda: all_of(self.made)
        self.case = Case(rank, size)

    def loss(self, number: int, part: float = 1.0) -> Tensor:
        return self.case.loss(self.engine.model, self.case.batch(number)) * part

    def finish(self, limit: float | None = None) -> None:
        if limit is not None:
            self.engine.clip_grad_norm_(limit)
        for optimizer in all_of(self.made):
            optimizer.step()
        self.engine.zero_grad()


def train(
    make: Callable[[nn.Module], Any], precision: str, rank: int, size: int, **how: Any
) -> Run:
    """Accumulates, clips, and leaves the engine open."""
    want, run = Reference(make, precision), Run(make, precision, rank, size, **how)
    for step in range(STEPS):
        for micro in range(2):
            want.backward(2 * step + micro, 0.5)
            run.engine.backward(run.loss(2 * step + micro, 0.5))
        limit = 1.0 if step % 2 else None
        want.finish(limit)
        run.finish(limit)
    want.check(run.engine, precision)
    return run


def check_bits(rank: int, size: int, makes: dict[str, Callable[[nn.Module], Any]]) -> None:
    for name, make in makes.items():
        for precision in PRECISIONS:
            try:
                train(make, precision, rank, size).engine.close()
            except AssertionError as error:
                raise AssertionError(f"{name}, {precision}: {error}") from error


def check_elements(rank: int, size: int) -> None:
    check_bits(rank, size, ELEMENTS)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_elements(size: int, tmp_path: Path) -> None:
    values(run_ranks(size, tmp_path, check_elements))


def check_wholes(rank: int, size: int) -> None:
    check_bits(rank, size, WHOLES)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_wholes(size: int, tmp_path: Path) -> None:
    """What may be cut at blocks, between rows, or nowhere."""
    values(run_ranks(size, tmp_path, check_wholes))


def test_cuts_are_what_they_are_taken_for() -> None:
    for name, cut in CUTS.items():
        optimizer = {**ELEMENTS, **WHOLES}[name](built(None))
        assert rehearsal.rehearse(optimizer).cut == cut, name


# ---- ways to train -------------------------------------------------------------------------------

EVERY = {**ELEMENTS, **WHOLES}
SOME = ("own", "counting", "blocks", "rows", "whole")


def tight(make: Callable[[nn.Module], Any], precision: str, rank: int, size: int) -> Run:
    """With the least budget, in steps of a quarter, that the engine takes: chunks come and go."""
    budget = 1 << 15
    while True:
        try:
            return Run(make, precision, rank, size, device_budget=budget, chunk_size=2048)
        except gs.GeminiMemoryError:
            assert budget < 1 << 24
            budget += budget // 4


def check_step_in_backward(rank: int, size: int) -> None:
    for name in SOME:
        want, run = Reference(EVERY[name], "32-true"), tight(EVERY[name], "32-true", rank, size)
        for step in range(6):
            want.backward(step)
            want.finish()
            run.engine.backward(run.loss(step), step=True)
            run.finish()
        want.check(run.engine, "32-true")
        run.engine.close()


def test_step_in_backward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    values(run_ranks(2, tmp_path, check_step_in_backward))


def check_unused(rank: int, size: int) -> None:
    """Some parameters have no gradient in some steps."""
    for name in SOME:
        want, run = (
            Reference(EVERY[name], "bf16-mixed"),
            tight(EVERY[name], "bf16-mixed", rank, size),
        )
        for step in range(5):
            want.backward(step)
            run.engine.backward(run.loss(step))
            for model in (want.model, run.engine.model):
                for term in list(model.terms)[step % 2 :: 2]:
                    term.p.grad = None
            want.finish()
            run.finish()
        want.check(run.engine, "bf16-mixed")
        run.engine.close()


def test_unused_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    values(run_ranks(2, tmp_path, check_unused))


def check_replicas(rank: int, size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("own", "counting", "whole"):
        train(EVERY[name], "bf16-mixed", rank, size, mesh=mesh).engine.close()
        train(EVERY[name], "32-true", rank, size, enable_distributed_storage=False).engine.close()


def test_replicas(tmp_path: Path) -> None:
    values(run_ranks(4, tmp_path, check_replicas))


# ---- states --------------------------------------------------------------------------------------


def check_states(rank: int, size: int) -> None:
    """States are shown, written and loaded as those of one rank."""
    for name, key in (("own", "step"), ("blocks", "scales"), ("rows", "mean"), ("whole", "m")):
        want, run = Reference(EVERY[name], "32-true"), Run(EVERY[name], "32-true", rank, size)
        for step in range(2):
            want.backward(step)
            want.finish()
            run.engine.backward(run.loss(step))
            run.finish()
        pairs = [
            (want.optimizers[0].state[p], run.made.state[q])
            for p, q in zip(want.model.parameters(), run.engine.model.parameters(), strict=True)
            if p.requires_grad
        ]
        for one, other in pairs:
            same(other, one, name)
        for p, q in zip(want.model.parameters(), run.engine.model.parameters(), strict=True):
            if p.requires_grad:
                want.optimizers[0].state[p][key].mul_(2)
                run.made.state[q][key].mul_(2)
        saved = run.made.state_dict()
        same(saved, want.optimizers[0].state_dict(), name)
        saved = {**saved, "state": copy.deepcopy(saved["state"])}
        run.engine.backward(run.loss(9))
        run.finish()
        state = {k: v.clone() for k, v in want.model.state_dict().items()}
        run.engine.load_model_state_dict(state)
        run.made.load_state_dict(saved)
        want.backward(3)
        want.finish()
        run.engine.backward(run.loss(3))
        run.finish()
        for p, q in zip(want.model.parameters(), run.engine.model.parameters(), strict=True):
            if p.requires_grad:
                same(run.made.state[q], want.optimizers[0].state[p], name)
        old = run.made.state[next(run.engine.model.parameters())][key]
        run.engine.backward(run.loss(4))
        run.finish()
        old.add_(1)
        run.engine.backward(run.loss(5))
        with pytest.raises(gs.GeminiError, match=f"{key} was written after"):
            run.finish()
        run.engine.close()


def test_states(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_states))


def check_bytes(rank: int, size: int) -> None:
    """A rank has states of what it has a part of, and the parts are where they may be."""
    for name in ("blocks", "rows", "whole"):
        engine = Run(EVERY[name], "32-true", rank, size).engine
        opaque, n_cut = engine._runtime.opaque, 0
        for slot in engine._runtime.slots:
            if not slot.has_moments or not slot.parameter.numel():
                continue
            parts = [p for p in opaque._divisions.of(slot).parts if p is not None]
            cut = opaque.cut(slot)
            assert all(p.first % cut == 0 and (p.n >= cut or p.is_whole) for p in parts), slot.name
            assert sum(p.n for p in parts) == slot.parameter.numel()
            first, n = slot.part()
            own = opaque._divisions.part(slot)
            assert (own is None) == (n == 0) and (n == 0 or (own.first, own.n) == (first, n))
            forms = opaque._divisions.of(slot).forms
            assert [form is None for form in forms] == [
                p is None for p in opaque._divisions.of(slot).parts
            ]
            n_cut += len(parts) > 1
        assert (n_cut == 0) == (name == "whole")
        engine.close()


def test_bytes(tmp_path: Path) -> None:
    values(run_ranks(2, tmp_path, check_bytes))


def check_idle(rank: int, size: int) -> None:
    """A rank that has nothing of any parameter counts as the others do."""
    torch.manual_seed(0)
    model, want = nn.Linear(3, 2), nn.Linear(3, 2)
    want.load_state_dict(model.state_dict())
    optimizer, other = Counting(model.parameters()), Counting(want.parameters())
    engine = gs.manage(model, optimizer, device="cpu", timeout=PATIENT)
    for _ in range(3):
        x = torch.ones(1, 3)
        want(x).sum().backward()
        other.step()
        other.zero_grad()
        engine.backward(model(x).sum())
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.calls == other.calls
        assert optimizer.param_groups[0]["k"] == other.param_groups[0]["k"]
    same(dict(engine.model_state_dict()), dict(want.state_dict()), "model")
    same(optimizer.state_dict(), other.state_dict(), "optimizer")
    engine.close()


def test_idle_ranks(tmp_path: Path) -> None:
    values(run_ranks(4, tmp_path, check_idle))


# ---- errors --------------------------------------------------------------------------------------


class Failing(Elementwise):
    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        if Failing.fails:
            raise RuntimeError("no more steps")


def check_error(rank: int, size: int, in_backward: bool) -> str:
    run = Run(lambda m: Failing(m.parameters()), "32-true", rank, size)
    text = ""
    for step in range(6):
        Failing.fails = rank == 1 and step == 3
        try:
            run.engine.backward(run.loss(step), step=in_backward)
            run.finish()
        except gs.GeminiError as error:
            text = str(error)
            break
    run.engine.close(states=False) if not text else None
    return text


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_error_on_one_rank_ends_all(
    in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMINI_RATES", "h2d=55e9,d2h=54e9")
    others, own = values(run_ranks(2, tmp_path, check_error, in_backward))
    assert "no more steps" in own
    assert "rank 1" in others and "no more steps" in others


def check_groups(rank: int, size: int) -> str:
    run = Run(EVERY["counting"], "32-true", rank, size)
    run.made.param_groups[0]["lr"] = 0.1 + rank
    run.engine.backward(run.loss(0))
    with pytest.raises(gs.GeminiError) as caught:
        run.finish()
    run.made.param_groups[0]["lr"] = 0.1
    run.finish()  # nothing has been changed
    run.engine.close()
    return str(caught.value)


def test_groups_that_differ(tmp_path: Path) -> None:
    said = values(run_ranks(2, tmp_path, check_groups))
    assert said[0] == said[1] and "lr of param group 0" in said[0] and "1.1" in said[0]
