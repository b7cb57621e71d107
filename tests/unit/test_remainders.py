"""What bf16 weights lack to be their masters, in HybridAdam: it survives copies, engines and dropped entries."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs

Pair = tuple[nn.Module, gs.HybridAdam]
BUDGET = {"device_budget": "1MB", "device": "cpu"}


def steps(pair: Pair, n: int = 3) -> Pair:
    model, optimizer = pair
    dtype = next(model.parameters()).dtype
    for seed in range(n):
        inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).to(dtype)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return pair


def trained() -> Pair:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(torch.bfloat16)
    return steps((model, gs.HybridAdam(model.parameters(), lr=1e-2)))


def masters(pair: Pair) -> list[torch.Tensor]:
    """As a step that changes nothing finds them."""
    model, optimizer = pair
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    steps(pair, 1)
    return [
        (p.detach().view(torch.int16).int() << 16) + optimizer.state[p]["remainder"]
        for p in model.parameters()
    ]


def shown(engine: gs.Engine) -> list[torch.Tensor]:
    with engine.masters():
        return [p.detach().clone() for p in engine.model.parameters()]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@torch.no_grad()
def write(pair: Pair) -> None:
    pair[0][0].weight[1].fill_(3.0)


def test_a_failed_manage_leaves_what_was_seen() -> None:
    want, pair = trained(), trained()
    with pytest.raises(gs.GeminiError):
        gs.manage(*pair, device_budget="1KB", host_budget="1KB", device="cpu")
    for each in (want, pair):
        write(each)
    assert_same(masters(pair), masters(want))


def test_what_a_cast_keeps_is_newer() -> None:
    model, optimizer = trained()
    optimizer.state.clear()
    model.float()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.2345)
    want = [p.detach().clone() for p in model.parameters()]
    gs.cast_model_(model, "bf16-true")
    engine = gs.manage(model, optimizer, precision="bf16-true", **BUDGET)
    assert_same(shown(engine), want)
    engine.close()


def test_a_model_that_became_fp32_has_no_remainders() -> None:
    model, optimizer = trained()
    optimizer.state.clear()
    model.float()
    want = [p.detach().clone() for p in model.parameters()]
    engine = gs.manage(model, optimizer, precision="bf16-mixed", **BUDGET)
    assert_same(shown(engine), want)
    engine.close()


def test_remainders_alone_are_taken_out() -> None:
    pair = trained()
    want = [bits.view(torch.float32) for bits in masters(copy.deepcopy(pair))]
    for p in pair[0].parameters():
        del pair[1].state[p]["remainder"]
    engine = gs.manage(*pair, precision="bf16-true", **BUDGET)
    assert_same(shown(engine), want)
    engine.close()


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda pair: pickle.loads(pickle.dumps(pair)),
}
CHANGES: dict[str, Callable[[Pair], Any]] = {
    "nothing": lambda pair: None,
    "written": write,
    "cleared": lambda pair: pair[1].state.clear(),
    "written and cleared": lambda pair: (write(pair), pair[1].state.clear()),
    "popped": lambda pair: pair[1].state.pop(pair[0][0].weight),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("before", CHANGES)
@pytest.mark.parametrize("after", ["nothing", "written"])
def test_copies_have_the_same_masters(how: str, before: str, after: str) -> None:
    pair = trained()
    CHANGES[before](pair)
    other = COPIES[how](pair)
    for each in (pair, other):
        CHANGES[after](each)
    assert_same(masters(other), masters(pair))


def test_a_copy_of_a_managed_pair_sees_writes() -> None:
    pair = trained()
    engine = gs.manage(*pair, precision="bf16-true", **BUDGET)
    steps(pair)
    other = copy.deepcopy(pair)
    for each in (pair, other):
        write(each)
    engine.close()
    assert_same(masters(other), masters(pair))


def test_weights_from_a_file_beside_an_optimizer_that_has_stepped_others(tmp_path: Any) -> None:
    """The remainders are of the weights before: the file's are their own masters."""
    from safetensors.torch import save_file

    model, optimizer = trained()
    values = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    engine = gs.manage(
        model, optimizer, precision="bf16-true", weights=tmp_path / "model.safetensors", **BUDGET
    )
    assert_same(shown(engine), [values[name].float() for name, _ in model.named_parameters()])
    engine.close()


# ---- entries that are taken out and put back -------------------------------------------------------


def put_back(pair: Pair, between: Callable[[Pair], Any], how: str) -> None:
    """The first weight's entry is out of `optimizer.state` while `between` runs."""
    p, state = pair[0][0].weight, pair[1].state
    if how == "popped":
        entry = state.pop(p)
        between(pair)
        state[p] = entry
    else:
        entries = {key: state.pop(key) for key in list(state)}
        between(pair)
        pair[1].state = {**entries}


@torch.no_grad()
def load_other(pair: Pair) -> None:
    """Another remainder comes, and then the old one again."""
    p, state = pair[0][0].weight, pair[1].state
    state[p] = {
        "step": torch.tensor(2.0),
        "exp_avg": torch.zeros_like(p, dtype=torch.float32),
        "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
        "remainder": torch.full_like(p, 77, dtype=torch.int16),
    }


BETWEEN: dict[str, Callable[[Pair], Any]] = {
    "nothing": lambda pair: None,
    "a write": write,
    "a step": steps,
    "a write, a step": lambda pair: (write(pair), steps(pair, 1)),
    "a step, a write": lambda pair: (steps(pair, 1), write(pair)),
    "another": load_other,
    "a step, dropped": lambda pair: (steps(pair, 1), pair[1].state.pop(pair[0][0].weight)),
    "a step, cleared": lambda pair: (steps(pair, 1), pair[1].state[pair[0][0].weight].clear()),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("how", ["popped", "replaced"])
def test_an_entry_that_is_put_back_is_not_new(how: str, between: str) -> None:
    """Its remainder is the one that the weight had, so a weight that was written meanwhile is its own master."""
    want, pair = trained(), trained()
    engine = gs.manage(*pair, precision="bf16-true", **BUDGET)
    for each in (want, pair):
        put_back(each, BETWEEN[between], how)
        steps(each, 1)
    assert_same([*pair[0].state_dict().values()], [*want[0].state_dict().values()])
    for mine, its in zip(pair[0].parameters(), want[0].parameters(), strict=True):
        for key, value in want[1].state[its].items():
            assert torch.equal(pair[1].state[mine][key], value), key
    engine.close()


def _unfrozen_midway(is_managed: bool, precision: str | None) -> list[torch.Tensor]:
    """Trains the head in bf16, then all; where it is managed, by the way that the refusal names."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model[0].requires_grad_(False)
    kind = torch.optim.AdamW if is_managed else gs.HybridAdam
    optimizer = kind(model[2].parameters(), lr=1e-2, weight_decay=0.01)
    gs.cast_model_(model, "bf16-true")
    how: dict[str, Any] = {"precision": precision, "device": "cpu"}
    engine = gs.manage(model, optimizer, **how) if is_managed else None

    def train() -> None:
        for seed in range(4):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    group = {"params": list(model[0].parameters())}
    if engine is not None:
        named = "" if precision else r' \(manage\(\) takes precision="bf16-true" then\)'
        way = rf"engine\.close\(dtype=torch\.float32\){named}, .* manage\(\) again"
        with pytest.raises(gs.GeminiError, match=way):
            model[0].requires_grad_(True)
        with pytest.raises(gs.GeminiError, match=way):
            optimizer.add_param_group(dict(group))
        engine.close(dtype=torch.float32)
    model[0].requires_grad_(True)
    optimizer.add_param_group(group)
    if is_managed:
        engine = gs.manage(model, optimizer, device="cpu", precision="bf16-true")
    train()
    state = model.state_dict() if engine is None else engine.model_state_dict(masters=False)
    return list(state.values())


@pytest.mark.parametrize("precision", ["bf16-true", None])
def test_the_way_out_of_a_refusal_loses_no_master(precision: str | None) -> None:
    plain = _unfrozen_midway(False, precision)
    for ours, reference in zip(_unfrozen_midway(True, precision), plain, strict=True):
        assert torch.equal(ours, reference)


def _scaled(is_closed: bool) -> list[torch.Tensor]:
    """Trains in fp16 from a scale that is too large; in between it may close by the way that a refusal names."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    how: dict[str, Any] = {"precision": "16-mixed", "device": "cpu", "initial_scale": 2.0**24}
    engine = gs.manage(model, optimizer, **how)
    for step in range(30):
        if is_closed and step == 20:
            with pytest.raises(gs.GeminiError, match=r"\(keep its scaler\.state_dict\(\)"):
                model[0].requires_grad_(True)
            engine.close(dtype=torch.float32)
            closed, engine = engine, gs.manage(model, optimizer, **how)
            assert closed.scaler is not None and engine.scaler is not None
            engine.scaler.load_state_dict(closed.scaler.state_dict())
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        engine.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert engine.scaler is not None and engine.scaler.scale < 2.0**24
    engine.close(dtype=torch.float32)
    return list(model.state_dict().values())


def test_the_way_out_of_a_refusal_loses_no_loss_scale() -> None:
    for ours, straight in zip(_scaled(True), _scaled(False), strict=True):
        assert torch.equal(ours, straight)
