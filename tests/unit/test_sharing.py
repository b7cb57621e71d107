"""Memory that a parameter shares with something else: refused at manage() by name, and nothing else is."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import gemini_strategy as gs


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


def _manage(model: nn.Module, **how: Any) -> gs.Engine:
    return gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", **how)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()


# ---- ties ----


def _data(m: Pair) -> None:
    m.b.weight.data = m.a.weight.data


def _transposed(m: Pair) -> None:
    m.b.weight = nn.Parameter(m.a.weight.detach().t())


def _part(m: Pair) -> None:
    m.b.bias = nn.Parameter(m.a.weight.detach()[3])


def _buffer(m: Pair) -> None:
    m.b.register_buffer("shown", m.a.weight.data)


def _buffer_view(m: Pair) -> None:
    m.b.register_buffer("shown", m.a.weight.data[2:, ::3])


def _overlapping(m: Pair) -> None:
    whole = torch.randn(50)
    m.a.weight.data, m.b.weight.data = whole[:36].view(6, 6), whole[14:].view(6, 6)


def _other_storage(m: Pair) -> None:
    m.b.weight.data = torch.from_numpy(m.a.weight.detach().numpy())


@pytest.mark.parametrize(
    ("tie", "names"),
    [
        (_data, ("a.weight", "b.weight", "same Parameter object", "clone()")),
        (_transposed, ("a.weight", "b.weight", "same Parameter object", "clone()")),
        (_part, ("a.weight", "b.bias", "same Parameter object", "clone()")),
        (_overlapping, ("a.weight", "b.weight", "clone()")),
        (_other_storage, ("a.weight", "b.weight", "clone()")),
        (_buffer, ("buffer b.shown", "parameter a.weight", "clone")),
        (_buffer_view, ("buffer b.shown", "parameter a.weight", "clone")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ties_by_storage_are_refused_by_both_names(tie: Callable, names: tuple[str, ...]) -> None:
    model = Pair()
    tie(model)
    with pytest.raises(gs.GeminiError) as error:
        _manage(model)
    assert all(name in str(error.value) for name in names), str(error.value)
    assert gs.engine_of(model) is None and type(model.a.weight) is nn.Parameter


def test_ways_out_of_a_tie() -> None:
    model = Pair()
    _data(model)
    model.b.weight.data = model.b.weight.data.clone()
    _manage(model).close()
    model.b.weight = model.a.weight
    _manage(model).close()


# ---- tensors elsewhere ----


class Keeping(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.kept = self.a.weight.data.t()


def _graph(m: Pair) -> Any:
    return m(torch.randn(2, 6, requires_grad=True))


KEPT: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "data": (lambda m: m.a.weight.data, r"a\.weight: a tensor of shape \(6, 6\)"),
    "detach": (lambda m: [m.a.weight.detach()], r"a\.weight: a tensor of shape \(6, 6\)"),
    "view": (lambda m: m.b.bias.data[2:4], r"b\.bias: a tensor of shape \(2,\)"),
    "with gradient": (lambda m: m.b.weight.t(), r"b\.weight: a tensor of shape \(6, 6\)"),
    "numpy": (lambda m: m.b.weight.detach().numpy(), r"b\.weight: "),
    "storage": (lambda m: m.b.weight.untyped_storage(), r"b\.weight: a storage"),
    "graph": (_graph, r"a\.weight: .*graph of a forward"),
    "state dict": (lambda m: m.state_dict(), r"a\.weight: a tensor"),
    "parameter": (lambda m: nn.Parameter(m.a.weight.data), r"a\.weight: a tensor"),
}


@pytest.mark.parametrize(("keep", "text"), KEPT.values(), ids=KEPT)
def test_what_shows_a_parameters_memory_is_refused(keep: Callable, text: str) -> None:
    model = Pair()
    kept = keep(model)
    with pytest.raises(gs.GeminiError, match=text) as error:
        _manage(model)
    assert "del" in str(error.value) and ".data.clone()" in str(error.value)
    assert gs.engine_of(model) is None and type(model.a.weight) is nn.Parameter
    del kept
    _manage(model).close()


@pytest.mark.parametrize("keep", [KEPT[what][0] for what in ("data", "graph", "parameter")])
def test_a_clone_cuts_the_tie(keep: Callable) -> None:
    model = Pair()
    kept = keep(model)
    for p in model.parameters():
        p.data = p.data.clone()
    _manage(model).close()
    del kept


def test_an_attribute_of_a_module_is_named() -> None:
    with pytest.raises(gs.GeminiError, match=r"a\.weight: kept shows its memory"):
        _manage(Keeping())


# ---- no false alarms ----


def _built(tmp: Path) -> nn.Module:
    return Pair()


def _trained(tmp: Path) -> nn.Module:
    model = Pair()
    _train(model)
    return model


def _half_trained(tmp: Path) -> nn.Module:
    """With gradients, an output whose graph has been used, and an optimizer with states."""
    model = Pair()
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    _train(model, optimizer)
    loss = model(torch.randn(3, 6)).sum()
    loss.backward()
    model.others = [optimizer, loss]
    return model


def _loaded(tmp: Path) -> nn.Module:
    torch.save(Pair(), tmp / "model.pt")
    return torch.load(tmp / "model.pt", weights_only=False)


def _assigned(tmp: Path) -> nn.Module:
    torch.save(Pair().state_dict(), tmp / "state.pt")
    model = Pair()
    model.load_state_dict(torch.load(tmp / "state.pt", mmap=True), assign=True)
    return model


def _safetensors(tmp: Path) -> nn.Module:
    save_file(Pair().state_dict(), str(tmp / "state.safetensors"))
    model = Pair()
    model.load_state_dict(load_file(tmp / "state.safetensors"), assign=True)
    return model


def _state_kept(tmp: Path) -> nn.Module:
    model, state = Pair(), Pair().state_dict()
    model.load_state_dict(state)
    model.others = [state]
    return model


def _vector(tmp: Path) -> nn.Module:
    model = Pair()
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return model


def _bystander(tmp: Path) -> nn.Module:
    """A slice of the parameters' storage that no parameter shows."""
    model = Pair()
    whole = torch.randn(100)
    model.a.weight.data, model.b.weight.data = whole[:36].view(6, 6), whole[36:72].view(6, 6)
    model.others = [whole[72:].data]
    return model


def _copied(tmp: Path) -> nn.Module:
    model = Pair()
    model.others = [copy.deepcopy(model)]
    return copy.deepcopy(model)


def _averaged(tmp: Path) -> nn.Module:
    model = Pair()
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    model.others = [average]
    return model


def _pickled(tmp: Path) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(Pair(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def _managed_before(tmp: Path) -> nn.Module:
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, device="cpu", placement_policy="cpu")
    _train(model, optimizer)
    model.others = [engine.state_dict(), model.state_dict(), optimizer]
    engine.close()
    return model


def _refused_before(tmp: Path) -> nn.Module:
    model = Pair()
    with pytest.raises(gs.GeminiError) as error:
        _manage(model, device_budget=1024)
    model.others = [error]
    return model


def _in_a_cycle(tmp: Path) -> nn.Module:
    model = Pair()
    cycle: list[Any] = [model.a.weight.data]
    cycle.append(cycle)
    return model


def _cast(tmp: Path) -> nn.Module:
    return gs.cast_model_(Pair().double().float(), "bf16-true")


def _shared(tmp: Path) -> nn.Module:
    return Pair().share_memory()


def _used(tmp: Path) -> nn.Module:
    model = Pair()
    with torch.no_grad():
        out = model(torch.randn(2, 6))
    edge = torch.autograd.graph.get_gradient_edge(model.a.weight)
    model.others = [out, edge, list(model.parameters()), repr(model), str(model.a.weight)]
    torch.func.functional_call(model, dict(model.named_parameters()), torch.randn(2, 6))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return model


def _parametrized(tmp: Path) -> nn.Module:
    model = Pair()
    nn.utils.parametrizations.weight_norm(model.a)
    _train(model)
    return model


def _compiled(tmp: Path) -> nn.Module:
    model = Pair()
    model.a.compile(backend="aot_eager")
    _train(model)
    return model


def _empty(tmp: Path) -> nn.Module:
    model = Pair()
    model.none = nn.Parameter(torch.empty(0, 3))
    model.others = [model.none.data]
    return model


FINE = [
    value
    for name, value in list(globals().items())
    if getattr(value, "__annotations__", {}).get("tmp")
]


@pytest.mark.parametrize("make", FINE, ids=lambda make: make.__name__)
def test_no_false_alarm(make: Callable[[Path], nn.Module], tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # nothing is left to chance
    try:
        model = make(tmp_path)
        engine = _manage(model)
        engine.close()
        _manage(model).close()
    finally:
        gc.enable()


MODULES = [
    nn.LSTM(4, 4),
    nn.MultiheadAttention(4, 2),
    nn.TransformerEncoderLayer(4, 2, 8),
    nn.EmbeddingBag(5, 4),
]


@pytest.mark.parametrize("model", MODULES, ids=lambda model: type(model).__name__)
def test_no_false_alarm_for_torchs_modules(model: nn.Module) -> None:
    _manage(model).close()


@pytest.mark.parametrize("how", [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}], ids=str)
def test_no_false_alarm_for_from_pretrained(how: dict[str, Any], tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, **how)
    _manage(model).close()


class _Keeps(nn.Module):
    """Has a tensor on its weight from inside, where the bytes are the engine's own."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.weight, self.kept, self.assigns = nn.Parameter(torch.randn(8, 8)), [], assigns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept[:] = [self.weight.detach()]
        if self.assigns:
            with torch.no_grad():
                self.weight.data = self.weight.data * 0.5
        return x @ self.weight.t()


@pytest.mark.parametrize("assigns", [False, True], ids=["outside", "inside"])
def test_assigned_data_do_not_show_in_a_tensor_from_inside_the_module(assigns: bool) -> None:
    """In torch such a tensor keeps the old memory; here it has the engine's, and the assignment is refused by name."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), _Keeps(assigns))
    want = model[1].weight.detach().clone()
    engine = gs.manage(model, torch.optim.AdamW(model.parameters()), device_budget="64KB")
    refused = pytest.raises(
        gs.GeminiError, match=r"1\.weight: a tensor that was taken inside its module"
    )
    with refused if assigns else contextlib.nullcontext():
        model(torch.ones(2, 8))
    with refused, torch.no_grad():
        model[1].weight.data = torch.zeros(8, 8)
    assert torch.equal(model[1].kept[0], want)
    assert torch.equal(model[1].weight, want)
    model[1].kept.clear()
    model[1].assigns = False
    with torch.no_grad():
        model[1].weight.data = torch.ones(8, 8)
    assert torch.equal(model(torch.ones(2, 8)), model[0](torch.ones(2, 8)) @ torch.ones(8, 8))
    engine.close()
