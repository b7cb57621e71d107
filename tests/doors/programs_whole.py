"""Programs about the model as a whole: how it is managed, exported, compiled; and how control flows around it."""

from __future__ import annotations

import contextlib
import gc
import io
import pickle
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import gemini_strategy as gs
from programs import Run, Six, door, rows

# ---- what manage() meets -------------------------------------------------------------------------


def _training(run: Run, make: Callable[[], nn.Module], prepare: Callable[[nn.Module], Any]) -> Any:
    """Prepares a model, manages it and trains it; what `prepare` gives is looked at in the end."""
    torch.manual_seed(3)
    model = make()
    kept = prepare(model)
    optimizer = gs.HybridAdam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    run.manage(model, optimizer)
    losses = run.step(3)
    shown = [t.detach().clone() for t in kept] if isinstance(kept, list) else None
    return [losses, shown, dict(model.state_dict())]


class Words(nn.Module):
    """Embedding and head, that somebody ties."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))
        self.head = nn.Linear(32, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed((x.abs() * 9).long() % 24).sum(1)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.head(h)


def _tie_data(model: Words) -> None:
    model.head.weight.data = model.embed.weight.data


def _tie_layers_by_data(model: Words) -> None:
    model.layers[3].weight.data = model.layers[1].weight.data


def _tie_transposed(model: Words) -> None:
    model.layers[3].weight = nn.Parameter(model.layers[1].weight.t())


def _tie_by_parameter_of_data(model: Words) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.data)


def _tie_views(model: Words) -> None:
    whole = torch.randn(3, 32, 32) / 6
    for i in range(3):
        model.layers[i].weight = nn.Parameter(whole[i])


def _tie_overlapping(model: Words) -> None:
    whole = torch.randn(48, 32) / 6
    model.layers[0].weight = nn.Parameter(whole[:32])
    model.layers[1].weight = nn.Parameter(whole[16:])


def _buffer_of_data(model: Words) -> None:
    model.layers[2].register_buffer("shadow", model.layers[2].weight.data)


def _tie_properly(model: Words) -> None:
    model.head.weight = model.embed.weight


def _tie_frozen(model: Words) -> None:
    model.embed.weight.requires_grad_(False)
    model.head.weight = nn.Parameter(model.embed.weight.data)


def _swap_after(model: Words) -> None:
    model.head.weight, model.embed.weight = model.embed.weight, model.head.weight


for _name, _prepare in {
    "data of the embedding": _tie_data,
    "data of a layer": _tie_layers_by_data,
    "transposed": _tie_transposed,
    "Parameter of the data": _tie_by_parameter_of_data,
    "parts of one tensor": _tie_views,
    "overlapping parts": _tie_overlapping,
    "a buffer that is the data": _buffer_of_data,
    "properly": _tie_properly,
    "to a frozen one": _tie_frozen,
    "exchanged": _swap_after,
}.items():
    door(f"tied/{_name}", "6", model=None, trains=False)(
        lambda run, prepare=_prepare: _training(run, Words, prepare)
    )

for _name, _take in {
    "data": lambda m: [m.layers[3].weight.data],
    "detach": lambda m: [m.layers[3].weight.detach()],
    "view": lambda m: [m.layers[3].weight.data.view(-1)[:40]],
    "state dict": lambda m: list(m.state_dict().values()),
    "numpy": lambda m: [torch.from_numpy(m.layers[3].weight.detach().numpy())],
    "deepcopy": lambda m: [p.detach().clone() for p in m.parameters()],
}.items():
    door(f"kept from before/{_name}", "6", model=None, trains=False)(
        lambda run, take=_take: _training(run, Six, take)
    )


@door("kept from before/an array", "6", model=None, trains=False)
def _(run: Run) -> Any:
    arrays: list[Any] = []
    value = _training(run, Six, lambda m: arrays.append(m.layers[3].weight.detach().numpy()))
    return [value, arrays[0].copy()]


@door("kept from before/gradients", "6", model=None, trains=False)
def _(run: Run) -> Any:
    def prepare(model: nn.Module) -> list[Tensor]:
        model(torch.ones(2, 24)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    return _training(run, Six, prepare)


@door("kept from before/a graph", "6", model=None, trains=False)
def _(run: Run) -> Any:
    losses = []
    value = _training(run, Six, lambda m: losses.append(m(torch.ones(2, 24)).sum()))
    return [value, losses[0].detach()]


def _dispatched(kind: str) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        import tempfile

        import accelerate

        torch.manual_seed(3)
        model = Six()
        with tempfile.TemporaryDirectory() as folder:
            if run.is_managed:
                if kind == "disk":
                    accelerate.disk_offload(
                        model, folder, execution_device=torch.device(run.device)
                    )
                elif kind == "cpu":
                    accelerate.cpu_offload(model, execution_device=torch.device(run.device))
                else:
                    places = {n: "disk" for n, _ in model.named_children()} | {"head": "cpu"}
                    accelerate.dispatch_model(
                        model, places, main_device=run.device, offload_dir=folder
                    )
            run.manage(model, gs.HybridAdam(model.parameters(), lr=1e-2))
            return [run.step(2), dict(model.state_dict())]

    return program


for _name in ("disk", "cpu", "device map"):
    door(f"offloaded/{_name}", "7", model=None, trains=False)(_dispatched(_name))


class _HalfScripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(24, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.child = torch.jit.script(nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.stem(x))
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return self.child(h)


@door("manage/a scripted child", "16", model=None, trains=False)
def _(run: Run) -> Any:
    return _training(run, _HalfScripted, lambda m: None)


@door("manage/fails and leaves the model as it was", "16", model=None, trains=False, served=True)
def _(run: Run) -> Any:
    torch.manual_seed(3)
    model = _HalfScripted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    classes = [type(p).__name__ for p in model.parameters()]
    if run.is_managed:
        with contextlib.suppress(Exception):
            gs.manage(model, gs.HybridAdam(model.parameters()), device=run.device).close()
    model.to(run.device)
    losses = []
    for seed in range(3):
        loss = model(run.x(seed)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    same = classes == [type(p).__name__ for p in model.parameters()]
    return [losses, same, dict(model.state_dict())]


@door("manage/of an interrupted install", "16", model=None, trains=False, served=True)
def _(run: Run) -> Any:
    """A module that refuses hooks: whatever raises, the model is as it was."""

    class Refuses(nn.Linear):
        def register_forward_pre_hook(self, *a: Any, **k: Any) -> Any:
            raise ValueError("no hooks here")

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "forward":
                raise ValueError("nothing may be set here")
            super().__setattr__(name, value)

    torch.manual_seed(3)
    model = Six()
    model.head = Refuses(32, 8)
    if run.is_managed:
        with contextlib.suppress(Exception):
            gs.manage(model, gs.HybridAdam(model.parameters()), device=run.device).close()
    model.to(run.device)
    loss = model(run.x()).square().mean()
    loss.backward()
    return [loss.detach(), [p.grad for p in model.parameters()], pickle.dumps(model.stem) != b""]


@door("manage/twice is refused", "16", whole=True)
def _(run: Run) -> Any:
    if run.engine is not None:
        gs.manage(run.model, gs.HybridAdam(run.model.parameters()), device=run.device)
    return None


@door("manage/close and again", "16", served=True, setups=("cpu", "auto"))
def _(run: Run) -> Any:
    losses = run.step(2)
    if run.engine is not None:
        run.engine.close()
    middle = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.manage(run.model, run.optimizer)
    return [losses, middle, run.step(2)]


@door("manage/closed, then everything that was refused", "16", served=True, trains=False)
def _(run: Run) -> Any:
    losses = run.step(2)
    if run.engine is not None:
        run.engine.close()
    scripted = torch.jit.script(run.model.to(run.device))
    file = io.BytesIO()
    torch.save(run.model, file)
    w = run.w
    values = [losses, scripted(run.x()).detach(), torch.vmap(torch.sum)(w).detach()]
    return [values, type(w).__name__, torch.equal(w.detach(), torch.from_dlpack(w.detach()))]


@door("manage/the least budget that is accepted", "17", served=True)
def _(run: Run) -> Any:
    losses = run.step(4, clip=1.0)
    with torch.no_grad():
        losses.append(run.loss(77))
    return losses


# ---- exported, traced, compiled ------------------------------------------------------------------


@torch.jit.script
def _scripted_sum(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w).sum()


@torch.jit.script
def _scripted_update(w: Tensor, x: Tensor) -> Tensor:
    w.mul_(0.5)
    return w.sum()


def _traced(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x @ w.t())


def _traced_closure(w: Tensor, run: Run) -> Any:
    function = torch.jit.trace(lambda x: x @ w, (run.h(),))
    first = function(run.h(1))
    run.step(1)
    return [first, function(run.h(1))]


def _in_place(run: Run) -> Any:
    with torch.no_grad():
        _scripted_update(run.w, run.h())
    return run.w.detach().clone()


rows(
    "script",
    "3",
    {
        "function of p": lambda r: _scripted_sum(r.w, r.h()).detach(),
        "function of data": lambda r: _scripted_sum(r.w.data, r.h()),
        "function of a view": lambda r: _scripted_sum(r.w.t(), r.h()).detach(),
        "function with a gradient": lambda r: torch.autograd.grad(_scripted_sum(r.w, r.h()), r.w),
        "function that writes": _in_place,
        "traced function": lambda r: torch.jit.trace(
            _traced, (torch.ones(32, 32, device=r.device), r.h())
        )(r.w, r.h()).detach(),
        "traced with p": lambda r: torch.jit.trace(_traced, (r.w.detach(), r.h()))(
            r.w.detach(), r.h()
        ),
        "traced closure": lambda r: _traced_closure(r.w.detach(), r),
        "tied head": lambda r: _scripted_sum(r.param("stem.weight").t(), r.x()).detach(),
        "scripted module that takes p": lambda r: (
            torch.jit.script(nn.Bilinear(32, 32, 2)).to(r.device)(r.w, r.w).sum().isfinite()
        ),
    },
)


def _archived(run: Run) -> Any:
    traced = torch.jit.trace(run.model, (run.x(),))
    first = traced(run.x(1)).detach()
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    return [first, loaded(run.x(1)).detach(), dict(loaded.state_dict())]


def _exported(run: Run) -> Any:
    program = torch.export.export(run.model, (run.x(),))
    return [program.module()(run.x(1)).detach(), dict(program.state_dict)]


def _make_fx(run: Run) -> Any:
    """The graph has the weights that the model has when it runs, as it names parameters."""
    graph = make_fx(lambda x: run.model(x))(run.x())
    values = [run.step(1), graph(run.x(1)).detach()]
    graph(run.x(2)).square().mean().backward()
    return [values, [p.grad.clone() for p in run.model.parameters()]]


def _make_fx_of_p(run: Run) -> Any:
    return make_fx(lambda x: x @ run.w)(run.h())(run.h(1)).detach()


def _linearized(run: Run) -> Any:
    """The first tangent of a linearized function uses the weights of its moment, and keeps them for the next."""
    out, tangent = torch.func.linearize(lambda x: run.model(x), run.x())
    values = [out.detach()]
    for _ in range(3):
        values += [run.step(), tangent(torch.ones_like(run.x())).detach()]
    return values


def _fake(run: Run) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return list((run.w @ run.w).shape)


def _fake_of_p(run: Run) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    return list(mode.from_tensor(run.w).shape)


def _fake_of_model(run: Run) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        return list(run.model(torch.ones(3, 24, device=run.device)).shape)


def _compiled(run: Run) -> Any:
    function = torch.compile(lambda w, x: torch.tanh(x @ w).sum(), backend="eager")
    return function(run.w, run.h()).detach()


def _compiled_aot(run: Run) -> Any:
    function = torch.compile(lambda w, x: torch.tanh(x @ w).sum(), backend="aot_eager")
    return torch.autograd.grad(function(run.w, run.h()), run.w)


def _compiled_ema(run: Run) -> Any:
    @torch.compile(backend="eager")
    def update(s: Tensor, p: Tensor) -> None:
        s.lerp_(p, 0.1)

    shadow = torch.zeros(32, 32, device=run.device)
    with torch.no_grad():
        update(shadow, run.w)
        update(shadow, run.w.detach())
    return shadow


def _compiled_model(run: Run) -> Any:
    return torch.compile(run.model, backend="eager")(run.x()).detach()


def _compiled_layer(run: Run) -> Any:
    return torch.compile(run.model.layers[3], backend="eager")(run.h()).detach()


def _symbolic(run: Run) -> Any:
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return True

    graph = Leaves().trace(run.model)
    return torch.fx.GraphModule(run.model, graph)(run.x()).detach()


for _name, _body in {
    "jit.trace and its archive": ("3", _archived),
    "jit.script": ("18", lambda r: torch.jit.script(r.model)(r.x()).detach()),
    "jit.script of a layer": ("18", lambda r: torch.jit.script(r.model.layers[3])(r.h()).detach()),
    "jit.freeze": (
        "18",
        lambda r: torch.jit.freeze(torch.jit.script(r.model.eval()))(r.x()).detach(),
    ),
    "torch.export": ("18", _exported),
    "fake mode": ("18", _fake),
    "fake of p": ("18", _fake_of_p),
    "fake mode of the model": ("18", _fake_of_model),
    "compiled function of p": ("18", _compiled),
    "compiled function with a gradient": ("18", _compiled_aot),
    "compiled ema": ("18", _compiled_ema),
    "compiled model": ("18", _compiled_model),
    "compiled layer": ("18", _compiled_layer),
    "symbolic_trace": ("18", lambda r: torch.fx.symbolic_trace(r.model)(r.x()).detach()),
    "symbolic_trace of leaves": ("18", _symbolic),
    "meta copy": (
        "18",
        lambda r: [
            list(p.shape) for p in __import__("copy").deepcopy(r.model).to("meta").parameters()
        ],
    ),
    "quantize_dynamic": (
        "18",
        lambda r: (
            torch.ao.quantization.quantize_dynamic(
                __import__("copy").deepcopy(r.model).cpu() if r.device != "cpu" else r.model,
                {nn.Linear},
            )(r.x().cpu())
            .sum()
            .isfinite()
        ),
    ),
}.items():
    door(f"export/{_name}", _body[0], whole=True, needs_all=True)(_body[1])

for _name, _body in {
    "make_fx": _make_fx,
    "make_fx of p": _make_fx_of_p,
    "linearize": _linearized,
}.items():
    door(f"traced/{_name}", "18", served=True)(_body)


# ---- how control flows ---------------------------------------------------------------------------


@door("flow/exception in a forward, then on", "20", served=True)
def _(run: Run) -> Any:
    def fail(*_: Any) -> None:
        raise ValueError("a user's own")

    handle = run.model.layers[3].register_forward_hook(fail)
    try:
        run.loss()
    except ValueError as error:
        text = str(error)
    handle.remove()
    return [text, run.step(3)]


@door("flow/exception in a backward, then on", "20", served=True)
def _(run: Run) -> Any:
    def fail(g: Tensor) -> None:
        raise ValueError("a user's own")

    loss = run.loss()
    handle = run.w.register_hook(fail)
    try:
        loss.backward()
    except ValueError as error:
        text = str(error)
    handle.remove()
    run.optimizer.zero_grad()
    return [text, run.step(3)]


@door("flow/exception in a checkpoint, then on", "20", served=True)
def _(run: Run) -> Any:
    from torch.utils.checkpoint import checkpoint

    calls = []

    def piece(h: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("a user's own")
        return run.model.layers[3](h)

    try:
        checkpoint(piece, run.h().requires_grad_(), use_reentrant=False).sum().backward()
    except ValueError as error:
        text = str(error)
    run.optimizer.zero_grad()
    return [text, run.step(3)]


@door("flow/KeyboardInterrupt in a forward, then on", "20", served=True)
def _(run: Run) -> Any:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = run.model.layers[3].register_forward_pre_hook(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        run.loss()
    handle.remove()
    return run.step(3)


@door("flow/error of a shape, then on", "20", served=True)
def _(run: Run) -> Any:
    try:
        run.model(run.randn(5, 23))
    except RuntimeError as error:
        said = "cannot be multiplied" in str(error)
    return [said, run.step(3)]


@door("flow/a generator that is kept alive", "8", needs_all=True)
def _(run: Run) -> Any:
    def pieces() -> Any:
        h = torch.tanh(run.model.stem(run.x()))
        for layer in run.model.layers:
            h = torch.tanh(layer(h))
            yield h.detach().clone(), layer.weight.detach().sum()

    kept = pieces()
    first = [next(kept), next(kept)]
    with torch.no_grad():
        middle = run.loss(9)
    return [first, middle, list(kept)]


@door("flow/a generator over parameters", "8", needs_all=True)
def _(run: Run) -> Any:
    kept = (p * 2 for p in run.model.parameters())
    first = next(kept).detach()
    run.backward()
    return [first, [t.detach() for t in kept]]


def _in_threads(n: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` gives for 0 to n - 1, each in a thread of its own, at the same time; the first error is raised."""
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        try:
            found[i] = work(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for value in found.values():
        if isinstance(value, Exception):
            raise value
    return [found[i] for i in range(n)]


@door("flow/several threads read", "8", needs_all=True)
def _(run: Run) -> Any:
    def read(i: int) -> list[Tensor]:
        with torch.no_grad():
            return [run.param(f"layers.{i}.weight").sum() for _ in range(20)]

    return _in_threads(4, read)


@door("flow/several threads evaluate", "8", needs_all=True)
def _(run: Run) -> Any:
    def evaluate(i: int) -> list[Tensor]:
        with torch.no_grad():
            return [run.loss(i) for _ in range(5)]

    return _in_threads(3, evaluate)


@door("flow/threads evaluate beside a backward", "8", needs_all=True)
def _(run: Run) -> Any:
    wrong = []
    with torch.no_grad():
        want = run.loss(3)

    def evaluate() -> None:
        try:
            with torch.no_grad():
                wrong.extend(run.loss(3) != want for _ in range(8))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for seed in range(4):
        run.backward(seed)
    for thread in threads:
        thread.join()
    for value in wrong:
        if isinstance(value, Exception):
            raise value
    return [any(wrong), run.w.grad.clone()]


@door("flow/a thread reads while another trains", "8", needs_all=True)
def _(run: Run) -> Any:
    """Each element that it reads is as before or after some step; which, is chance."""
    names = ["layers.2.weight", "layers.5.weight", "norm.bias"]
    steps = {name: [run.param(name).detach().clone()] for name in names}
    losses: list[Tensor] = []
    seen: list[tuple[str, Tensor]] = []
    done = threading.Event()

    def work(i: int) -> None:
        try:
            for _ in range(6 if i == 0 else 0):
                losses.extend(run.step(1))
                for name in names:
                    steps[name].append(run.param(name).detach().clone())
        finally:
            if i == 0:
                done.set()
        while not done.is_set():
            with torch.set_grad_enabled(len(seen) % 2 == 0):
                seen.extend((name, run.param(name).clone().detach()) for name in names)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        _in_threads(2, work)
    finally:
        sys.setswitchinterval(before)
    wrong = [n for n, got in seen if not (torch.stack(steps[n]) == got).any(0).all()]
    return [losses, wrong]


@door("flow/backward in two threads", "8", needs_all=True)
def _(run: Run) -> Any:
    def differentiate(i: int) -> list[Any]:
        x = run.x(i).requires_grad_()
        return [torch.autograd.grad(run.model(x).sum(), x) for _ in range(5)]

    return _in_threads(2, differentiate)


@door("flow/backward that fails again and again", "8", served=True)
def _(run: Run) -> Any:
    def fail(grad: Tensor) -> None:
        raise ValueError("not today")

    failed = 0
    for seed in range(6):
        h = run.model.layers[1](run.h(seed))
        h.register_hook(fail)
        try:
            run.model.layers[5](run.model.layers[3](torch.tanh(h))).sum().backward()
        except ValueError:
            failed += 1
    run.model.zero_grad()
    return [failed, run.step(1)]


@door("flow/backward in another thread", "8", served=True)
def _(run: Run) -> Any:
    loss = run.loss()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    return loss.detach()


@door("flow/inference_mode", "8", served=True)
def _(run: Run) -> Any:
    with torch.inference_mode():
        out = run.model(run.x())
        read = run.w.sum()
        kept = run.w.detach()
        first = kept.sum()
    return [out.clone(), read.clone(), first.clone(), run.step(2)]


@door("flow/evaluation between forward and backward", "8", served=True)
def _(run: Run) -> Any:
    loss = run.loss(0)
    with torch.no_grad():
        other = run.loss(1)
    loss.backward()
    run.finish()
    return [loss.detach(), other]


@door("flow/accumulation and branches", "8", served=True)
def _(run: Run) -> Any:
    losses = []
    for seed in range(4):
        h = torch.tanh(run.model.stem(run.x(seed)))
        for i in (0, 1, 2, 3, 4, 5)[seed % 3 :]:
            h = torch.tanh(run.model.layers[i](h))
        loss = run.model.head(h).square().mean()
        loss.backward()
        losses.append(loss.detach())
        if seed % 2:
            run.finish()
    return losses


@door("flow/weak references and collection", "8", served=True)
def _(run: Run) -> Any:
    kept = weakref.ref(run.w)
    data = run.w.detach()
    alive = weakref.ref(data)
    del data
    gc.collect()
    return [kept() is run.w, alive() is None, run.step(2)]


@door("flow/freezing some", "8")
def _(run: Run) -> Any:
    for p in run.model.stem.parameters():
        p.requires_grad_(False)
    losses = [run.backward(0)]
    seen = [p.grad is None for p in run.model.parameters()]
    run.finish()
    for p in run.model.stem.parameters():
        p.requires_grad_(True)
    return [losses, seen, run.step(2)]


@door("flow/a lone submodule in another model", "8")
def _(run: Run) -> Any:
    other = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), run.model.layers[3]).to(run.device)
    nn.init.constant_(other[0].weight, 0.01)
    nn.init.zeros_(other[0].bias)
    out = other(run.x())
    out.sum().backward()
    return [out.detach(), run.w.grad.clone(), other[0].weight.grad.clone()]


@door("flow/DataParallel-like replicas", "8")
def _(run: Run) -> Any:
    replica = nn.Linear(32, 32).to(run.device)
    for name, p in run.model.layers[3].named_parameters():
        del replica._parameters[name]
        setattr(replica, name, p.detach().clone())
    return replica(run.h())


@door("flow/resize_token_embeddings", "19", model=None, trains=False, setups=("cpu",))
def _(run: Run) -> Any:
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = transformers.LlamaForCausalLM(config)
    run.manage(model, gs.HybridAdam(model.parameters(), lr=1e-2))
    model.resize_token_embeddings(36, mean_resizing=False)
    ids = torch.arange(12, device=run.device).reshape(2, 6)
    return model(ids).logits.detach()


@door("flow/F.linear on a list of weights", "8", needs_all=True)
def _(run: Run) -> Any:
    h = run.h()
    for layer in run.model.layers:
        h = torch.tanh(F.linear(h, layer.weight, layer.bias))
    h.sum().backward()
    return [h.detach(), [layer.weight.grad.clone() for layer in run.model.layers]]
