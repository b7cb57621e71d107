"""Quantized frozen bases under adapters: moved as bytes, with the bits of the run without Gemini."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.parameters import absent
from gemini_strategy.parameters import quantized as quantized_weights
from helpers.forked import Forks, values
from helpers.pairs import turns
from helpers.quantized_models import (
    KINDS,
    TIGHT,
    Case,
    quantized,
    torchao_int8,
    trained,
)
from helpers.reference import (
    Managed,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    drive,
    managed,
    plain,
)


def recipe(precision: str = "bf16-true") -> Recipe:
    return Recipe(precision, steps=3, clip=1.0, groups=trained, lr=1e-2)


def run_of(kind: str, **how: Any) -> Managed:
    return managed(Case(kind).build, recipe(), **TIGHT | how)


def assert_same_outcomes(run: Managed, reference: Plain) -> None:
    """But for names: state dicts have wrappers as they are."""
    mine, its = run.outcome(), reference.outcome()
    for outcome in (mine, its):
        outcome.weights = {n: t for n, t in outcome.weights.items() if type(t) is Tensor}
    assert_same_outcome(mine, its)


# ---- training ------------------------------------------------------------------------------------


@turns(
    kind=KINDS,
    precision=["bf16-true", "bf16-mixed", "bf16-true"],
    checkpointing=[False, False, True],
)
def test_training_has_the_bits_of_the_plain_run(
    kind: str, precision: str, checkpointing: bool
) -> None:
    case, how = Case(kind, checkpointing), recipe(precision)
    reference, run = plain(case.build, how), managed(case.build, how, **TIGHT)
    for each in (reference, run):
        drive(each, case, how.steps)
    stats = run.engine.stats()
    assert stats["evictions"] > 0 and stats["leases"] == 0
    assert stats["device_peak_bytes"] <= 60_000 < stats["weight_bytes"]
    assert_same_outcomes(run, reference)
    run.engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_forward_keeps_holds_no_chunk(kind: str) -> None:
    """bitsandbytes keeps the weight on the node of the graph, beside what autograd saves."""
    case, run = Case(kind), run_of(kind)
    loss = case.loss(run, case.batch(0))
    assert run.engine.stats()["leases"] == 0
    raw = [slot for slot in run.engine._runtime.slots if slot.is_raw]
    assert len(raw) >= 3 * 7 and all(absent.is_absent(slot.parameter) for slot in raw)
    run.backward(loss)
    assert run.engine.stats()["leases"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_never_travels_back_and_has_no_states(kind: str) -> None:
    case, run = Case(kind), run_of(kind)
    drive(run, case, 2)
    runtime = run.engine._runtime
    before = {s: s.read_weight() for s in runtime.slots if s.is_raw}
    stats = run.engine.stats()
    shape = {s: runtime.core.chunk(s.id) for s in runtime.slots}
    frozen = {shape[s][0] for s in runtime.slots if not s.has_moments}
    active = {shape[s] for s in runtime.slots if s.has_moments}
    assert not frozen & {chunk[0] for chunk in active}
    # Of an adapter 2 bytes of a weight, as much of its gradient and 10 of states, in each of two steps.
    most = 2 * sum(chunk[1] // 2 * 14 for chunk in active)
    assert stats["evicted_bytes"] <= most
    drive(run, case, 1, first=2)
    for slot, weight in before.items():
        assert_same_bits(slot.read_weight(), weight, slot.name)


def test_weights_that_a_cpu_would_pack_anew_stay_as_they_are() -> None:
    """bitsandbytes does that to evaluate where the processor has AVX512-BF16, unless it is told not to."""
    torch.manual_seed(0)
    reference = quantized("nf4")
    torch.manual_seed(0)
    model = quantized("nf4")
    layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    for layer in reference.modules():
        layer.support_avx512bf16_for_cpu = False
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    with gs.manage(model, None, precision="bf16-true", **TIGHT | {"device": "cpu"}) as engine:
        for _ in range(2):
            assert_same_bits(logits_of(engine.model), logits_of(reference))
    assert all(layer.support_avx512bf16_for_cpu for layer in layers)


# ---- the way back, copies, files -----------------------------------------------------------------


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=Case("").batch(5)).logits.clone()


@pytest.mark.parametrize("kind", KINDS)
def test_closed_copied_and_refused_it_is_the_model_that_it_was(kind: str) -> None:
    torch.manual_seed(7)
    model = Case(kind).build()
    kinds = {name: type(p) for name, p in model.named_parameters()}
    want = logits_of(model)
    optimizer = torch.optim.AdamW(trained(model))
    with pytest.raises(gs.GeminiMemoryError):
        gs.manage(model, optimizer, device="cpu", device_budget="1KB", precision="bf16-true")
    assert_same_bits(logits_of(model), want, "refused")
    engine = gs.manage(model, optimizer, precision="bf16-true", **TIGHT | {"device": "cpu"})
    assert gs.engine_of(model) is engine
    managed_logits = logits_of(model)
    twin = copy.deepcopy(model)
    engine.close()
    assert not any(hasattr(p, "_gm_slot") for p in (*model.parameters(), *twin.parameters()))
    for each, what in ((model, "closed"), (twin, "copied")):
        assert {name: type(p) for name, p in each.named_parameters()} == kinds, what
        each.to(torch.bfloat16)  # it came in fp32, and has computed in bf16
        assert_same_bits(logits_of(each), managed_logits, what)


@turns(kind=["int8", "nf4 in bf16", "torchao int8"], frozen=[True, False])
def test_checkpoints_resume(kind: str, frozen: bool, tmp_path: Path) -> None:
    case, run = Case(kind), run_of(kind)
    drive(run, case, 2)
    run.engine.save(tmp_path / "saved", frozen=frozen)
    run.engine.save_pretrained(tmp_path / "adapter")
    drive(run, case, 1, first=2)
    again = run_of(kind, device_budget="400KB")
    again.engine.load(tmp_path / "saved")
    drive(again, case, 1, first=2)
    for one, other in zip(again.losses, run.losses[2:], strict=True):
        assert_same_bits(one, other)
    mine, its = again.engine.model_state_dict(), run.engine.model_state_dict()
    for name, value in its.items():
        if "lora_" in name:
            assert_same_bits(mine[name], value, name)
    adapter = peft.PeftModel.from_pretrained(quantized(kind), tmp_path / "adapter")
    assert len(trained(run.model)) == sum("lora_" in n for n, _ in adapter.named_parameters())


def test_another_quantization_is_not_loaded(tmp_path: Path) -> None:
    """The bytes would fit, and the scales that stand beside them would not."""
    run_of("nf4").engine.save(tmp_path / "saved")

    def build() -> nn.Module:
        model = Case("nf4").build()
        state = model.base_model.model.model.layers[1].mlp.up_proj.weight.quant_state
        state.absmax += 1
        return model

    other = managed(build, recipe(), **TIGHT)
    with pytest.raises(gs.GeminiError, match=r"1.mlp.up_proj.weight.absmax, which belongs to a qu"):
        other.engine.load(tmp_path / "saved")


# ---- what is refused -----------------------------------------------------------------------------


def test_what_is_not_quantized_yet_is_refused() -> None:
    for module in (bnb.nn.Linear4bit(64, 64), bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)):
        with pytest.raises(gs.GeminiError, match=r"weight is a .* has not been quantized yet"):
            gs.manage(module, None, device="cpu")


def test_wrappers_are_not_trained() -> None:
    model = nn.Sequential(torchao_int8(nn.Linear(64, 64).bfloat16()), nn.Linear(64, 1).bfloat16())
    with pytest.raises(gs.GeminiError, match=r"param group 0 has 0.weight, a frozen Int8Tensor"):
        gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu")
    model[0].weight.requires_grad_(True)
    with pytest.raises(gs.GeminiError, match=r"0.weight is a Int8Tensor and trainable"):
        gs.manage(model, None, device="cpu")


def test_files_of_a_quantized_base_are_not_written(tmp_path: Path) -> None:
    engine = gs.manage(quantized("torchao int8"), None, device="cpu")
    with pytest.raises(gs.GeminiError, match=r"weight.qdata is quantized"):
        engine.save_pretrained(tmp_path / "saved")


def test_a_wrapper_follows_its_parts() -> None:
    """To the device of the engine, and back: the same object, whose class tells the device itself."""
    model = torchao_int8(nn.Linear(64, 64).bfloat16())
    weight = model.weight
    for name, part in list(quantized_weights.parts(weight)):
        setattr(weight, name, part.to("meta"))
    inner = dict(quantized_weights.parts(weight))
    assert weight.device.type == "cpu"
    quantized_weights.follow(weight)
    assert weight.device.type == "meta" and model.weight is weight
    assert weight.dtype is torch.bfloat16 and not weight.requires_grad
    now = dict(quantized_weights.parts(weight))
    assert now.keys() == inner.keys() and all(now[name] is inner[name] for name in inner)


# ---- ranks ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    preloaded = ("transformers.models.llama.modeling_llama", Path(__file__).stem)
    with Forks((Path(__file__).parent,), preloaded) as forks:
        yield forks


def ranks_job(rank: int) -> list[list[Tensor]]:
    """Of each kind the losses and masters of three steps; every rank has the same batches."""
    found = []
    for kind in ("int8", "nf4", "torchao int8"):
        case, run = Case(kind), run_of(kind)
        drive(run, case, 3)
        masters = run.engine.model_state_dict()
        found.append([*run.losses, *(t for n, t in masters.items() if "lora_" in n)])
        run.engine.close()
    return found


def test_ranks_share_the_bytes(forks: Forks) -> None:
    ended = forks.run(f"{__name__}:{ranks_job.__name__}", ranks=2, timeout=120.0)
    want = ranks_job(0)
    for value in values(ended):
        for mine, its in zip(value, want, strict=True):
            for one, other in zip(mine, its, strict=True):
                assert_same_bits(one, other)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_checkpoint_without_the_base_has_nothing_of_it(kind: str, tmp_path: Path) -> None:
    """Neither bytes nor scales: a base that was quantized otherwise keeps its own."""
    engines = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Case(kind).build()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        engines.append(gs.manage(model, optimizer, device="cpu", precision="bf16-true"))
    first, second = engines
    first.save(tmp_path / "saved", frozen=False)
    told = (tmp_path / "saved" / "manifest.json").read_text()
    assert "lora_" in told and not re.search(r"SCB|absmax|quant_map", told)
    own = {name: v.clone() for name, v in second.model.state_dict().items() if "lora_" not in name}
    assert any(not name.endswith("weight") for name in own)
    second.load(tmp_path / "saved")
    state = second.model.state_dict()
    for name, value in own.items():
        assert_same_bits(state[name].clone(), value, name)
    want = first.model.state_dict()
    for name in want.keys() - own.keys():
        assert_same_bits(state[name].clone(), want[name].clone(), name)
    for engine in engines:
        engine.close()
