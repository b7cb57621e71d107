"""Random programs: from a seed to a model, a list of actions and a way of managing, as text that runs.

A program is Python source in pieces: each part of the model is a line of `__init__` and a line of `forward`, each
action a few lines of `play`. So a program can be made smaller by leaving pieces out, and a failing one is printed as it
was run. Pieces use the verbs of random_support.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["Action", "Part", "Program", "generate", "play_source", "script"]

SUPPORT = Path(__file__).with_name("random_support.py")

RATES = (
    "h2d=55e9,d2h=54e9",
    "h2d=1e6,d2h=1e6",
    "h2d=1e5,d2h=54e9",
    "h2d=55e9,d2h=54e9,host_adam=1e2,host_adam_beside=1e2",
    "h2d=1e8,d2h=1e8,host_adam=1e15,host_adam_beside=1e15,device_adam=1e5",
)


@dataclass(frozen=True)
class Part:
    """A part of the model between stem and head."""

    made: str
    used: str


@dataclass(frozen=True)
class Action:
    """Lines of `play`."""

    kind: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """All of one seed."""

    seed: int
    width: int
    parts: tuple[Part, ...]
    actions: tuple[Action, ...]
    how: dict[str, Any] = field(default_factory=dict)


# ---- models --------------------------------------------------------------------------------------

FIXED = ("stem.weight", "stem.bias", "head.weight")


def _parts(draw: random.Random, width: int, is_reentrant: bool) -> tuple[list[Part], list[str]]:
    parts: list[Part] = []
    linears: list[int] = []
    names: list[str] = list(FIXED)
    for i in range(draw.randint(2, 7)):
        kind = draw.choice(
            (
                "linear",
                "linear",
                "linear",
                "residual",
                "hanging",
                "peeks",
                "bare",
                "counts",
                "keeps",
                "shared",
            )
            + ("tied", "frozen")
        )
        me, use = f"self.p{i}", "h = torch.tanh({me}(h))"
        first = f"p{i}.weight"
        if kind == "residual":
            made, first = f"Residual(W, {draw.choice((7, 40, 65))})", f"p{i}.up.weight"
        elif kind == "hanging":
            made = "Hanging(W)"
        elif kind == "peeks":
            way = draw.choice(
                ("function", "reentrant" if is_reentrant else "function", "data", "linear")
            )
            made, first = f'Peeks(W, "{way}")', f"p{i}.child.weight"
        elif kind == "bare":
            sizes = ", ".join(str(draw.choice((0, 1, 3, 17, 33))) for _ in range(3))
            made, first = f"Bare(W, {sizes})", f"p{i}.parts.1"
        elif kind == "counts":
            made = "Counts(W)"
        elif kind == "keeps":
            made = "Keeps(W)"
        elif kind == "shared" and linears:
            parts.append(Part("", f"h = torch.tanh(self.p{draw.choice(linears)}(h))"))
            continue
        elif kind == "tied" and linears:
            other = draw.choice(linears)
            parts.append(
                Part(
                    f"{me} = nn.Linear(W, W); {me}.weight = self.p{other}.weight", use.format(me=me)
                )
            )
            continue
        elif kind == "frozen":
            made = "nn.Linear(W, W).requires_grad_(False)"
        else:
            made = f"nn.Linear(W, W, bias={draw.random() < 0.7})"
            linears.append(i)
        names.append(first)
        way = draw.choice(("plain",) * 4 + ("branch", "checkpoint", "double"))
        way = "reentrant" if way == "checkpoint" and is_reentrant else way
        if way == "branch":
            use = f"h = torch.tanh({{me}}(h)) if n % 3 != {draw.randint(0, 2)} else h"
        elif way == "checkpoint":
            use = "h = h + checkpoint({me}, h, use_reentrant=False)"
        elif way == "reentrant":
            use = "h = h + checkpoint({me}, h, use_reentrant=True)"
        elif way == "double":
            use = "h = torch.tanh({me}(torch.tanh({me}(h))))"
        parts.append(Part(f"{me} = {made}", use.format(me=me)))
    return parts, names


# ---- actions -------------------------------------------------------------------------------------

READS = (
    "p.detach().clone()",
    "p.norm()",
    "p.data.sum()",
    "p.detach().t() @ p.detach()",
    "float(p.reshape(-1)[:1].sum())",
    "p.detach().float().numpy().copy()",
    "p.tolist()",
    "p.data[:2].clone()",
    "torch.stack(torch._foreach_norm([p, run.p('stem.weight')]))",
    "torch.cat([q.detach().float().reshape(-1) for q in run.ps()]).sum()",
    "F.normalize(p, dim=0)",
    "torch.vmap(torch.sum)(p.detach())",
    "F.linear(torch.ones(2, p.shape[-1], dtype=p.dtype), p)",
    "p.view(-1).abs().max()",
    "torch.from_dlpack(p.detach()).clone()",
    "copy.deepcopy(p).detach()",
    "p._version >= 0",
    "p.untyped_storage().nbytes() > 0 or p.numel() == 0",
    "p.to(torch.float64).sum()",
    "torch.asarray(p).detach().clone()",
    "list(run.model.state_dict().values())[0].clone()",
)

WRITES = (
    "p.mul_(0.5)",
    "p.add_(0.01)",
    "p.copy_(torch.full(p.shape, 0.03))",
    "p[:1] = 0.25",
    "p.data.mul_(0.75)",
    "p.data = p.data * 0.5",
    "p.view(-1)[:3].zero_()",
    "torch._foreach_mul_([p, run.p('stem.bias')], 0.5)",
    "torch.mul(p, 0.5, out=p)",
    "p.detach().clamp_(-0.1, 0.1)",
    "nn.init.constant_(p, 0.02)",
    "p.t().mul_(1.5)",
    "p.sub_(p.sign() * 0.01)",
    "p.data.copy_(p.data.flip(0))",
    "torch.from_dlpack(p.detach()).mul_(0.5)",
    "run.model.state_dict()[name].mul_(0.5)",
    "p.data[0] = 1.0",
    "p.lerp_(torch.zeros_like(p), 0.1)",
)

GRAD_WRITES = (
    "p.grad.mul_(0.5)",
    "p.grad = p.grad * 0.25",
    "p.grad.data.clamp_(-1e-3, 1e-3)",
    "p.grad = None",
    "p.grad[:1] = 0",
    "p.grad.add_(p.detach(), alpha=0.01)",
    "p.grad.zero_()",
)

TAKES = (
    "p.detach()",
    "p.data",
    "p.detach().view(-1)",
    "run.model.state_dict()[name]",
    "p.data[:1]",
)

STATE = (
    "run.kept['model'] = {k: v.clone() for k, v in run.model.state_dict().items()}",
    """
if 'model' in run.kept:
    run.model.load_state_dict(run.kept['model'])""",
)

OPTIMIZER_STATE = (
    """
run.kept['optimizer'] = copy.deepcopy(run.optimizer.state_dict())
run.kept['its weights'] = run.save()""",
    """
if 'optimizer' in run.kept:
    run.load(run.kept['its weights'])
    run.optimizer.load_state_dict(run.kept['optimizer'])
    run.settle()""",
)

RESUME = (
    "run.kept['resume'] = run.save()",
    """
if 'resume' in run.kept:
    run.load(run.kept['resume'])""",
)

AVERAGES = (
    "e.lerp_(q.detach().float(), 0.2)",
    "e.mul_(0.8).add_(q.data, alpha=0.2)",
    "e.copy_(0.8 * e + 0.2 * q)",
)

KEPT = (
    """
run.see(*(view.clone() for m in run.model.modules() for view in getattr(m, 'views', ())))""",
    """
if 'view' in run.kept:
    run.see(run.kept['view'].clone())""",
    """
if 'view' in run.kept:
    with torch.no_grad():
        run.kept['view'].mul_(0.5)""",
)

PLAIN_KINDS = ("train", "quiet", "immediate", "evaluate", "forward", "lr", "half")


def _quiet_steps(draw: random.Random, seed: int, n: int) -> str:
    """Steps whose clips do not fire, until the engine begins with the next one before it is known."""
    return f"""
for i in range({draw.randint(3, 6)}):
    loss = run.loss({seed} + i, {n})
    run.see(loss)
    run.backward(loss)
    run.see(run.clip({draw.choice((1e4, 1e4, 1.0))} if i == 2 else 1e4))
    run.step()
    run.zero_grad()"""


def _action(
    draw: random.Random, names: list[str], seed: int, precision: str, is_reentrant: bool
) -> Action:
    name = draw.choice(names)
    p = f'name = "{name}"; p = run.p(name)'
    is_scaled = precision == "16-mixed"
    kind = draw.choice(
        ("train",) * 6
        + (
            "immediate",
            "immediate",
            "quiet",
            "evaluate",
            "forward",
            "read",
            "read",
            "write",
            "write",
            "half",
        )
        + ("full", "grads", "grad write", "state", "optimizer state", "resume", "ema", "grad")
        + (
            "penalty",
            "weight penalty",
            "forward error",
            "backward error",
            "keep",
            "keep",
            "hook",
            "lr",
        )
    )
    if is_reentrant and kind in ("grad", "penalty"):
        kind = "train"  # torch has no autograd.grad through such a checkpoint
    if is_scaled and kind in ("grads", "grad write", "weight penalty", "hook"):
        kind = "train"
    n = draw.randint(0, 5)
    loss = f"run.loss({seed}, {n})"
    if kind == "train":
        k = draw.choice((1, 1, 2))
        clip = f"run.see(run.clip({draw.choice((0.05, 1.0))}))" if draw.random() < 0.4 else "pass"
        # The next step adds to what this one has used.
        keeps = not is_scaled and draw.random() < 0.15
        drop = "pass" if keeps else f"run.zero_grad({draw.random() < 0.8})"
        text = f"""
for i in range({k}):
    loss = run.loss({seed} + i, {n})
    run.see(loss)
    run.backward(loss / {k})
{clip}
run.step()
{drop}"""
    elif kind == "quiet":
        text = _quiet_steps(draw, seed, n)
    elif kind == "immediate":
        text = f"""
loss = {loss}
run.see(loss)
run.zero_grad()
run.backward(loss, step=True)
run.step()
run.zero_grad()"""
    elif kind == "half":
        text = f"run.backward({loss})"
    elif kind == "evaluate":
        text = f"""
run.model.eval()
with torch.{draw.choice(("no_grad", "inference_mode"))}():
    run.see({loss}.clone())
run.model.train()"""
    elif kind == "forward":
        text = f"run.see({loss})"
    elif kind == "read":
        text = f"{p}\nrun.see({draw.choice(READS)})"
    elif kind == "write":
        text = f"""
{p}
with torch.no_grad():
    {draw.choice(WRITES)}
run.see(p)"""
    elif kind == "full":
        text = f"""
{p}
with run.full(p) as values:
    values.mul_(1.001).add_(1e-4)
run.see(p)"""
    elif kind == "grads":
        text = """
for q in run.ps():
    run.see(None if q.grad is None else q.grad.clone())"""
    elif kind == "grad write":
        text = f"""
{p}
run.backward({loss})
if p.grad is not None:
    with torch.no_grad():
        {draw.choice(GRAD_WRITES)}
run.see(None if p.grad is None else p.grad.clone())"""
    elif kind == "state":
        text = draw.choice(STATE)
    elif kind == "optimizer state":
        text = draw.choice(OPTIMIZER_STATE)
    elif kind == "resume":
        text = draw.choice(RESUME)
    elif kind == "ema":
        text = f"""
ema = run.kept.setdefault('ema', [torch.zeros(q.shape) for q in run.ps()])
with torch.no_grad():
    for e, q in zip(ema, run.ps()):
        {draw.choice(AVERAGES)}
run.see(*ema)"""
    elif kind == "grad":
        text = f"""
qs = [q for q in run.ps() if q.requires_grad]
grads = torch.autograd.grad({loss}, qs, allow_unused=True)
run.see(*[g for g in grads if g is not None])"""
    elif kind == "penalty":
        text = f"""
torch.manual_seed(1)
x = run.x({seed}).requires_grad_()
(g,) = torch.autograd.grad(run.call(x, {n}).float().sum(), x, create_graph=True)
loss = g.float().square().sum()
run.see(loss)
run.backward(loss)
{draw.choice(("run.step()", "pass"))}
run.zero_grad()"""
    elif kind == "weight penalty":
        text = f"""
loss = {loss} + 0.01 * sum(q.float().square().sum() for q in run.ps())
run.see(loss)
run.backward(loss)
run.step()
run.zero_grad()"""
    elif kind == "forward error":
        text = f"""
def fail(*_):
    raise ValueError('own')
handle = run.model.head.register_forward_pre_hook(fail)
try:
    {loss}
except ValueError as error:
    run.see(str(error))
handle.remove()"""
    elif kind == "backward error":
        text = f"""
def fail(*_):
    raise ValueError('own')
loss = {loss}
handle = run.p('stem.weight').register_hook(fail)
try:
    run.backward(loss)
except ValueError as error:
    run.see(str(error))
handle.remove()
run.zero_grad()"""
    elif kind == "keep":
        text = draw.choice((f"{p}\nrun.kept['view'] = {draw.choice(TAKES)}", *KEPT))
    elif kind == "hook":
        text = f"""
{p}
if p.requires_grad:
    handle = p.register_hook(lambda g: g * 0.5)
    run.backward({loss})
    handle.remove()
    run.step()
    run.zero_grad()"""
    else:
        text = f"run.optimizer.param_groups[0]['lr'] = {draw.choice((1e-3, 5e-3))}"
    return Action(kind, tuple(text.strip("\n").split("\n")))


def generate(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed * 6151 + 3)
    width = draw.choice((13, 16, 24, 32, 33))
    is_reentrant = draw.random() < 0.4
    parts, names = _parts(draw, width, is_reentrant)
    precision = draw.choice(("32-true", "32-true", "bf16-true", "bf16-mixed", "16-mixed"))
    actions = [
        _action(draw, names, 100 * (i + 1), precision, is_reentrant)
        for i in range(draw.randint(5, 16))
    ]
    if draw.random() < 0.4:  # before all others: at once there is a plan for it
        text = _quiet_steps(draw, 100, draw.randint(0, 5))
        actions[0] = Action("quiet", tuple(text.strip("\n").split("\n")))
    how = {
        "model_seed": draw.randint(0, 1000),
        "precision": precision,
        "lr": draw.choice((1e-3, 1e-2)),
        "share": draw.choice((0.05, 0.1, 0.2, 0.35, 0.5, 0.8, 1.3)),
        "chunk_size": draw.choice((1024, 4096, 4096, 8192, 65536)),
        "policy": draw.choice(("auto", "auto", "auto", "cpu", "cuda")),
        "rates": draw.choice(RATES),
        "chaos": seed if draw.random() < 0.5 else None,
        # Several ranks add a gradient that comes in parts in another order: a known limit.
        "ranks": 2 if draw.random() < 0.25 and not is_reentrant else 1,
    }
    if how["ranks"] > 1 and precision == "16-mixed":
        how["precision"] = (
            "bf16-mixed"  # fp16's smallest gradients lose bits in the mean: a known limit
        )
    program = Program(seed, width, tuple(parts), tuple(actions), how)
    may_grow = not is_plain(program)
    return replace(program, how=how | {"may_grow": may_grow, "may_refuse": may_grow})


def is_plain(program: Program) -> bool:
    """Whether nothing but forward, backward, step and evaluation happens, which an accepted budget has to serve.

    What a module keeps of its weight keeps the chunk.
    """
    keeps = any("Keeps(" in part.made for part in program.parts)
    return not keeps and all(action.kind in PLAIN_KINDS for action in program.actions)


# ---- text ----------------------------------------------------------------------------------------


def play_source(program: Program) -> str:
    """`Net`, `play` and `HOW` of a program, for whoever has the names of random_support.py."""
    made = [f"        {part.made}" for part in program.parts if part.made]
    used = [f"        {part.used}" for part in program.parts]
    lines = [
        f"W = {program.width}",
        f"HOW = {program.how!r}",
        "",
        "",
        "class Net(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.stem = nn.Linear(IN, W)",
        *made,
        "        self.head = nn.Linear(W, OUT)",
        "",
        "    def forward(self, x, n=0):",
        "        h = torch.tanh(self.stem(x))",
        *used,
        "        return self.head(h)",
        "",
        "",
        "def play(run):",
    ]
    for i, action in enumerate(program.actions):
        lines += [f"    # {i}: {action.kind}", *(f"    {line}" for line in action.lines)]
    return "\n".join([*lines, "    return None"]) + "\n"


def script(program: Program, why: str) -> str:
    """A program that reproduces a failure by itself."""
    said = "\n".join(f"# {line}" for line in why.strip().splitlines()[:12])
    return f"""{SUPPORT.read_text()}

# ---- seed {program.seed} -------------------------------------------------------------------------
{said}

{play_source(program)}

if __name__ == "__main__":
    main(Net, play, HOW)
"""
