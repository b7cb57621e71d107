"""A model that came in fp32 leaves in fp32, by every door, whatever it was computed with: its masters, to the bit.

What left is compared with the run without Gemini (`cast_model_`, `HybridAdam`), and holds nothing of this package.
"""

from __future__ import annotations

import copy
import io
import json
import pickle
import pickletools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gemini_strategy as gs
from helpers.pairs import turns
from helpers.ranks import fork_context
from helpers.reference import Recipe, assert_same_bits, drive, managed, plain

PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")
TIGHT: dict[str, Any] = {"chunk_size": 4096, "placement_policy": "cpu"}


class Net(nn.Module):
    """A tied weight, a norm that mixed precision keeps in fp32, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.norm = nn.LayerNorm(16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((), 1.5))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.middle(torch.tanh(self.frozen(self.embedding(tokens)))))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens)) * self.scale


class _Case:
    build = Net

    @staticmethod
    def batch(step: int) -> torch.Tensor:
        return torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(step))

    @staticmethod
    def loss(run: Any, batch: torch.Tensor) -> torch.Tensor:
        logits = run(batch).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch.flatten())


def trained(build: Any = Net, precision: str = "bf16-mixed", **options: Any) -> Any:
    """Three steps of AdamW; what 16-bit weights lack is something then."""
    torch.manual_seed(3)
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    given = {"device": "cpu", "precision": precision, "initial_scale": 2.0**8, **TIGHT, **options}
    engine = gs.manage(model, optimizer, **given)
    for step in range(3):
        engine.backward(_Case.loss(model, _Case.batch(step)))
        optimizer.step()
        optimizer.zero_grad()
    return engine


def same(state: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(state) == list(want)
    for name, value in want.items():
        assert_same_bits(state[name].detach().clone(), value, name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_close_gives_the_masters_of_the_run_without_gemini(precision: str) -> None:
    recipe = Recipe(precision, groups=lambda m: [p for p in m.parameters() if p.requires_grad])
    reference, run = plain(Net, recipe), managed(Net, recipe, **TIGHT)
    for each in (reference, run):
        drive(each, _Case, 3)
    masters = reference.outcome().masters
    came = run.engine.model_state_dict()["frozen.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.engine.close()
    for name, parameter in run.model.named_parameters():
        assert parameter.dtype is torch.float32, name
        if parameter.requires_grad:
            assert_same_bits(parameter.detach(), masters[name], name)
            assert run.optimizer.state[parameter]["exp_avg"].dtype is torch.float32
    assert_same_bits(run.model.frozen.weight.detach(), came)
    torch.manual_seed(recipe.seed)
    assert_same_bits(came, Net().frozen.weight.detach())


@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_closed_and_managed_again_is_no_interruption(precision: str) -> None:
    """With no argument for close(), and torch's own AdamW."""
    engines = [trained(precision=precision) for _ in range(2)]
    model, optimizer, scaler = engines[0].model, engines[0].optimizer, engines[0].scaler
    engines[0].close()
    given = {"device": "cpu", "precision": precision, "initial_scale": 2.0**8, **TIGHT}
    engines[0] = gs.manage(model, optimizer, **given)
    if scaler is not None:
        engines[0].scaler.load_state_dict(scaler.state_dict())
    for engine in engines:
        for step in range(3, 6):
            engine.backward(_Case.loss(engine.model, _Case.batch(step)))
            engine.step()
            engine.zero_grad()
    same(engines[0].model_state_dict(), engines[1].model_state_dict())


def test_a_model_that_came_in_16_bits_leaves_so_and_says_it_once() -> None:
    engine = trained(lambda: Net().bfloat16(), "bf16-true")
    with pytest.warns(RuntimeWarning, match=r"close\(dtype=torch.float32\)") as told:
        engine.close()
    assert len(told) == 1
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
    for dtype, build in ((torch.float32, trained), (None, untrained)):  # nothing is lost
        engine = build(lambda: Net().bfloat16(), "bf16-true")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.close(dtype)


def untrained(build: Any, precision: str) -> gs.Engine:
    return gs.manage(build(), None, device="cpu", precision=precision)


def test_no_room_is_said_before_anything_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained()
    want = engine.model_state_dict()
    n = sum(p.numel() for p in engine.model.parameters())
    n_trained = sum(p.numel() for p in engine.model.parameters() if p.requires_grad)
    total = 4 * n + 8 * n_trained
    monkeypatch.setattr("gemini_strategy._C.host_topology", lambda: {"memory": total - 1})
    with pytest.raises(gs.GeminiMemoryError, match=r"HOST: close\(\) .*engine\.save\(folder\)"):
        engine.close()
    assert not engine.closed
    engine.backward(_Case.loss(engine.model, _Case.batch(0)))
    engine.zero_grad()
    same(engine.model_state_dict(), want)
    engine.close(with_states=False)
    same(dict(engine.model.state_dict()), want)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_state_dict_is_the_plain_models(precision: str) -> None:
    """And its entries follow the weights, and the weights follow them."""
    engine = trained(precision=precision)
    state, want = engine.model.state_dict(), engine.model_state_dict()
    same(state, want)
    assert {v.dtype for v in state.values()} == {torch.float32}
    assert state["head.weight"] is state["embedding.weight"]
    engine.backward(_Case.loss(engine.model, _Case.batch(7)))
    engine.step()
    assert_same_bits(state["middle.bias"].clone(), engine.model_state_dict()["middle.bias"])
    with torch.no_grad():
        state["middle.bias"].fill_(0.1)
    assert_same_bits(engine.model_state_dict()["middle.bias"], torch.full((16,), 0.1))
    engine.model.load_state_dict(want)
    same(engine.model_state_dict(), want)
    engine.close()
    assert_same_bits(state["middle.bias"].clone(), want["middle.bias"])


# ---- copies and pickles ------------------------------------------------------------------------------


def _names(data: bytes) -> set[str]:
    """Of this package, in a pickle."""
    texts = (x for _, x, _ in pickletools.genops(data) if isinstance(x, str))
    return {text for text in texts if "gemini" in text.lower() or text.startswith("_gm")}


def _keys(model: nn.Module) -> dict[str, set[str]]:
    tables = {}
    for name, module in model.named_modules():
        tables[name] = set(vars(module))
        tables |= {f"{name}.{k}": set(v) for k, v in vars(module).items() if isinstance(v, dict)}
    return tables


@turns(how=["pickle", "deepcopy", "torch.save"], precision=PRECISIONS)
def test_a_copy_is_a_plain_models(how: str, precision: str) -> None:
    engine = trained(precision=precision)
    want = engine.model_state_dict()
    if how == "pickle":
        data = pickle.dumps(engine.model)
        assert not _names(data)
        again = pickle.loads(data)
    elif how == "deepcopy":
        again = copy.deepcopy(engine.model)
    else:
        file = io.BytesIO()
        torch.save(engine.model, file)
        file.seek(0)
        kinds = [Net, nn.Linear, nn.Embedding, nn.LayerNorm, set]
        with torch.serialization.safe_globals(kinds):
            again = torch.load(file, weights_only=True)
    same(dict(again.state_dict()), want)
    assert _keys(again) == _keys(Net())
    assert again.head.weight is again.embedding.weight and type(again.head.weight) is nn.Parameter
    plain_one = Net()
    plain_one.load_state_dict(want)
    batch = _Case.batch(1)
    assert_same_bits(again(batch).detach(), plain_one(batch).detach())


def test_a_copy_of_what_came_in_bf16_is_bf16() -> None:
    engine = trained(lambda: Net().bfloat16(), "bf16-true")
    for again in (copy.deepcopy(engine.model), pickle.loads(pickle.dumps(engine.model))):
        same(dict(again.state_dict()), engine.model_state_dict(masters=False))


def test_a_file_is_read_where_there_is_no_gemini(tmp_path: Path) -> None:
    engine = trained(lambda: nn.Sequential(*Net().children()), "bf16-mixed")
    torch.save({"model": engine.model, "optimizer": engine.optimizer}, tmp_path / "all.pt")
    torch.save(engine.model_state_dict(), tmp_path / "want.pt")
    program = f"""
import sys, torch
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "gemini_strategy":
            raise ImportError(name)
sys.meta_path.insert(0, Nothing())
both = torch.load({str(tmp_path / "all.pt")!r}, weights_only=False)
want = torch.load({str(tmp_path / "want.pt")!r})
state = both["model"].state_dict()
assert state.keys() == want.keys() and all(torch.equal(state[k], want[k]) for k in want)
optimizer = both["optimizer"]
assert type(optimizer) is torch.optim.AdamW
assert all(set(s) == {{"step", "exp_avg", "exp_avg_sq"}} for s in optimizer.state.values())
assert {{p for g in optimizer.param_groups for p in g["params"]}} <= set(both["model"].parameters())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def _check_started(model: nn.Module, want: dict[str, torch.Tensor]) -> None:
    same(dict(model.state_dict()), want)
    assert _keys(model) == _keys(Net())


def test_a_process_that_is_started_gets_a_plain_model() -> None:
    engine = trained()
    arguments = (engine.model, engine.model_state_dict())
    process = fork_context().Process(target=_check_started, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_a_shallow_copy_shares_what_is_there() -> None:
    engine = trained()
    again = copy.copy(engine.model)
    assert again.middle is engine.model.middle
    assert again(_Case.batch(1)).isfinite().all()


# ---- files of other libraries ---------------------------------------------------------------------------


class _Saving(nn.Module):
    """Writes files as diffusers' ModelMixin does: by its own state_dict, with no configuration of a dtype."""

    def save_pretrained(self, folder: Path, state_dict: Any = None) -> None:
        folder.mkdir()
        torch.save(self.state_dict() if state_dict is None else state_dict, folder / "weights.pt")
        dtype = next(p.dtype for p in self.parameters() if p.is_floating_point())
        (folder / "config.json").write_text(json.dumps({"dtype": str(dtype)}))


class _SavingNet(_Saving, Net):
    pass


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
@pytest.mark.parametrize("came", ["fp32", "bf16"])
def test_files_and_their_configuration_agree(came: str, given: bool, tmp_path: Path) -> None:
    engine = trained(_SavingNet if came == "fp32" else lambda: _SavingNet().bfloat16(), "bf16-true")
    want = engine.model_state_dict(masters=came == "fp32" or given)
    before = {name: p.dtype for name, p in engine.model.named_parameters()}
    engine.model.save_pretrained(tmp_path / "it", **({"state_dict": want} if given else {}))
    saved = torch.load(tmp_path / "it" / "weights.pt", weights_only=True)
    same(saved, want)
    said = json.loads((tmp_path / "it" / "config.json").read_text())["dtype"]
    assert said == str(saved["middle.weight"].dtype)
    assert {name: p.dtype for name, p in engine.model.named_parameters()} == before


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
def test_transformers_own_save_pretrained_rounds_nothing(given: bool, tmp_path: Path) -> None:
    def llama() -> nn.Module:
        sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24}
        heads = {"num_hidden_layers": 1, "num_attention_heads": 2}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))

    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = gs.manage(model, optimizer, device="cpu", precision="bf16-mixed")
    tokens = _Case.batch(0)
    engine.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    want = engine.model_state_dict()
    model.save_pretrained(tmp_path, **({"state_dict": dict(want)} if given else {}))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"
    same(dict(transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()), want)
    engine.close()
