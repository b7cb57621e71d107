"""engine.chunk_states(): each word where it holds, and that asking changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.report.chunks import STATES

N = 12  # chunks: more updates than a step issues by itself


def case(**arguments: object) -> tuple[nn.Sequential, torch.optim.Optimizer, gs.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(N)])
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(
        model, optimizer, device="cpu", precision="bf16-true", chunk_size=64 * 64 * 2, **arguments
    )
    return model, optimizer, engine


def words(engine: gs.Engine) -> list[str]:
    return [found.state for found in engine.chunk_states()]


def test_each_state_in_a_step() -> None:
    model, optimizer, engine = case(device_budget="200KB")
    assert words(engine) == ["FREE"] * N
    seen: dict[str, list[str]] = {}
    model[3].register_forward_pre_hook(lambda *_: seen.update(forward=words(engine)))
    with torch.no_grad():
        model(torch.ones(1, 64))
    assert seen["forward"][3] == "COMPUTE"
    assert seen["forward"].count("COMPUTE") == 1
    assert "HOLD" in words(engine)
    absent = model[5].weight.detach()  # a tensor, and no bytes
    assert "COMPUTE" not in words(engine)
    pending = []
    for _ in range(5):
        loss = model(torch.ones(1, 64)).float().square().mean()
        loss.backward()
        assert words(engine) == ["READY"] * N
        found = engine.chunk_states()[0]
        assert (found.parameters, found.gradients, found.uses) == (("0.weight",), 1, 0)
        optimizer.step()
        optimizer.zero_grad()
        assert "READY" not in words(engine)
        pending.append(words(engine).count("UPDATE"))
        assert pending[-1] == engine.stats()["pending_updates"]
    assert max(pending) > 0  # under a plan: stepped, and issued under the next forward
    del absent
    engine.close()
    with pytest.raises(gs.GeminiError, match="closed"):
        engine.chunk_states()


def test_a_chunk_with_a_part_of_its_gradients() -> None:
    model = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(2)])
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu")
    assert len(engine.chunk_states()) == 1
    model[0](torch.ones(1, 8)).sum().backward()
    (found,) = engine.chunk_states()
    assert (found.state, found.gradients) == ("HOLD_AFTER_BWD", 1)
    assert found.parameters == ("0.weight", "1.weight")
    model[1](torch.ones(1, 8)).sum().backward()
    assert words(engine) == ["READY"]
    optimizer.zero_grad()
    assert words(engine) == ["HOLD"]
    assert set(found.pieces) == {"weight", "state", "grad"}
    assert set(words(engine)) <= set(STATES)
    engine.close()


def test_pieces_say_which_side_is_right() -> None:
    model, optimizer, engine = case(placement_policy="cpu")
    for found in engine.chunk_states():
        assert dict(found.pieces) == {"weight": "HOME", "state": "HOME", "grad": "HOME"}
    engine.close()
    model, optimizer, engine = case()
    for found in engine.chunk_states():  # without a budget all fits, and nothing has a home
        assert dict(found.pieces) == {"weight": "DIRTY", "state": "DIRTY", "grad": "DIRTY"}
    for _ in range(2):
        model(torch.ones(1, 64)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(1, 64))
    # All is updated where it is, and nothing goes home.
    assert all(found.pieces["weight"] == "DIRTY" for found in engine.chunk_states())
    engine.close()


def test_asking_changes_no_bit_and_no_count() -> None:
    def run(asks: bool) -> tuple[list[torch.Tensor], list[float]]:
        model, optimizer, engine = case(device_budget="200KB")
        torch.manual_seed(1)
        if asks:
            for layer in model:
                layer.register_forward_hook(lambda *_: words(engine) and None)
        for _ in range(4):
            model(torch.randn(2, 64)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        stats = engine.stats()
        counts = [stats[key] for key in ("plan_breaks", "replay_waits", "leases")]
        engine.close(torch.float32)
        return [p.detach() for p in model.parameters()], counts

    asked, plain = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(asked[0], plain[0], strict=True))
    assert asked[1] == plain[1] == [0, 0, 0]
