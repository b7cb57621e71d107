"""from_pretrained inside huggingface.loading(): the ordinary model's bits, and one copy of it on the host."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import modeling_utils

import gemini_strategy as gs
from gemini_strategy.huggingface import loading
from gemini_strategy.weights import unread
from gemini_strategy.weights.files import WeightFiles
from helpers.forked import Forks, values
from helpers.pairs import turns
from helpers.reference import assert_same_bits
from helpers.saving import peak_resident_bytes

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def llama(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes | heads | changes)
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    """Has a persistent buffer's kin: position_ids; its decoder is tied, with a bias in two places."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    config = transformers.BertConfig(num_attention_heads=4, max_position_embeddings=64, **sizes)
    return transformers.BertForMaskedLM(config)


def mixtral() -> nn.Module:
    """transformers joins its experts from several tensors of the file."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))


def t5() -> nn.Module:
    """Keeps some weights in fp32 where the others are fp16."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "bert": bert,
    "mixtral": mixtral,
    "t5": t5,
}
TOKENS = torch.arange(8).view(1, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(tmp_path / "model")


def saved(path: Path, build: Callable[[], nn.Module] = llama, size: str = "5GB") -> Path:
    torch.manual_seed(0)
    build().save_pretrained(path, max_shard_size=size)
    return path


def ordinary_and_unread(kind: Any, folder: Path, **how: Any) -> tuple[nn.Module, nn.Module]:
    """The two of them, which have drawn the same random numbers."""
    torch.manual_seed(1)
    ordinary = kind.from_pretrained(folder, **how)
    numbers = torch.get_rng_state()
    torch.manual_seed(1)
    with loading():
        mine = kind.from_pretrained(folder, **how)
    assert torch.equal(torch.get_rng_state(), numbers)
    return ordinary, mine


def n_unread(model: nn.Module) -> int:
    return sum(unread.home(parameter) is not None for parameter in model.parameters())


def assert_same_model(got: nn.Module, want: nn.Module) -> None:
    its, mine = want.state_dict(), got.state_dict()
    assert list(mine) == list(its)
    for name, value in its.items():
        assert_same_bits(mine[name].clone(), value, name)
    kinds = [
        {n: (p.requires_grad, type(p)) for n, p in m.named_parameters(remove_duplicate=False)}
        for m in (got, want)
    ]
    assert kinds[0] == kinds[1]
    buffers = dict(got.named_buffers())
    for name, value in want.named_buffers():
        assert_same_bits(buffers[name], value, name)


def manage(model: nn.Module, **how: Any) -> gs.Engine:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    return gs.manage(model, optimizer, device="cpu", **{"precision": "bf16-true"} | how)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tensors of files that are read from now on, piece by piece."""
    names: list[str] = []
    real = WeightFiles._rows

    def rows(self: WeightFiles, name: str, *where: Any) -> Tensor:
        names.append(name)
        return real(self, name, *where)

    monkeypatch.setattr(WeightFiles, "_rows", rows)
    return names


# ---- the ordinary model --------------------------------------------------------------------------


@turns(family=FAMILIES, dtype=[None, FP32, BF16, FP16])
def test_the_model_is_the_ordinary_one(
    family: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """As it is, and as it is managed: shards, ties, names and dtypes are transformers' own business."""
    folder = saved(tmp_path / "model", FAMILIES[family], "30KB")
    how = {} if dtype is None else {"dtype": dtype}
    want, model = ordinary_and_unread(type(FAMILIES[family]()), folder, **how)
    n_joined = 2 if family == "mixtral" else 0
    n_made = n_joined + (family == "bert")  # a bias that is padded where it is tied
    assert n_unread(model) == len(list(model.parameters())) - n_made
    assert_same_model(model, want)
    assert model.config.to_dict() == want.config.to_dict() and not model.training
    engines = [manage(each) for each in (model, want)]
    masters, its = (engine.model_state_dict() for engine in engines)
    for name, value in its.items():
        assert_same_bits(masters[name], value, name)


def test_nothing_is_read_before_it_is_placed(folder: Path, reads: list[str]) -> None:
    with loading():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not reads
    engine = manage(model)
    assert sorted(set(reads)) == sorted(load_file(folder / "model.safetensors"))
    assert len(reads) == len(set(reads))
    engine.close()
    assert not n_unread(model)


def test_training_and_use_without_an_engine(folder: Path) -> None:
    want, model = ordinary_and_unread(transformers.AutoModelForCausalLM, folder)
    for each in (model, want):
        each.train()(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in want.named_parameters():
        assert_same_bits(model.get_parameter(name).grad, parameter.grad, name)
    with torch.no_grad():  # by now each has been used more than once, and nothing is read again
        assert torch.equal(model(input_ids=TOKENS).logits, want(input_ids=TOKENS).logits)
    assert not n_unread(model)
    for each in (model, want):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    assert not n_unread(model)
    assert_same_model(model, want)
    copied = copy.deepcopy(model)
    assert_same_model(copied, want)


def test_the_second_use_keeps_the_values(folder: Path, reads: list[str]) -> None:
    _, model = ordinary_and_unread(transformers.AutoModelForCausalLM, folder)
    weight = model.model.norm.weight
    first = weight.clone()
    assert len(reads) == 1 and n_unread(model) == len(list(model.parameters()))
    weight.clone()
    assert len(reads) == 2 and unread.home(weight) is None
    assert_same_bits(weight.clone(), first, "norm")
    assert len(reads) == 2


def test_an_unread_model_is_saved_over_its_own_files(folder: Path) -> None:
    want, model = ordinary_and_unread(transformers.AutoModelForCausalLM, folder)
    model.save_pretrained(folder)
    assert_same_model(transformers.AutoModelForCausalLM.from_pretrained(folder), want)
    assert_same_model(model, want)


def test_names_that_are_missing_or_too_many(tmp_path: Path) -> None:
    """A head gets its initial values from the same random numbers, and a buffer its values of the file."""
    folder = saved(tmp_path / "model", bert)
    values = load_file(folder / "model.safetensors")
    save_file({**values, "more": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    kind = transformers.BertForSequenceClassification
    want, model = ordinary_and_unread(kind, folder, num_labels=3)
    assert unread.home(model.classifier.weight) is None
    assert_same_model(model, want)
    masters, its = (manage(each).model_state_dict() for each in (model, want))
    for name, value in its.items():
        assert_same_bits(masters[name], value, name)


def test_persistent_buffers_are_read_at_once(tmp_path: Path) -> None:
    config = transformers.MobileNetV2Config(image_size=32, depth_multiplier=0.1)
    torch.manual_seed(0)
    transformers.MobileNetV2Model(config).save_pretrained(tmp_path / "model")
    want, model = ordinary_and_unread(transformers.MobileNetV2Model, tmp_path / "model")
    names = {name for name, _ in model.named_buffers()}
    assert names & set(load_file(tmp_path / "model" / "model.safetensors"))
    assert all(unread.home(buffer) is None for buffer in model.buffers())
    assert_same_model(model, want)


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_adapters_on_a_base_that_is_unread(kind: str, folder: Path) -> None:
    """Their initial values are the ordinary ones; DoRA computes them from the base's weights."""
    losses = []
    for model in ordinary_and_unread(transformers.AutoModelForCausalLM, folder):
        torch.manual_seed(2)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=kind == "DoRA")
        adapted = peft.get_peft_model(model, config)
        engine = manage(adapted)
        for _ in range(2):
            loss = adapted(input_ids=TOKENS, labels=TOKENS).loss
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
            engine.zero_grad()
    assert_same_bits(torch.stack(losses[:2]), torch.stack(losses[2:]))


def test_what_was_written_before_is_kept(folder: Path) -> None:
    want, model = ordinary_and_unread(transformers.AutoModelForCausalLM, folder)
    for each in (model, want):
        with torch.no_grad():
            each.model.norm.weight.mul_(3)
        each.resize_token_embeddings(70, mean_resizing=False)
    masters, its = (manage(each).model_state_dict() for each in (model, want))
    assert masters["lm_head.weight"].shape == (70, 32)
    same = [name for name in its if name not in ("lm_head.weight", "model.embed_tokens.weight")]
    for name in same:
        assert_same_bits(masters[name], its[name], name)
    assert_same_bits(
        masters["model.embed_tokens.weight"][:64], its["model.embed_tokens.weight"][:64]
    )


def test_a_quantizing_load_reads_what_it_needs(folder: Path) -> None:
    how = {"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)}
    want, model = ordinary_and_unread(transformers.AutoModelForCausalLM, folder, **how)
    for each in (want, model):
        with torch.no_grad():
            each.logits = each(input_ids=TOKENS).logits
    assert_same_bits(model.logits, want.logits)
    assert n_unread(model) > 0


@pytest.mark.parametrize("part", ["model", "layers"])
def test_compiling_is_refused_but_for_a_copy(part: str, folder: Path) -> None:
    want, model = ordinary_and_unread(transformers.AutoModelForCausalLM, folder)
    copied = copy.deepcopy(model)
    for each in (model, copied):
        for module in (each,) if part == "model" else each.model.layers:
            module.compile(backend="eager")
    for _ in range(3):
        with torch.no_grad(), pytest.raises(Exception, match="compiled or traced function takes"):
            model(input_ids=TOKENS)
    with torch.no_grad():
        assert_same_bits(copied(input_ids=TOKENS).logits, want(input_ids=TOKENS).logits)


# ---- what is refused -----------------------------------------------------------------------------


def test_a_file_that_was_changed_is_refused(folder: Path) -> None:
    with loading():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    save_file(load_file(folder / "model.safetensors"), folder / "other")
    (folder / "other").replace(folder / "model.safetensors")
    with pytest.raises(gs.GeminiError, match=r"model.safetensors has changed or gone"):
        manage(model)
    with pytest.raises(gs.GeminiError, match=r"model.safetensors has changed or gone"):
        model(input_ids=TOKENS)


def test_memory_that_would_be_shared_is_refused(folder: Path) -> None:
    with loading():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    kept = model.model.norm.weight.detach()
    with pytest.raises(gs.GeminiError, match=r"model.norm.weight: a tensor that is kept elsewhere"):
        manage(model)
    assert n_unread(model) == len(list(model.parameters()))
    del kept
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight)
    with pytest.raises(gs.GeminiError, match=r"embed_tokens.weight and lm_head.weight are two"):
        manage(model)


def test_afterwards_transformers_is_as_it_was(folder: Path, reads: list[str]) -> None:
    before = dict(vars(modeling_utils)), dict(vars(modeling_utils.PreTrainedModel))
    with pytest.raises(OSError), loading(), loading():
        transformers.AutoModelForCausalLM.from_pretrained(folder / "nowhere")
    after = dict(vars(modeling_utils)), dict(vars(modeling_utils.PreTrainedModel))
    assert before == after
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not n_unread(model) and not reads


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    preloaded = ("transformers.models.llama.modeling_llama", Path(__file__).stem)
    with Forks((Path(__file__).parent,), preloaded) as forks:
        yield forks


WIDE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 7, "vocab_size": 4096}


def wide() -> nn.Module:
    return llama(**WIDE, num_attention_heads=8, num_key_value_heads=8)


def peak_job(*args: Any) -> tuple[int, int, int]:
    """(what the process gained at most, bytes of the model, of its largest layer)."""
    (folder,) = args[-1:]
    gs.manage(nn.Linear(4, 4), None, device="cpu").close()  # what is made once
    transformers.AutoConfig.from_pretrained(folder)
    gc.collect()
    engines = []
    before = peak_resident_bytes(lambda: None)

    def load() -> None:
        with loading():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        how = {"placement_policy": "cpu", "device_budget": "24MB", "chunk_size": "4MB"}
        engines.append(gs.manage(model, None, device="cpu", **how))

    peak = peak_resident_bytes(load)
    sizes = [p.numel() * 4 for p in engines[0].model.parameters()]
    layer = sum(p.numel() * 4 for p in engines[0].model.model.layers[0].parameters())
    return peak - before, sum(sizes), layer


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("large"), wide, "40MB")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_holds_the_model_once(ranks: int, forks: Forks, large: Path) -> None:
    """The ranks of a node together have one model; each a layer and the pages of a file that is being read besides."""
    ended = forks.run(f"{__name__}:{peak_job.__name__}", str(large), ranks=ranks, timeout=120.0)
    for gained, model, layer in values(ended):
        assert model > 100e6
        assert gained < model / ranks + layer + (32 << 20), (gained, model)
