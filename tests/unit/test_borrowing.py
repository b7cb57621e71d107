"""A module uses parameters of modules below it: by operations, addresses, DLPack and compiled functions, in its forward
and in the nodes of its backward.

The same bits as without an engine, and each such weight comes once in a pass, however often it is touched.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from gemini_strategy.parameters import absent
from helpers.ranks import run_ranks

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

WIDTH, CLASSES, ROWS, STEPS = 32, 128, 16, 5
HEAD_BYTES = 4 * WIDTH * CLASSES


def at(weight: Tensor) -> Tensor:
    """What a kernel that has got the address reads there."""
    numbers = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    return torch.frombuffer(numbers, dtype=torch.float32).view(weight.shape).clone()


def by_dlpack(weight: Tensor) -> Tensor:
    return torch.from_dlpack(weight.detach()).clone()


class ByAddress(torch.autograd.Function):
    """Keeps the weight on ctx, as fused kernels do that are not told to save it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ at(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad @ at(ctx.weight), grad.t() @ ctx.x


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ at(weight).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ at(weight), grad.t() @ x


class GradientInForward(torch.autograd.Function):
    """A fused linear cross-entropy: chunks of rows, and both gradients before the loss is given back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        loss, of_x, of_weight = torch.zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        for rows in torch.arange(len(x)).chunk(8):
            logits = x[rows] @ weight.t()
            shares = logits.softmax(1)
            loss += functional.cross_entropy(logits, target[rows], reduction="sum")
            shares[torch.arange(len(rows)), target[rows]] -= 1
            of_x[rows] = shares @ weight
            of_weight += shares.t() @ x[rows]
        ctx.save_for_backward(of_x, of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        of_x, of_weight = ctx.saved_tensors
        return grad * of_x, grad * of_weight, None


def cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(x @ weight.t(), target, reduction="sum")


def in_chunks(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    parts = zip(x.chunk(8), target.chunk(8), strict=True)
    return sum((cross_entropy(a, weight, b) for a, b in parts), torch.zeros(()))


def by_function(function: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, y: functional.cross_entropy(function.apply(x, w), y, reduction="sum")


def by_copy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The forward has the numbers by DLPack, the graph another way."""
    with torch.no_grad():
        logits = x @ by_dlpack(weight).t()
    return cross_entropy(x, weight, target) + 0 * logits.sum()


def recomputed(is_reentrant: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, w, y: checkpoint(in_chunks, x, w, y, use_reentrant=is_reentrant)


def transformed(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """torch.func has its own way to save tensors, and lets no hooks see them."""
    grads, loss = torch.func.grad_and_value(cross_entropy, argnums=(0, 1))(x, weight, target)
    return loss.detach() + sum(
        (g.detach() * v).sum() for g, v in zip(grads, (x, weight), strict=True)
    )


class CompiledTransform(torch.autograd.Function):
    """As Liger's losses of preferences: a compiled function gives the gradients with the loss."""

    both = staticmethod(
        torch.compile(
            lambda *given: torch.func.grad_and_value(cross_entropy, argnums=(0, 1))(*given),
            backend="aot_eager",
        )
    )

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        grads, loss = CompiledTransform.both(x, weight, target)
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        of_x, of_weight = ctx.saved_tensors
        return grad * of_x, grad * of_weight, None


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "one operation": cross_entropy,
    "chunks": in_chunks,
    "address on ctx": by_function(ByAddress),
    "address saved": by_function(Saved),
    "gradient in forward": GradientInForward.apply,
    "dlpack": by_copy,
    "recomputed": recomputed(False),
    "recomputed, reentrant": recomputed(True),
    "torch.func": transformed,
    "compiled": torch.compile(cross_entropy, backend="aot_eager"),
    "compiled torch.func": CompiledTransform.apply,
}


class Loss(nn.Module):
    """Owns no parameter, and is told which to use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return LOSSES[self.how](x, weight, target)


class Held:
    """No module: an object that has the head."""

    def __init__(self, head: nn.Linear, how: str) -> None:
        self.head, self.how = head, how

    def __call__(self, x: Tensor, target: Tensor) -> Tensor:
        return LOSSES[self.how](x, self.head.weight, target)


class Pair(nn.Module):
    """Computes with its children's weights itself, as a fused MLP of adapters does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.up.weight.t() + self.up.bias)
        return x + ByAddress.apply(h, self.down.weight) + self.down.bias


class Model(nn.Module):
    """`where` the head's weight is used: by the model itself, by a module that is told, by an object that has it."""

    def __init__(self, how: str, where: str = "model") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(*(Pair() for _ in range(4)))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.how, self.where, self.fails = how, where, False
        self.loss = Loss(how)
        self.held = Held(self.head, how)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.body(x)
        if self.where == "module":
            loss = self.loss(x, self.head.weight, target)
        elif self.where == "object":
            loss = self.held(x, target)
        else:
            loss = LOSSES[self.how](x, self.head.weight, target)
        if self.fails:
            raise KeyError("of the program")
        return loss


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (ROWS,), generator=generator)


def manage(model: nn.Module, **options: Any) -> tuple[gs.Engine, Any]:
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2)
    options = {"placement_policy": "cpu", "chunk_size": 4096, "precision": "32-true", **options}
    return gs.manage(model, optimizer, device="cpu", **options), optimizer


def check_nothing_is_left(engine: gs.Engine) -> None:
    gc.collect()
    assert not any(unit.n_entered for unit in engine._runtime.units)
    assert engine.stats()["leases"] == 0


def train(model: Model, optimizer: Any, engine: gs.Engine | None, how: str = "") -> list[Tensor]:
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step))
        if engine is None:
            loss.backward()
        else:
            engine.backward(loss, step=how == "immediate")
        if how == "clipped":
            optimizer.clip_grad_norm_(0.1) if engine is None else engine.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        if engine is not None:
            check_nothing_is_left(engine)
    if engine is not None:
        engine.close()
    return losses + [p.detach().clone() for p in model.parameters()]


def tight(extra: int = 0) -> dict[str, Any]:
    """Room for the head and little else."""
    return {"device_budget": 2 * HEAD_BYTES + 8192 + extra}


@pytest.mark.parametrize("how", ["deferred", "immediate", "clipped"])
@pytest.mark.parametrize("name", LOSSES)
def test_bits(name: str, how: str) -> None:
    torch._dynamo.reset()
    where = itertools.cycle(["model", "module", "object"])
    plain = Model(name)
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None, how)
    for options in ({}, tight(), {"placement_policy": "auto", **tight(16384)}):
        model = Model(name, next(where))
        engine, optimizer = manage(model, **options)
        got = train(model, optimizer, engine, how)
        assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * len(want)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"one operation"}))
def test_a_weight_comes_once_however_often_it_is_touched(name: str) -> None:
    moved = []
    for each in ("one operation", name):
        model = Model(each)
        engine, optimizer = manage(model, **tight())
        for step in range(STEPS):
            before = engine.stats()["fetched_bytes"]
            engine.backward(model(*batch(step)))
            optimizer.step()
            optimizer.zero_grad()
        moved.append(engine.stats()["fetched_bytes"] - before)  # of the last step, under a plan
        engine.close()
    assert moved[1] <= moved[0] + HEAD_BYTES


def test_a_function_that_borrows_is_not_compiled_for_each_call() -> None:
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounter()
    LOSSES["counted"] = torch.compile(cross_entropy, backend=counted)
    try:
        model = Model("counted")
        engine, optimizer = manage(model, **tight())
        train(model, optimizer, engine)
    finally:
        del LOSSES["counted"]
    assert counted.frame_count <= 2  # in the first call nothing was entered when it began


def test_a_transform_is_compiled_where_operations_have_borrowed_before() -> None:
    """Dynamo runs what it traces of torch.func, which forbids the hooks of nets."""

    class First(Model):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            assert (x @ self.head.weight.t()).isfinite().all()
            return super().forward(x, target)

    torch._dynamo.reset()
    plain, model = First("compiled torch.func"), First("compiled torch.func")
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
    torch._dynamo.reset()
    engine, optimizer = manage(model, **tight())
    got = train(model, optimizer, engine)
    assert all(map(torch.equal, got, want))


def test_outside_the_model_it_is_refused_with_the_way_out() -> None:
    model = Model("address on ctx")
    engine, optimizer = manage(model)
    x, target = batch(0)
    for name in ("address on ctx", "compiled"):
        with pytest.raises(Exception, match=r"head\.weight.*inside the forward of a man") as raised:
            LOSSES[name](x, model.head.weight, target)
        assert isinstance(raised.value, gs.GuardError) or name == "compiled"  # Dynamo's, of ours
    assert len(train(model, optimizer, engine)) == STEPS + len(list(model.parameters()))


@pytest.mark.parametrize("name", ["address on ctx", "chunks", "compiled"])
def test_an_error_leaves_nothing_entered(name: str) -> None:
    plain, model = Model(name), Model(name)
    engine, optimizer = manage(model, **tight())
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
    for _ in range(2):
        model.fails = True
        with pytest.raises(KeyError, match="of the program"):
            model(*batch(9))
        model.fails = False
        check_nothing_is_left(engine)
    got = train(model, optimizer, engine)
    assert all(map(torch.equal, got, want))


class Many(nn.Module):
    """Touches the weights of all its children, which do not fit together."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for part in self.parts:
            x = torch.tanh(x @ part.weight + part.bias)
        for part in self.parts:  # each after those that took its room
            x = x + torch.tanh(x @ part.weight.t())
        return x.square().sum()


def test_what_operations_borrow_leaves_for_room() -> None:
    plain, model = Many(), Many()
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
    engine, optimizer = manage(model, device_budget=3 * 4096 + 2048)
    got = train(model, optimizer, engine)
    assert all(map(torch.equal, got, want))


def test_what_has_given_its_address_stays_or_is_refused_by_name() -> None:
    class Greedy(Many):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            places = [part.weight.data_ptr() for part in self.parts]
            assert len(set(places)) == len(places)
            return x.sum()

    model = Greedy()
    engine, _ = manage(model, device_budget=3 * 4096 + 2048)
    with pytest.raises(gs.GeminiMemoryError, match=r"no room on the device for parts\.\d\.weight"):
        model(*batch(0))
    check_nothing_is_left(engine)
    engine.close()
    assert model(*batch(0)).isfinite()


class Transforming(nn.Module):
    """Touches a weight inside a transform of torch, in a graph task of its own, and the rest as usual."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.how = how

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        if self.how == "vmap":
            x = torch.func.vmap(lambda row: functional.linear(row, self.head.weight))(x)
        elif self.how == "graph task":
            probe = x.detach().requires_grad_()
            y = ByAddress.apply(probe, self.head.weight).sum()
            x = x + torch.autograd.grad(y, probe)[0]
        else:
            x = checkpoint(self.part, x, use_reentrant=False)
        for part in (self.a, self.b, self.c, self.head):
            x = torch.tanh(part(x))
        return x.square().sum()

    def part(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(functional.linear(x, self.head.weight)))


@pytest.mark.parametrize("how", ["vmap", "graph task", "a part is computed again"])
@pytest.mark.parametrize("n_chunks", [3, 6])
def test_what_touches_in_a_place_of_its_own_leaves_the_rest_as_it_is(
    how: str, n_chunks: int
) -> None:
    plain, model = Transforming(how), Transforming(how)
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
    engine, optimizer = manage(model, device_budget=n_chunks * 4096 + 1024)
    got = train(model, optimizer, engine)
    assert all(map(torch.equal, got, want))


def test_hooks_that_several_nets_have_pushed_go_in_their_order() -> None:
    """The user's hooks are below the net of any engine, and what is borrowed inside them has the net of its own."""
    others = [manage(nn.Linear(4, 4))[0] for _ in range(3)]
    plain, model = Transforming("a part"), Transforming("a part")
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
    engine, optimizer = manage(model)
    more = [manage(nn.Linear(4, 4))[0] for _ in range(3)]
    assert all(map(torch.equal, train(model, optimizer, engine), want))
    for one in (*others, *more):
        one.close()


@pytest.mark.parametrize("n_chunks", [4, 6])
def test_a_thread_that_evaluates_finds_room(n_chunks: int) -> None:
    plain, model = Many(), Many()
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
    engine, optimizer = manage(model, device_budget=n_chunks * 4096 + 2048)
    errors: list[BaseException] = []
    is_over = threading.Event()

    def evaluate() -> None:
        try:
            while not is_over.is_set():
                with torch.no_grad():
                    model(*batch(0))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    losses = []
    try:
        for step in range(STEPS):
            loss = model(*batch(step))
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
    finally:
        is_over.set()
        thread.join()
    assert not errors
    engine.close()
    got = losses + [p.detach().clone() for p in model.parameters()]
    assert all(map(torch.equal, got, want))


def test_a_plan_that_has_no_room_for_what_is_borrowed_does_without() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(20))

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts[:4]:
                x = functional.linear(x, part.weight).tanh()
            for part in self.parts:
                x = part(x).tanh()
            return x.square().mean()

    model = Deep()
    engine, optimizer = manage(model, device_budget=6 * 4096)
    for step in range(STEPS):
        engine.backward(model(batch(step)[0]))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.stats()["planned"] == 1


def test_an_interrupt_leaves_no_key_excluded() -> None:
    """At the end of each `__enter__` in Python while weights are served: the guard is on, its `with` not begun yet."""
    model = Model("chunks")
    engine, _ = manage(model, **tight())
    want = model(*batch(0)).detach().clone()
    kept = []
    for n in itertools.count(1):
        left = [n]

        def interrupt(frame: Any, event: str, what: Any, left: list[int] = left) -> None:
            left[0] -= event == "return" and frame.f_code.co_name == "__enter__"
            if left[0] == 0:
                left[0] = -1
                raise KeyboardInterrupt

        try:
            sys.setprofile(interrupt)
            for weight in model.parameters():  # outside its module each is served
                weight.sum()
        except KeyboardInterrupt as error:
            kept.append(error)  # its frames hold the guards that were on the way
        finally:
            sys.setprofile(None)
            torch.set_grad_enabled(True)  # torch's own: an interrupt in no_grad leaves it off
        if left[0] > 0:
            break
    assert len(kept) > 10
    kept.clear()
    gc.collect()
    assert not torch._C._dispatch_tls_local_exclude_set().has(absent.KEY)
    assert torch.equal(model(*batch(0)), want)
    engine.close()


def test_what_is_written_to_a_borrowed_weight_counts() -> None:
    class Writing(Model):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            assert at(self.head.weight).isfinite().all()
            with torch.no_grad():
                self.head.weight.mul_(0.5)
                numbers = (ctypes.c_float * 4).from_address(self.head.weight.data_ptr())
            numbers[0] = 3.0
            return super().forward(x, target)

    plain, model = Writing("chunks"), Writing("chunks")
    want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
    engine, optimizer = manage(model, **tight())
    got = train(model, optimizer, engine)
    assert all(map(torch.equal, got, want))


def test_a_module_that_has_only_others_is_copied_as_it_was() -> None:
    model = Model("chunks")
    keys = [sorted(vars(module)) for module in model.modules()]
    engine, _ = manage(model)
    model(*batch(0))
    copied = copy.deepcopy(model)
    assert [sorted(vars(module)) for module in copied.modules()] == keys
    engine.close()
    assert [sorted(vars(module)) for module in model.modules()] == keys


def of_ranks(rank: int, size: int) -> None:
    torch.set_num_threads(1)
    outcomes, gathers = [], []
    for name in ("one operation", "chunks", "address on ctx", "gradient in forward"):
        model = Model(name)
        engine, optimizer = manage(model, **tight())
        losses = []
        for step in range(STEPS):
            before = engine.stats()["gathers"]
            loss = model(*batch(step))  # the same on all ranks: the mean is exact
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        gathers.append(engine.stats()["gathers"] - before)
        check_nothing_is_left(engine)
        engine.close()
        plain = Model(name)
        want = train(plain, gs.HybridAdam(plain.parameters(), lr=1e-2), None)
        got = losses + [p.detach().clone() for p in model.parameters()]
        outcomes.append(all(map(torch.equal, got, want)))
    assert outcomes == [True] * len(outcomes), outcomes
    assert max(gathers) <= gathers[0] + 1, gathers


def test_ranks_gather_once(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, of_ranks)
