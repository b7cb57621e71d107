"""`engine.masters()`: what keeps an average beside the model works on the fp32 masters, exactly."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import gemini_strategy as gs
from gemini_strategy.parameters.slot import Slot
from helpers.pairs import turns

PRECISIONS = ("32-true", "bf16-true", "16-mixed")


class Net(nn.Module):
    """With a tied weight, a frozen one, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.linspace(-1, 1, 8), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.embedding(tokens)
        return self.head(torch.tanh(self.middle(hidden + self.frozen.to(hidden.dtype))))


def build(precision: str, **options: Any) -> tuple[Net, gs.Engine]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = {"device": "cpu", "precision": precision, "initial_scale": 16.0, **options}
    return model, gs.manage(model, optimizer, **settings)


def train(model: Net, engine: gs.Engine, seed: int) -> None:
    tokens = torch.randint(0, 12, (4, 6), generator=torch.Generator().manual_seed(seed))
    engine.backward(model(tokens).float().square().mean())
    engine.step()
    engine.zero_grad()


def plain_masters(engine: gs.Engine) -> nn.Module:
    """An ordinary fp32 model with the masters of now."""
    model = Net()
    model.load_state_dict(engine.model_state_dict())
    return model


def assert_same(left: nn.Module, right: nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype is b[name].dtype and torch.equal(a[name], b[name]), name


AVERAGES = {
    "mean": {},
    "mean, buffers": {"use_buffers": True},
    "ema": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema of lists": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
}


@turns(kind=AVERAGES, precision=PRECISIONS)
def test_an_average_has_the_bits_of_one_over_a_plain_model(precision: str, kind: str) -> None:
    """torch's own AveragedModel, made before manage() and updated after each step."""
    torch.manual_seed(0)
    ours, theirs = (AveragedModel(Net(), **AVERAGES[kind]) for _ in range(2))
    model, engine = build(precision, device_budget="20KB", chunk_size=512)
    for seed in range(5):
        train(model, engine, seed)
        with engine.masters():
            ours.update_parameters(model)
        theirs.update_parameters(plain_masters(engine))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_is_written_is_the_master(precision: str) -> None:
    """Swapped out and in again, a model trains on as if it had never been."""
    (model, engine), (other, untouched) = build(precision), build(precision)
    average = plain_masters(engine)
    for seed in range(6):
        train(model, engine, seed)
        train(other, untouched, seed)
        before = engine.model_state_dict()
        for turn in range(2):
            with engine.masters():
                for a, b in zip(average.parameters(), model.parameters(), strict=True):
                    kept = a.data.clone()
                    a.data.copy_(b.data)
                    b.data.copy_(kept)
            with torch.no_grad():
                model(torch.zeros(1, 1, dtype=torch.long))
            if turn == 0:
                shown = engine.model_state_dict()
                assert not torch.equal(shown["middle.weight"], before["middle.weight"])
        after = engine.model_state_dict()
        assert all(torch.equal(before[n], after[n]) for n in before if n != "count")
    same = untouched.model_state_dict()
    assert all(torch.equal(after[n], same[n]) for n in same if n != "count")


def test_a_copy_is_a_model_of_masters() -> None:
    model, engine = build("bf16-true")
    train(model, engine, 0)
    with engine.masters():
        copied = copy.deepcopy(model)
    assert gs.engine_of(copied) is None and copied.head.weight is copied.embedding.weight
    masters = engine.model_state_dict()
    assert all(torch.equal(copied.state_dict()[n], masters[n]) for n in masters)
    assert copy.deepcopy(model).middle.weight.dtype is torch.float32


def test_inside_parameters_are_fp32_and_afterwards_what_they_were() -> None:
    model, engine = build("bf16-true")
    tokens = torch.randint(0, 12, (2, 3))
    expected = model(tokens).detach()
    before = {n: (p.dtype, p.device, p.detach().clone()) for n, p in model.named_parameters()}
    with engine.masters():
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert torch.equal(model.frozen.detach(), torch.linspace(-1, 1, 8))  # as it came in
        assert torch.equal(model(tokens).detach(), expected)  # a pass has its weights
        assert model.middle.weight.dtype is torch.float32  # and leaves masters behind
        model.middle.weight.data.add_(0.0)
    for name, parameter in model.named_parameters():
        dtype, device, values = before[name]
        assert (parameter.dtype, parameter.device) == (dtype, device)
        assert torch.equal(parameter.detach(), values), name
    train(model, engine, 0)


def test_one_parameter_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads the masters holds the copy of one, not of all of them."""
    alive: list[Any] = []
    most = 0
    read = Slot.read_master

    def counting(self: Slot, *args: Any) -> torch.Tensor:
        nonlocal most
        values = read(self, *args)
        alive.append(weakref.ref(values))
        most = max(most, sum(each() is not None for each in alive))
        return values

    monkeypatch.setattr(Slot, "read_master", counting)
    average = AveragedModel(Net(), avg_fn=get_ema_avg_fn(0.9))
    model, engine = build("bf16-true")
    for seed in range(3):
        train(model, engine, seed)
        with engine.masters():
            average.update_parameters(model)
    assert most == 1 and len(alive) == 3 * len(list(model.parameters()))


def test_where_it_is_refused() -> None:
    model, engine = build("bf16-true")

    def asking(*_: Any) -> None:
        with engine.masters():
            pass

    handle = model.middle.register_forward_hook(asking)
    with pytest.raises(gs.GeminiError, match="inside a forward"):
        model(torch.zeros(1, 1, dtype=torch.long))
    handle.remove()
    train(model, engine, 0)
    with engine.masters():
        kept = model.middle.weight.detach()
        engine.close(dtype=torch.float32)
    assert model.middle.weight.dtype is torch.float32
    for act in (lambda: kept.sum(), engine.masters):
        with pytest.raises(gs.GeminiError):
            act()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_state_that_is_loaded_inside_becomes_the_masters(precision: str) -> None:
    model, engine = build(precision)
    train(model, engine, 0)
    masters = engine.model_state_dict()
    train(model, engine, 1)
    with engine.masters():
        model.load_state_dict(masters)
    now = engine.model_state_dict()
    assert all(torch.equal(now[name], masters[name]) for name in masters)
    with engine.masters():  # an entry of its own state
        model.load_state_dict(model.state_dict())
    now = engine.model_state_dict()
    assert all(torch.equal(now[name], masters[name]) for name in masters)


def test_data_assigned_while_somebody_has_the_old_one() -> None:
    """The next time the master that is shown is the new one."""
    model, engine = build("32-true")
    weight = model.middle.weight
    with engine.masters():
        old = weight.data
        before = old.clone()
        weight.data = torch.ones(8, 8)
    assert torch.equal(old.clone(), before)
    train(model, engine, 0)
    want = weight.detach().clone()
    with engine.masters():
        assert torch.equal(weight.detach().clone(), want)
    engine.close()
