"""Random sequences of operations: a small model, and many short actions of a program on its fields.

Where random_programs.py draws models and whole steps, this draws what a program does to weights, gradients, moments and
state dicts between, in any order. Programs and verbs are the same.
"""

from __future__ import annotations

import random
import re

from random_programs import RATES, Action, Part, Program

__all__ = ["generate"]

KINDS = ("linear", "linear", "linear", "frozen", "branch", "norm")

TRAINING = {
    "train": """
loss = {loss}
run.see(loss)
run.backward(loss)
run.step()
run.zero_grad({flag})""",
    "backward": "run.backward({loss})",
    "accumulate": """
for i in range(2):
    run.backward(run.loss({seed} + i, {n}) / 2)""",
    "step": "run.step()",
    "clip": """
run.see(run.clip({norm}))
run.step()""",
    "clip value": """
if {has_grads}:
    torch.nn.utils.clip_grad_value_(run.ps(), 1e-3)""",
    "zero": "run.zero_grad({flag})",
    "zero model": "run.model.zero_grad({flag})",
    "immediate": """
run.zero_grad()
loss = {loss}
run.backward(loss, step=True)
run.step()
run.zero_grad()
run.see(loss)""",
    "evaluate": """
run.model.eval()
with torch.{no_grad}():
    run.see({loss}.clone())
run.model.train()""",
    "averaged": """
loss = {loss}
before = [q.data.clone() for q in run.ps()]
for q in run.ps():
    q.data = q.data * 0.5
with torch.no_grad():
    run.see(run.loss({seed} + 1, {n}))
for q, t in zip(run.ps(), before):
    q.data = t
del q, t, before
run.backward(loss)""",
    "averaged in place": """
loss = {loss}
before = [q.data.clone() for q in run.ps()]
torch._foreach_mul_([q.data for q in run.ps()], 0.5)
with torch.no_grad():
    run.see(run.loss({seed} + 1, {n}))
for q, t in zip(run.ps(), before):
    q.data.copy_(t)
run.backward(loss)""",
}

WRITES = {
    "write": """
with torch.no_grad():
    p.mul_(0.9)""",
    "write row": """
with torch.no_grad():
    p[:1] = 0.25""",
    "write data": "p.data.add_(0.01)",
    "write foreach": "torch._foreach_mul_([p.data, o.data], 0.9)",
    "data": "p.data = p.data * 0.9",
    "data full": "p.data = torch.full_like(p, {value})",
    "data itself": "p.data = p.data",
    "grad": """
if p.requires_grad:
    p.grad = torch.full_like(p, {value})""",
    "grad data": """
if p.grad is not None:
    p.grad.data = p.grad * 0.5""",
    "grad write": """
if p.grad is not None:
    p.grad.mul_(0.5)""",
    "grad foreach": """
if p.grad is not None and o.grad is not None:
    torch._foreach_add_([p.grad, o.grad], 0.01)""",
    "grad row": """
if p.grad is not None:
    p.grad.data[:1].zero_()""",
    "grad drop": "p.grad = None",
    "grad of weight": """
if p.grad is not None:
    p.grad.add_(p.detach(), alpha=0.1)""",
    "moment": """
if {has_state}:
    run.optimizer.state[p]['{moment}'] = torch.full(p.shape, {positive})""",
    "moment data": """
if {has_state}:
    run.optimizer.state[p]['{moment}'].data = torch.full(p.shape, {positive})""",
    "moment write": """
if {has_state}:
    run.optimizer.state[p]['{moment}'].mul_(0.5)""",
    # HybridAdam alone shows no masters of 16-bit weights from then on, until the next step.
    "state drop": """
if p.dtype is torch.float32 and {has_state}:
    run.optimizer.state.pop(p)""",
    "full": """
with run.full(p) as values:
    values.mul_(1.001)""",
}

KEPT = {
    "keep state dict": "run.kept['live'] = run.model.state_dict()",
    "keep copies": "run.kept['copies'] = {{k: v.clone() for k, v in run.model.state_dict().items()}}",
    "see state dict": """
if 'live' in run.kept:
    run.see(run.kept['live'][name].clone())""",
    "write state dict": """
if 'live' in run.kept:
    run.kept['live'][name][:1].fill_({value})""",
    "load state dict": """
if '{which}' in run.kept:
    run.model.load_state_dict(run.kept['{which}'])""",
    # Before a step HybridAdam's has nothing of what a 16-bit weight lacks.
    "keep optimizer": """
if all(int(run.optimizer.state.get(q, {{}}).get('step', 0)) for q in run.ps() if q.requires_grad):
    run.kept['optimizer'] = copy.deepcopy(run.optimizer.state_dict())""",
    # What a 16-bit weight lacks, loaded, is of the weight that the next update finds: so that comes at once.
    "load optimizer": """
if 'optimizer' in run.kept:
    run.optimizer.load_state_dict(copy.deepcopy(run.kept['optimizer']))
    run.backward({loss})
    run.step()""",
    "keep": "run.keep('{folder}')",
    "resume": """
if '{folder}' in run.kept:
    run.resume('{folder}')""",
    "again": "run.again()",
    "again in fp32": """
run.zero_grad()
run.again(torch.float32)""",
}

#: What a program does with a tensor that it keeps, or to two fields at once, may be refused by name.
RISKY = {
    "given data": "t = run.kept['live given'] = torch.full_like(p, {value}); p.data = t",
    "given grad": """
if p.requires_grad:
    t = run.kept['live given'] = torch.full_like(p, {value})
    p.grad = t""",
    "given moment": """
if {has_state}:
    t = run.kept['live given'] = torch.full(p.shape, {positive})
    run.optimizer.state[p]['{moment}'] = t""",
    "given write": """
if 'live given' in run.kept:
    run.kept['live given'].mul_(0.5)""",
    "given drop": "run.kept.pop('live given', None)",
    "swap grads": "p.grad, o.grad = o.grad, p.grad",
    "swap data": "p.data, o.data = o.data.clone(), p.data.clone()",
    "swap moments": """
if {has_state} and int(run.optimizer.state[o].get('step', 0)):
    s, z = run.optimizer.state[p], run.optimizer.state[o]
    s['{moment}'], z['{moment}'] = z['{moment}'], s['{moment}']""",
    "freeze": "p.requires_grad_(not p.requires_grad)",
}

LOOKS = {
    "look": "run.see(p)",
    "look at grads": """
run.see(*[None if q.grad is None else q.grad.clone() for q in run.ps()])""",
    "look at moments": """
if {has_state}:
    run.see(run.optimizer.state[p]['{moment}'].clone())""",
    "look at sums": "run.see(*[q.detach().double().sum() for q in run.ps()])",
}

GROUPS = ((TRAINING, 8), (WRITES, 6), (KEPT, 3), (LOOKS, 3))


def _action(
    draw: random.Random, squares: list[str], names: list[str], seed: int, risk: int
) -> Action:
    groups = (*GROUPS, (RISKY, risk))
    (group,) = draw.choices([g for g, _ in groups], [weight for _, weight in groups])
    kind = draw.choice(list(group))
    # Two that are exchanged have the same shape.
    name, other = (
        draw.sample(squares, 2) if re.search(r"\bo\b", group[kind]) else (draw.choice(names), "")
    )
    n = draw.randint(0, 3)
    text = (
        group[kind]
        .strip("\n")
        .format(
            loss=f"run.loss({seed}, {n})",
            seed=seed,
            n=n,
            flag=draw.random() < 0.7,
            norm=draw.choice((0.01, 0.3, 1e4)),
            no_grad=draw.choice(("no_grad", "inference_mode")),
            value=draw.choice((0.02, 0.1, -0.3)),
            positive=draw.choice((1e-6, 0.02)),
            moment=draw.choice(("exp_avg", "exp_avg_sq")),
            which=draw.choice(("live", "copies")),
            folder=draw.choice("ab"),
            has_state="int(run.optimizer.state.get(p, {}).get('step', 0))",
            has_grads="any(q.grad is not None for q in run.ps())",
        )
    )
    lines = text.split("\n")
    if any(word in text for word in ("p.", "p]", "p)", "name")):
        lines.insert(0, f"name = {name!r}; p = run.p(name)")
    if other:
        lines.insert(1, f"o = run.p({other!r})")
    return Action(kind, tuple(lines))


def generate(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed * 7919 + 5)
    parts, names = [], ["stem.weight", "stem.bias", "head.weight", "head.bias"]
    squares = []
    for i, kind in enumerate(["linear", "linear", *draw.choices(KINDS, k=draw.randint(0, 5))]):
        me = f"self.p{i}"
        made = "nn.LayerNorm(W)" if kind == "norm" else "nn.Linear(W, W)"
        made += ".requires_grad_(False)" if kind == "frozen" else ""
        use = f"torch.tanh({me}(h))"
        use += f" if n % 3 != {draw.randint(0, 2)} else h" if kind == "branch" else ""
        parts.append(Part(f"{me} = {made}", f"h = {use}"))
        names.append(f"p{i}.weight")
        squares += [f"p{i}.weight"] if kind != "norm" else []
    risk = draw.choice((0, 0, 1, 3))
    actions = [
        _action(draw, squares, names, 100 * (i + 1), risk) for i in range(draw.randint(6, 40))
    ]
    how = {
        "model_seed": draw.randint(0, 1000),
        "precision": draw.choice(("32-true", "bf16-true")),
        "lr": draw.choice((1e-3, 1e-2)),
        "share": draw.choice((0.4, 0.7, 1.2)),
        "chunk_size": draw.choice((1024, 4096, 65536)),
        "policy": draw.choice(("auto", "auto", "cpu", "cuda")),
        "rates": draw.choice(RATES),
        "chaos": seed if draw.random() < 0.3 else None,
        "ranks": 1,
        "may_grow": True,
        "may_refuse": any(action.kind in RISKY for action in actions),
    }
    return Program(seed, draw.choice((8, 13, 32)), tuple(parts), tuple(actions), how)
