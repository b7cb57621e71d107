"""Models built on the meta device: their values come from files or from their modules, straight into the chunks.

What a file gives has the bits of `load_state_dict` into an ordinary model that is managed then; what the modules
give has the bits of building them one after the other. Whatever is refused leaves the model as it was.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.optim import managed
from gemini_strategy.precision import FORMATS
from gemini_strategy.weights import files as weight_files
from helpers.pairs import turns
from helpers.reference import Managed, Recipe, assert_same_bits, assert_same_outcome, drive
from helpers.scripts import run_to_the_end
from helpers.zoo import CASES, Case, Mlp, mlp_case

CASE = mlp_case(width=32, depth=3)
BY_NAME = {case.name: case for case in CASES}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of these models comes in several pieces, and files are opened again between them."""
    monkeypatch.setattr(weight_files, "_PIECE", 500)
    monkeypatch.setattr(weight_files, "_MAPPED", 5000)


def _blank(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _built(build: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def _save(model: nn.Module, path: Path, dtype: torch.dtype | None = None) -> Path:
    """A file with each tensor once, as safetensors wants it."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        is_float = dtype is not None and tensor.is_floating_point()
        state[name] = tensor.to(dtype).clone() if is_float else tensor.clone()
    save_file(state, path, metadata={"format": "pt"})
    return path


def _manage(model: nn.Module, **how: Any) -> gs.Engine:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = gs.HybridAdam(trained, lr=1e-2) if how.pop("trains", True) else None
    return gs.manage(model, optimizer, device="cpu", **how)


def _assert_same_state(got: gs.Engine, want: gs.Engine) -> None:
    for masters in (True, False):
        a, b = got.model_state_dict(masters), want.model_state_dict(masters)
        assert list(a) == list(b)
        for name in b:
            assert_same_bits(a[name], b[name], name)
    ours, theirs = dict(got.model.named_buffers()), dict(want.model.named_buffers())
    assert list(ours) == list(theirs)
    for name in theirs:
        assert_same_bits(ours[name], theirs[name], name)


def _assert_same_training(got: gs.Engine, want: gs.Engine, case: Case, precision: str) -> None:
    recipe = Recipe(precision=precision, steps=2, clip=1.0)
    runs = [Managed(got, recipe), Managed(want, recipe)]
    for run in runs:
        drive(run, case, 2)
    assert_same_outcome(runs[0].outcome(), runs[1].outcome())


class _Snapshot:
    """A model before something is refused, and the check that it still is so."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = self._tensors()
        self.numbers = torch.get_rng_state()

    def _tensors(self) -> dict[str, tuple[Any, ...]]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {
            n: (id(t), type(t), t.device.type, t.dtype, t.shape, t.requires_grad) for n, t in named
        }

    def check(self) -> None:
        assert gs.engine_of(self.model) is None
        assert self._tensors() == self.tensors
        assert torch.equal(torch.get_rng_state(), self.numbers)
        for module in self.model.modules():
            assert not module._forward_hooks and not module._forward_pre_hooks


# ---- values from a file ------------------------------------------------------------------------------


# More dtypes with each other: test_the_models_dtype_rounds_as_load_state_dict_does.
@turns(precision=["32-true", "bf16-true", "bf16-mixed", "16-mixed", None], dtype=DTYPES)
def test_bits_of_load_state_dict(precision: str | None, dtype: torch.dtype, tmp_path: Path) -> None:
    path = _save(_built(CASE.build), tmp_path / "some.safetensors", dtype)
    model = _blank(CASE.build)
    names = {id(p): n for n, p in model.named_parameters()}
    numbers = torch.get_rng_state()
    engine = _manage(model, weights=path, precision=precision, chunk_size=8192)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert {id(p): n for n, p in model.named_parameters()} == names
    ordinary = CASE.build()
    from safetensors.torch import load_file

    ordinary.load_state_dict(load_file(path))
    other = _manage(ordinary, precision=precision, chunk_size=8192)
    _assert_same_state(engine, other)
    _assert_same_training(engine, other, CASE, precision or "32-true")
    weights_then = engine.model_state_dict()
    engine.close()
    for name, p in model.named_parameters():
        assert type(p) is nn.Parameter and id(p) in names and p.device.type == "cpu"
        assert_same_bits(p.detach(), weights_then[name], name)
    other.close()


@pytest.mark.parametrize("policy", ["auto", "cpu", "cuda"])
def test_bits_under_every_policy(policy: str, tmp_path: Path) -> None:
    path = _save(_built(CASE.build), tmp_path / "some.safetensors")
    how = {
        "precision": "bf16-true",
        "placement_policy": policy,
        "chunk_size": 4096,
    }
    engine = _manage(_blank(CASE.build), weights=str(path), **how)
    other = _manage(_built(CASE.build), **how)
    _assert_same_state(engine, other)
    _assert_same_training(engine, other, CASE, "bf16-true")


@pytest.mark.parametrize("own", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_models_dtype_rounds_as_load_state_dict_does(
    own: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = _save(_built(CASE.build), tmp_path / "some.safetensors", dtype)
    for precision in (None, "bf16-true"):
        engine = _manage(_blank(CASE.build).to(own), weights=path, precision=precision)
        from safetensors.torch import load_file

        ordinary = CASE.build().to(own)
        ordinary.load_state_dict(load_file(path))
        _assert_same_state(engine, _manage(ordinary, precision=precision))


class _Odd(nn.Module):
    """Parameters of every shape and kind that is carried along."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.3))
        self.empty = nn.Parameter(torch.ones(3, 0))
        self.line = nn.Parameter(torch.randn(1, 1777))
        self.cube = nn.Parameter(torch.randn(7, 5, 31))
        self.codes = nn.Parameter(torch.arange(-60, 60, dtype=torch.int8).reshape(8, 15), False)
        self.frozen = nn.Parameter(torch.randn(40, 17), requires_grad=False)
        self.register_buffer("count", torch.tensor(5))
        self.register_buffer("table", torch.randn(30, 40))


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_shapes_and_kinds(precision: str, tmp_path: Path) -> None:
    path = _save(_built(_Odd), tmp_path / "odd.safetensors")
    engine = _manage(_blank(_Odd), weights=path, precision=precision, chunk_size=4096)
    _assert_same_state(engine, _manage(_built(_Odd), precision=precision, chunk_size=4096))


def test_pieces_are_what_was_asked_for(tmp_path: Path) -> None:
    """Any range of any tensor: what a process that owns a part of a chunk will read."""
    model = _built(_Odd)
    files = weight_files.WeightFiles(_save(model, tmp_path / "odd.safetensors"))
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.state_dict().items():
        flat = tensor.reshape(-1)
        cuts = torch.randint(0, flat.numel() + 1, (20, 2), generator=generator).sort(dim=1).values
        for begin, end in [(0, flat.numel()), *cuts.tolist()]:
            at = begin
            for first, piece in files.pieces(name, begin, end):
                assert first == at and piece.numel() <= max(
                    500, tensor[:1].numel() if tensor.ndim else 1
                )
                assert_same_bits(piece, flat[first : first + piece.numel()], name)
                at += piece.numel()
            assert at == end
    files.close()


@pytest.mark.parametrize(
    "name", ["tied_weights", "tied_three_ways", "shared_module_under_two_names"]
)
def test_tied_weights_have_one_name_in_the_file(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    path = _save(_built(case.build), tmp_path / "tied.safetensors")
    engine = _manage(_blank(case.build), weights=path, precision="32-true")
    other = _manage(_built(case.build), precision="32-true")
    _assert_same_state(engine, other)
    _assert_same_training(engine, other, case, "32-true")


def test_of_two_names_the_last_counts(tmp_path: Path) -> None:
    case = BY_NAME["tied_weights"]
    state = {
        n: torch.full_like(t, i) for i, (n, t) in enumerate(_built(case.build).state_dict().items())
    }
    save_file(state, tmp_path / "both.safetensors")
    engine = _manage(_blank(case.build), weights=tmp_path / "both.safetensors")
    ordinary = case.build()
    ordinary.load_state_dict(state)
    _assert_same_state(engine, _manage(ordinary))


def test_buffers_of_a_batch_norm(tmp_path: Path) -> None:
    case = BY_NAME["batch_norm"]
    trained = _built(case.build)
    for step in range(2):
        trained(case.batch(step)[0])
    path = _save(trained, tmp_path / "norm.safetensors")
    engine = _manage(_blank(case.build), weights=path, precision="32-true")
    other = _manage(trained, precision="32-true")
    _assert_same_state(engine, other)
    _assert_same_training(engine, other, case, "32-true")


def test_a_model_with_values_takes_the_files(tmp_path: Path) -> None:
    path = _save(_built(Mlp, seed=3), tmp_path / "some.safetensors")
    model = _built(Mlp, seed=4)
    model.extra = nn.Linear(3, 3)  # not in the file: keeps what it has
    extra = model.extra.weight.detach().clone()
    engine = _manage(model, weights=path)
    want = _built(Mlp, seed=3).state_dict()
    got = engine.model_state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert torch.equal(got["extra.weight"], extra)


def test_files_of_submodules(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"left": Mlp(), "right": nn.Linear(4, 4)})

    want = _built(build)
    _save(want["left"], tmp_path / "left.safetensors")
    _save(want["right"], tmp_path / "right.safetensors")
    paths = {"left": tmp_path / "left.safetensors", "right": str(tmp_path / "right.safetensors")}
    _assert_same_state(_manage(_blank(build), weights=paths), _manage(want))


def test_compiled_modules_keep_their_names(tmp_path: Path) -> None:
    def compiled() -> nn.Module:
        model = Mlp()
        model.blocks[0] = torch.compile(model.blocks[0])
        return model

    want = _built(Mlp).state_dict()
    for build in (Mlp, compiled):
        path = _save(_built(build), tmp_path / "compiled.safetensors")
        got = _manage(_blank(compiled), weights=path).model_state_dict()
        assert [n.replace("_orig_mod.", "") for n in got] == list(want)
        assert all(torch.equal(got[n], want[n.replace("_orig_mod.", "")]) for n in got)


def test_hooks_on_parameters_stay(tmp_path: Path) -> None:
    model = _blank(Mlp)
    calls: list[str] = []
    model.head.weight.register_hook(lambda grad: calls.append("grad"))
    model.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    engine = _manage(model, weights=_save(_built(Mlp), tmp_path / "some.safetensors"))
    model(torch.ones(2, 32)).sum().backward()
    assert calls == ["grad", "accumulated"]
    assert model.head.weight.grad is not None
    engine.close()


def test_inside_a_device_context(tmp_path: Path) -> None:
    path = _save(_built(Mlp), tmp_path / "some.safetensors")
    with torch.device("meta"):
        model = Mlp()
        engine = _manage(model, weights=path)
    _assert_same_state(engine, _manage(_built(Mlp)))


# ---- Hugging Face ------------------------------------------------------------------------------------


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        **more,
    )
    return LlamaForCausalLM(config)


def _opt() -> Any:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4
    )
    config.word_embed_proj_dim = 32
    return OPTForCausalLM(config)


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


FAMILIES = {
    "llama": _llama,
    "llama tied": lambda: _llama(tie_word_embeddings=True),
    "llama yarn": lambda: _llama(
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        max_position_embeddings=64,
    ),
    "opt": _opt,
    "gpt2": _gpt2,
}


def _tokens(step: int) -> Tensor:
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(step))


@turns(family=FAMILIES, precision=["32-true", "bf16-true", "16-mixed"], shards=["50KB", "5GB"])
def test_transformers_folder(family: str, precision: str, shards: str, tmp_path: Path) -> None:
    build = FAMILIES[family]
    want = _built(build)
    want.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "50KB")
    model = _blank(build)
    assert any(b.is_meta for b in model.buffers()) == family.startswith("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = _manage(model, weights=tmp_path, precision=precision, chunk_size=8192)
    other = _manage(want, precision=precision, chunk_size=8192)
    _assert_same_state(engine, other)
    for step in range(2):
        losses = []
        for run in (engine, other):
            torch.manual_seed(step)
            loss = run.model(input_ids=_tokens(step), labels=_tokens(step)).loss
            run.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
            losses.append(loss.detach())
        assert_same_bits(losses[0], losses[1])
    _assert_same_state(engine, other)


def test_from_config_on_meta_and_index_by_name(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    want = _built(_llama)
    want.save_pretrained(tmp_path, max_shard_size="50KB")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(tmp_path), dtype="bfloat16"
        )
    engine = _manage(model, weights=tmp_path / "model.safetensors.index.json")
    _assert_same_state(
        engine, _manage(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="bfloat16").train())
    )


def test_base_model_and_head(tmp_path: Path) -> None:
    want = _built(lambda: _llama(tie_word_embeddings=True))
    want.model.save_pretrained(tmp_path / "base")
    want.save_pretrained(tmp_path / "head")
    engine = _manage(_blank(lambda: _llama(tie_word_embeddings=True)), weights=tmp_path / "base")
    expected = {n: t.clone() for n, t in want.state_dict().items()}
    got = engine.model_state_dict()
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    got = _manage(_blank(lambda: _llama().model), weights=tmp_path / "head").model_state_dict()
    assert got and all(torch.equal(got[n], expected[f"model.{n}"]) for n in got)


def test_a_module_around_a_transformer(tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _llama()

    want = _built(Around)
    want.net.save_pretrained(tmp_path)
    _assert_same_state(_manage(_blank(Around), weights=tmp_path), _manage(want))


def test_a_tie_that_was_lost_is_refused(tmp_path: Path) -> None:
    """accelerate's init_empty_weights replaces each parameter as it is registered, tied ones too."""
    want = _built(lambda: _llama(tie_word_embeddings=True))
    want.save_pretrained(tmp_path)
    model = _blank(lambda: _llama(tie_word_embeddings=True))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    before = _Snapshot(model)
    with pytest.raises(gs.GeminiError, match=r"lm_head.weight.*tie_weights\(\)"):
        _manage(model, weights=tmp_path)
    before.check()
    model.tie_weights()
    _assert_same_state(_manage(model, weights=tmp_path), _manage(want))


def test_a_file_of_another_head_warns(tmp_path: Path) -> None:
    _built(_llama).save_pretrained(tmp_path)
    with pytest.warns(
        UserWarning, match=r"1 tensors that LlamaModel has no place for.*lm_head.weight"
    ):
        _manage(_blank(lambda: _llama().model), weights=tmp_path)


def test_names_of_older_files(tmp_path: Path) -> None:
    """transformers renames the parts of a ViT while it loads, and writes them back as they were."""
    from safetensors import safe_open
    from transformers import ViTConfig, ViTForImageClassification

    def build() -> nn.Module:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "image_size": 16, "patch_size": 4}
        return ViTForImageClassification(
            ViTConfig(num_hidden_layers=2, num_attention_heads=4, **sizes)
        )

    want = _built(build)
    want.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) != set(want.state_dict())
    _assert_same_state(_manage(_blank(build), weights=tmp_path), _manage(want))


@pytest.mark.parametrize("missing", ["refuse", "init"])
def test_what_transformers_would_compute_is_refused(missing: str, tmp_path: Path) -> None:
    """The experts of a Mixtral are several tensors in a file, and one in the model."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def build() -> nn.Module:
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
        return MixtralForCausalLM(MixtralConfig(num_hidden_layers=2, **sizes, **heads))

    _built(build).save_pretrained(tmp_path)
    model = _blank(build)
    before = _Snapshot(model)
    with pytest.raises(
        gs.GeminiError, match=r"experts.*another form than Mixtral.*from_pretrained"
    ):
        _manage(model, weights=tmp_path, missing=missing)
    before.check()


def test_parameters_alone_on_meta(tmp_path: Path) -> None:
    """accelerate's init_empty_weights leaves buffers where they are."""
    want = _built(_llama)
    want.save_pretrained(tmp_path)
    model = _built(_llama)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:
                module._parameters[key] = nn.Parameter(p.detach().to("meta"))
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    assert buffers and not any(b.is_meta for b in buffers.values())
    _assert_same_state(_manage(model, weights=tmp_path), _manage(want))
    for name, buffer in model.named_buffers():
        assert_same_bits(buffer, buffers[name], name)


# ---- initial values ----------------------------------------------------------------------------------

# Their constructors build every module once, in the order of registration.
IN_ORDER = [
    "mlp",
    "norm_on_the_input",
    "tied_weights",
    "tied_three_ways",
    "shared_module_under_two_names",
    "frozen_parameters",
    "lora",
    "batch_norm",
    "multihead_attention",
    "lstm",
    "embedding_max_norm",
    "bilinear_and_prelu",
]


@turns(name=IN_ORDER, precision=["32-true", "bf16-true"])
def test_initial_values_are_those_of_building(name: str, precision: str) -> None:
    case = BY_NAME[name]
    want = _built(case.build, seed=8)
    numbers = torch.get_rng_state()
    model = _blank(case.build)
    torch.manual_seed(8)
    engine = _manage(model, precision=precision, chunk_size=4096)
    assert torch.equal(torch.get_rng_state(), numbers)
    other = _manage(want, precision=precision, chunk_size=4096)
    _assert_same_state(engine, other)
    _assert_same_training(engine, other, case, precision)


@pytest.mark.parametrize("family", ["llama", "llama yarn", "llama tied", "opt", "gpt2"])
def test_initial_values_of_transformers(family: str) -> None:
    """`_init_weights`, children first: what `initialize_weights()` gives a model that is built."""
    build = FAMILIES[family]
    want = build()
    ties = want.get_expanded_tied_weights_keys()
    for module in want.modules():
        module._is_hf_initialized = False
        for key in ("lm_head.weight",) if ties and hasattr(module, "lm_head") else ():
            assert key in ties
            module.lm_head.weight = nn.Parameter(torch.empty_like(module.lm_head.weight))
    torch.manual_seed(8)
    want.initialize_weights()
    want.tie_weights()
    torch.manual_seed(8)
    engine = _manage(_blank(build), precision="32-true", chunk_size=8192)
    _assert_same_state(engine, _manage(want, precision="32-true", chunk_size=8192))


def test_missing_ones_begin_with_their_modules(tmp_path: Path) -> None:
    """A new head on trained weights, and a batch norm whose statistics were not saved."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    trained = _built(build)
    trained[1].running_mean += 3.0
    state = {n: t for n, t in trained.state_dict().items() if n.startswith("0") or n == "1.weight"}
    save_file(state, tmp_path / "part.safetensors")
    model = _blank(build)
    before = _Snapshot(model)
    with pytest.raises(gs.GeminiError, match=r"1.bias, .*missing='init'") as error:
        _manage(model, weights=tmp_path / "part.safetensors")
    assert all(
        n in str(error.value) for n in ("1.running_mean", "2.weight", "2.bias", "part.safetensors")
    )
    before.check()
    torch.manual_seed(2)
    engine = _manage(model, weights=tmp_path / "part.safetensors", missing="init")
    torch.manual_seed(2)
    fresh = nn.Linear(8, 2)
    want = {**trained.state_dict(), **{f"2.{n}": t for n, t in fresh.state_dict().items()}}
    want["1.running_mean"] = torch.zeros(8)
    got = engine.model_state_dict()
    for name in want:
        assert_same_bits(got[name], want[name], name)


def test_an_initializer_does_not_touch_what_was_loaded(tmp_path: Path) -> None:
    """GPT-2's blocks set their children's weights anew: only where the file lacks them."""
    want = _built(_gpt2)
    state = {
        n: t.clone()
        for n, t in want.state_dict().items()
        if "c_proj.bias" not in n and n != "lm_head.weight"
    }
    save_file(state, tmp_path / "part.safetensors")
    got = _manage(
        _blank(_gpt2), weights=tmp_path / "part.safetensors", missing="init"
    ).model_state_dict()
    for name, tensor in state.items():
        assert_same_bits(got[name], tensor, name)
    assert not any(got[n].any() for n in got if "c_proj.bias" in n)


class _Replacing(nn.Module):
    """An initializer that assigns instead of writing, uses .data, and is a parent of other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(5))
        self.gain = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(6), persistent=False)
        self.inner = nn.Linear(3, 3)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.linspace(0, 1, 5))
        self.gain.data.fill_(2.0)
        self.gain.data[1] = 3.0
        self.table = torch.arange(6, dtype=torch.float32, device=self.gain.device)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)


def test_ways_to_write_initial_values() -> None:
    want = _built(_Replacing, seed=4)
    model = _blank(_Replacing)
    parameters = list(map(id, model.parameters()))
    torch.manual_seed(4)
    engine = _manage(model)
    assert list(map(id, model.parameters())) == parameters
    _assert_same_state(engine, _manage(want))


class _Rotary(nn.Module):
    """As in transformers 4 and code made after it: the function that computes the frequencies is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"base": 100.0}
        self.rope_init_fn = lambda config, device: (
            config["base"] ** -torch.arange(0.0, 1.0, 0.25, device=device),
            1.0,
        )
        self.register_buffer("inv_freq", self.rope_init_fn(self.config, None)[0], persistent=False)
        self.original_inv_freq = self.inv_freq


def test_rotary_frequencies(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), _Rotary())

    path = _save(_built(build), tmp_path / "some.safetensors")
    model = _blank(build)
    assert model[1].original_inv_freq.is_meta
    _assert_same_state(_manage(model, weights=path), _manage(_built(build)))
    assert model[1].original_inv_freq is model[1].inv_freq


# ---- what is refused ---------------------------------------------------------------------------------


class _Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.alone = nn.Parameter(torch.ones(3))


class _Forgetful(nn.Linear):
    """reset_parameters of the parent class knows nothing of the parameter that was added."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.extra = nn.Parameter(torch.ones(3))


class _Attribute(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.offset = torch.ones(4)


class _Failing(nn.Linear):
    fails = False

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.fails:
            raise OSError("no more numbers")


class _Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("inverse", torch.ones(4), persistent=False)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (
            _Silent,
            r"alone is a parameter on the meta device.*'model' \(_Silent\).*reset_parameters",
        ),
        (
            lambda: nn.Sequential(nn.BatchNorm1d(3), _Forgetful()),
            r"1.extra .*_Forgetful.*reset_parameters",
        ),
        (
            lambda: nn.Sequential(_Attribute()),
            r"0.offset .*neither a parameter nor a buffer.*register",
        ),
        (lambda: nn.Sequential(nn.Linear(2, 2), _Buffered()), r"1.inverse is a buffer .*_Buffered"),
        (lambda: nn.ParameterList([torch.ones(2)]), r"0 is a parameter.*ParameterList"),
    ],
)
def test_no_initial_values(build: Callable[[], nn.Module], match: str) -> None:
    model = _blank(build)
    before = _Snapshot(model)
    with pytest.raises(gs.GeminiError, match=match):
        _manage(model)
    before.check()


def test_an_initializer_that_fails() -> None:
    model = _blank(lambda: nn.Sequential(nn.Linear(4, 4), _Failing(4, 4)))
    model[1].fails = True
    before = _Snapshot(model)
    with pytest.raises(OSError, match="no more numbers"):
        _manage(model)
    before.check()
    model[1].fails = False
    torch.manual_seed(0)
    engine = _manage(model)
    torch.manual_seed(0)
    _assert_same_state(engine, _manage(nn.Sequential(nn.Linear(4, 4), _Failing(4, 4))))


def test_a_file_is_enough_for_modules_without_initial_values(tmp_path: Path) -> None:
    for build in (_Silent, _Forgetful):
        path = _save(_built(build), tmp_path / "silent.safetensors")
        _assert_same_state(_manage(_blank(build), weights=path), _manage(_built(build)))


def _no_file(folder: Path) -> Any:
    return folder / "nothing"


def _empty_folder(folder: Path) -> Any:
    (folder / "pytorch_model.bin").write_bytes(b"x")
    return folder


def _not_safetensors(folder: Path) -> Any:
    (folder / "model.safetensors").write_bytes(b"not at all a safetensors file")
    return folder


def _truncated(folder: Path) -> Any:
    path = _save(_built(Mlp), folder / "model.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    return folder


def _index(folder: Path, content: Any) -> Any:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


def _other_shape(folder: Path) -> Any:
    return _save(_built(lambda: Mlp(width=16)), folder / "other.safetensors")


def _other_names(folder: Path) -> Any:
    return _save(_built(lambda: nn.ModuleDict({"net": Mlp()})), folder / "names.safetensors")


REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nothing there": (_no_file, r"nothing.*no such file or folder.*snapshot_download"),
    "no safetensors": (
        _empty_folder,
        r"neither model.safetensors nor .*pytorch_model.bin.*save_pretrained",
    ),
    "garbage": (_not_safetensors, r"model.safetensors cannot be read as a safetensors file"),
    "truncated": (_truncated, r"model.safetensors cannot be read as a safetensors file"),
    "index without map": (
        lambda f: _index(f, {"weights": 1}),
        r"index.json is no index.*weight_map",
    ),
    "shard not there": (
        lambda f: _index(f, {"weight_map": {"a": "x.safetensors"}}),
        r"names x.safetensors",
    ),
    "shapes": (
        _other_shape,
        r"stem.weight: \(16, 16\) in the file, \(32, 32\) in the model.*and \d+ more",
    ),
    "names": (
        _other_names,
        r"none of the \d+ names .*\(the file has net\..*the model stem.weight.*weights=\{",
    ),
    "submodule": (lambda f: {"nett": f}, r"no submodule 'nett'.*stem, blocks, head"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_files_that_are_refused(case: str, tmp_path: Path) -> None:
    make, match = REFUSALS[case]
    model = _blank(Mlp)
    path = make(tmp_path)
    before = _Snapshot(model)
    with pytest.raises(gs.GeminiError, match=match):
        _manage(model, weights=path)
    before.check()
    engine = _manage(model, weights=_save(_built(Mlp), tmp_path / "right.safetensors"))
    _assert_same_state(engine, _manage(_built(Mlp)))


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _save(_built(Mlp), tmp_path / "some.safetensors")
    model = _blank(Mlp)
    before = _Snapshot(model)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(gs.GeminiError, match=r"pip install 'gemini-strategy\[weights\]'"):
        _manage(model, weights=path)
    before.check()


def test_initial_values_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Who has forgotten weights= would train from nothing, and not know."""
    n = len(list(_built(Mlp).parameters()))
    partial = dict(list(_built(Mlp).state_dict().items())[:1])
    save_file(partial, tmp_path / "partial.safetensors")
    with caplog.at_level(logging.INFO, logger="gemini_strategy"):
        _manage(_blank(Mlp)).close()
        _manage(_blank(Mlp), weights=tmp_path / "partial.safetensors", missing="init").close()
        _manage(_blank(Mlp), weights=_save(_built(Mlp), tmp_path / "all.safetensors")).close()
        _manage(_built(Mlp)).close()
    begin = "parameters on the meta device begin with their modules' own initial values, as"
    assert caplog.messages == [
        f"{n} {begin} no weights= was given",
        f"{n - 1} {begin} the files have none",
    ]


def test_other_arguments() -> None:
    with pytest.raises(ValueError, match="missing='maybe'"):
        _manage(_blank(Mlp), missing="maybe")
    model = _blank(Mlp)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    with pytest.raises(gs.GeminiError, match=r"head.weight.*gradient.*zero_grad"):
        _manage(model)
    model = _blank(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    moments = {"step": torch.tensor(1.0)}
    moments |= {n: torch.empty_like(model.head.weight) for n in ("exp_avg", "exp_avg_sq")}
    optimizer.state[model.head.weight] = moments
    with pytest.raises(gs.GeminiError, match=r"head.weight.*optimizer state is on the meta device"):
        gs.manage(model, optimizer, device="cpu")


def test_a_file_that_ends_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensors cannot be read: the first ones are in their chunks already, the model knows nothing of it."""
    path = _save(_built(Mlp), tmp_path / "some.safetensors")
    model = _blank(Mlp)
    before = _Snapshot(model)
    plain, count = weight_files.WeightFiles._rows, iter(range(1000))

    def rows(self: Any, name: str, top: int, bottom: int) -> Tensor:
        if next(count) == 20:
            path.write_bytes(b"")
            self.close()
        return plain(self, name, top, bottom)

    with monkeypatch.context() as patch:
        patch.setattr(weight_files.WeightFiles, "_rows", rows)
        with pytest.raises(gs.GeminiError, match=r"some.safetensors cannot be read"):
            _manage(model, weights=path)
    before.check()
    engine = _manage(model, weights=_save(_built(Mlp), path))
    _assert_same_state(engine, _manage(_built(Mlp)))


@pytest.mark.parametrize("source", ["file", "modules"])
def test_an_error_after_the_values_are_there(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BY_NAME["batch_norm"]
    how = (
        {"weights": _save(_built(case.build), tmp_path / "some.safetensors")}
        if source == "file"
        else {}
    )
    model = _blank(case.build)
    before = _Snapshot(model)

    def fail(*args: Any) -> None:
        assert not any(p.is_meta for p in model.parameters())
        raise gs.GeminiError("too late")

    with monkeypatch.context() as patch:
        patch.setattr(managed, "install", fail)
        with pytest.raises(gs.GeminiError, match="too late"):
            _manage(model, **how)
    before.numbers = torch.get_rng_state()
    before.check()
    torch.manual_seed(3)
    engine, other = _manage(model, **how), _manage(_built(case.build))
    _assert_same_state(engine, other)
    _assert_same_training(engine, other, case, "32-true")


class _Keeps(nn.Linear):
    """Tells where its values lie, and keeps them if it is to."""

    places: ClassVar[list[int]] = []
    kept: ClassVar[list[Tensor]] = []

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        with torch.no_grad():
            self.weight.fill_(float(len(self.places)))
        self.places.append(self.weight.data_ptr())
        if len(self.places) in (2, 3):
            self.kept.append(self.weight.data)


def test_memory_of_initial_values_is_used_again_unless_somebody_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_Keeps, "places", [])
    monkeypatch.setattr(_Keeps, "kept", [])
    model = _blank(lambda: nn.Sequential(*(_Keeps(512, 1024, bias=False) for _ in range(5))))
    engine = _manage(model)
    places = _Keeps.places
    assert places[0] == places[1] and places[3] == places[4] and len(set(places)) == 3
    for number, values in enumerate(_Keeps.kept):
        assert torch.equal(values, torch.full((1024, 512), number + 1.0))
    for number, layer in enumerate(engine.model):
        assert torch.equal(
            layer.weight._gm_slot.read_weight(), torch.full((1024, 512), float(number))
        )


def test_budget_refusals_leave_the_model_blank(tmp_path: Path) -> None:
    model = _blank(Mlp)
    path = _save(_built(Mlp), tmp_path / "some.safetensors")
    before = _Snapshot(model)
    for how in ({"host_budget": 10_000, "placement_policy": "cpu"}, {"device_budget": 1024}):
        with pytest.raises(gs.GeminiMemoryError):
            _manage(model, weights=path, **how)
        before.check()


def test_parts_outside_a_parameter_are_refused() -> None:
    engine = _manage(_built(Mlp), precision="bf16-true")
    values = torch.zeros(8)
    numel = engine.model.stem.weight.numel()
    with pytest.raises(ValueError, match="elements"):
        engine._runtime.core.fill(0, 1, numel - 4, 8, FORMATS[torch.float32], values.data_ptr(), 0)
    with pytest.raises(ValueError, match="parts"):
        engine._runtime.core.fill(0, 0, 0, 8, FORMATS[torch.float32], values.data_ptr(), 0)


# ---- memory ------------------------------------------------------------------------------------------

_IMPORTS = "import sys, torch, torch._dynamo, safetensors.torch, gemini_strategy as gs; from pathlib import Path"
_PROGRAM = """
class Big(torch.nn.Sequential):
    def __init__(self):
        super().__init__(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24)))

def peak():
    return int(next(l for l in Path("/proc/self/status").open() if l.startswith("VmHWM")).split()[1]) * 1024

path, trains = {given}
with torch.device("meta"):
    model, small = Big(), torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters()) if trains else None
model.requires_grad_(trains)
gs.manage(small, device="cpu", precision="bf16-true", placement_policy="cpu").close()  # code and threads are there
Path("/proc/self/clear_refs").write_text("5")
before = peak()
how = {"weights": path} if path != "-" else {}
engine = gs.manage(model, optimizer, device="cpu", precision="bf16-true", placement_policy="cpu", **how)
stats = engine.stats()
print(peak() - before, stats["host_bytes"] + stats["device_bytes"], stats["parameters"])
"""


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("peaks")
    path = folder / "big.safetensors"
    save_file({f"{i}.weight": torch.full((1024, 1024), float(i)) for i in range(24)}, path)
    programs = {
        f"{source} {purpose}": _PROGRAM.replace("{given}", repr((given, purpose == "trains")))
        for source, given in (("file", str(path)), ("modules", "-"))
        for purpose in ("trains", "reads")
    }
    # What malloc keeps of what was freed depends on who freed it first; so large pieces go back at once.
    return run_to_the_end(folder, programs, _IMPORTS, MALLOC_MMAP_THRESHOLD_=str(1 << 20))


@pytest.mark.parametrize("purpose", ["trains", "reads"])
@pytest.mark.parametrize("source", ["file", "modules"])
def test_host_peak(source: str, purpose: str, peaks: dict[str, Any]) -> None:
    """The state, and beside it one parameter, what of the file stays mapped, and a little: never a model."""
    result = peaks[f"{source} {purpose}"]
    assert result.returncode == 0, result.stderr
    used, state, numel = map(int, result.stdout.split())
    assert numel == 24 << 20
    assert state >= numel * (12 if purpose == "trains" else 2)
    mapped = 16 << 20 if source == "file" else 0
    beside = 4 * (1 << 20) + mapped + (12 << 20)  # a parameter in fp32, mapped pages, pieces
    assert used <= state + beside < state + 4 * numel, (used - state, used, state)
