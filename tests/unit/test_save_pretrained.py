"""engine.save_pretrained: the folder that transformers or peft would have written, of masters or their rounding."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import gemini_strategy as gs
from gemini_strategy.checkpoint import folder as folders
from gemini_strategy.checkpoint import pretrained
from gemini_strategy.checkpoint.contents import Field
from gemini_strategy.parameters.slot import Slot
from helpers.forked import Forks, values
from helpers.pairs import turns
from helpers.reference import assert_same_bits
from helpers.saving import OddParts, peak_resident_bytes
from helpers.sharded import Exact

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    families = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "mixtral")]
    with Forks((Path(__file__).parent,), (*families, Path(__file__).stem)) as forks:
        yield forks


def run(forks: Forks, job: Any, *args: Any, ranks: int) -> list[Any]:
    return values(forks.run(f"{__name__}:{job.__name__}", *args, ranks=ranks, timeout=120.0))


def llama(**changes: Any) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **sizes, **heads, **changes)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    config = transformers.GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes)
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.BertConfig(
        vocab_size=64, num_attention_heads=4, max_position_embeddings=64, **sizes
    )
    return transformers.BertForMaskedLM(config)


def mixtral() -> nn.Module:
    """Its experts are one tensor in the model and many in files."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    config = transformers.MixtralConfig(vocab_size=64, **sizes, **heads)
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    """Keeps some weights in fp32 where the others are fp16."""
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "gpt2": gpt2,
    "bert": bert,
    "mixtral": mixtral,
    "t5": t5,
}


def trained(build: Callable[[], nn.Module], precision: str = "bf16-true", **how: Any) -> gs.Engine:
    """After one step: masters are no 16-bit numbers any more."""
    torch.manual_seed(1)
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    how = {"device": "cpu", "chunk_size": 8192} | how
    engine = gs.manage(model, optimizer, precision=precision, **how)
    tokens = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    engine.backward(model(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.zero_grad()
    return engine


def told(path: Path) -> dict[str, Any]:
    """What a JSON file says; sets have no order."""
    found = json.loads(path.read_text())
    if isinstance(found.get("target_modules"), list):
        found["target_modules"].sort()
    return found  # type: ignore[no-any-return]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def tensors_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same_tensors(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name].dtype is value.dtype, name
        assert_same_bits(got[name], value, name)


# ---- what transformers loads ---------------------------------------------------------------------


@turns(
    family=FAMILIES,
    precision=[p for p in ("bf16-true", "16-mixed", "32-true") for _ in range(3)],
    dtype=[None, FP32, BF16],
)
def test_the_folder_is_the_one_that_transformers_writes(
    family: str, precision: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """Names, bits and configuration are those of an ordinary model with these masters, rounded."""
    if family == "t5" and precision == "16-mixed":
        precision = "bf16-mixed"
    engine = trained(FAMILIES[family], precision)
    masters = {name: value.clone() for name, value in engine.model_state_dict().items()}
    before = engine.model.config.to_dict()
    mine = engine.save_pretrained(tmp_path / "mine", dtype, max_shard_size="30KB")
    assert mine == tmp_path / "mine"
    assert engine.model.config.to_dict() == before
    model = engine.model
    engine.close(dtype=FP32)
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(tmp_path / "its", max_shard_size="30KB")
    assert_same_tensors(tensors_of(tmp_path / "mine"), tensors_of(tmp_path / "its"))
    for name in ("config.json", "generation_config.json"):
        assert (mine / name).exists() == (tmp_path / "its" / name).exists()
        if (mine / name).exists():
            assert told(mine / name) == told(tmp_path / "its" / name)
    index, its = (told(p / "model.safetensors.index.json") for p in (mine, tmp_path / "its"))
    assert set(index["weight_map"]) == set(its["weight_map"])
    assert index["metadata"]["total_size"] == its["metadata"]["total_size"]
    for file in set(index["weight_map"].values()):
        sizes = [t.nbytes for t in load_file(mine / file).values()]
        assert sum(sizes) <= 30_000 or len(sizes) == 1
    loaded = type(model).from_pretrained(mine)
    assert loaded.dtype is (dtype or FP32)
    for name, value in loaded.state_dict().items():
        assert_same_bits(value, masters[name].to(value.dtype), name)
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    engine = trained(llama)
    engine.save_pretrained(tmp_path / "saved")
    assert names_in(tmp_path / "saved") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "saved"]
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_tensors(auto.state_dict(), engine.model_state_dict())


def test_what_the_class_keeps_in_fp32(tmp_path: Path) -> None:
    """In fp16 the same as from_pretrained(dtype=fp16) makes of the fp32 folder."""
    engine = trained(t5)
    engine.save_pretrained(tmp_path / "fp32")
    engine.save_pretrained(tmp_path / "fp16", FP16)
    kind = transformers.T5ForConditionalGeneration
    want = kind.from_pretrained(tmp_path / "fp32", dtype=FP16).state_dict()
    assert {t.dtype for t in want.values()} == {FP16, FP32}
    assert_same_tensors(kind.from_pretrained(tmp_path / "fp16").state_dict(), want)
    for name, value in tensors_of(tmp_path / "fp16").items():
        assert value.dtype is want[name].dtype, name


@pytest.mark.parametrize("family", ["llama tied", "gpt2"])
def test_round_trip_into_manage(family: str, tmp_path: Path) -> None:
    engine = trained(FAMILIES[family])
    engine.save_pretrained(tmp_path / "saved", max_shard_size="30KB")
    with torch.device("meta"):
        model = FAMILIES[family]()
    optimizer = torch.optim.AdamW(model.parameters())
    again = gs.manage(model, optimizer, precision="bf16-true", weights=tmp_path / "saved")
    assert_same_tensors(again.model_state_dict(), engine.model_state_dict())


def test_a_frozen_weight_is_as_it_is(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = llama().to(BF16)
        model.model.embed_tokens.requires_grad_(False)
        return model

    engine = trained(build)
    engine.save_pretrained(tmp_path)
    found = tensors_of(tmp_path)
    assert {n for n, t in found.items() if t.dtype is BF16} == {"model.embed_tokens.weight"}
    assert told(tmp_path / "config.json")["dtype"] == "float32"
    assert_same_tensors(found, engine.model_state_dict())


def test_a_module_of_the_model(tmp_path: Path) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(llama(tie_word_embeddings=True), backend="eager")

        def forward(self, **inputs: Any) -> Any:
            return self.net(**inputs)

    engine = trained(Around)
    engine.save_pretrained(tmp_path / "net", module=engine.model.net)
    got = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "net").state_dict()
    want = engine.model_state_dict()
    assert_same_tensors(got, {name.removeprefix("net._orig_mod."): t for name, t in want.items()})
    engine.save_pretrained(tmp_path / "all")
    assert names_in(tmp_path / "all") == ["model.safetensors"]
    del want["net._orig_mod.lm_head.weight"]
    assert_same_tensors(
        tensors_of(tmp_path / "all"),
        {name.replace("_orig_mod.", ""): value for name, value in want.items()},
    )
    with pytest.raises(ValueError, match="no module of the managed model"):
        engine.save_pretrained(tmp_path / "other", module=nn.Linear(1, 1))


def test_names_that_no_class_ties_stay(tmp_path: Path) -> None:
    """from_pretrained does not tie them again, so it needs both."""

    def build() -> nn.Module:
        model = llama()
        model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        return model

    engine = trained(build)
    engine.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_same_tensors(loaded.state_dict(), engine.model_state_dict())


# ---- other modules -------------------------------------------------------------------------------


class Odd(OddParts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False, True]))


def odd_engine(**how: Any) -> gs.Engine:
    torch.manual_seed(2)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    engine = gs.manage(model, optimizer, precision="bf16-true", device="cpu", **how)
    state = engine.model_state_dict()
    floats = {n: t + t * 2**-12 if t.dtype is FP32 else t for n, t in state.items()}
    engine.load_model_state_dict(floats)
    return engine


@pytest.mark.parametrize("dtype", [None, BF16], ids=str)
def test_a_module_of_torch(dtype: torch.dtype | None, tmp_path: Path) -> None:
    engine = odd_engine()
    want = engine.model_state_dict()
    assert not engine.model.transposed._gm_slot.is_row_major
    engine.save_pretrained(tmp_path, dtype)
    assert names_in(tmp_path) == ["model.safetensors"]
    found = tensors_of(tmp_path)
    assert set(want) - set(found) == {"b.weight"}
    is_rounded = {n: p.is_floating_point() for n, p in engine.model.named_parameters()}
    for name, value in found.items():
        is_changed = dtype is not None and is_rounded.get(name, False)
        assert_same_bits(value, want[name].to(dtype if is_changed else value.dtype).contiguous())
    plain = Odd() if dtype is None else Odd().to(dtype)
    assert load_model(plain, tmp_path / "model.safetensors") == (set(), [])
    for name, value in plain.state_dict().items():
        if dtype is None:
            assert_same_bits(value.contiguous(), want[name].to(value.dtype).contiguous(), name)


def test_what_safetensors_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 1}

        def set_extra_state(self, state: Any) -> None:
            pass

    engine = gs.manage(Extra(2, 2), None, device="cpu")
    with pytest.raises(gs.GeminiError, match=r"_extra_state is no tensor.*engine\.save"):
        engine.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_value_beyond_the_range_is_refused(tmp_path: Path) -> None:
    engine = gs.manage(nn.Linear(2, 2), None, device="cpu")
    with engine.full_parameter(engine.model.weight) as weight:
        weight[1, 0] = 1e5
        weight[0, 0] = float("inf")
    with pytest.raises(gs.GeminiError, match=r"weight: 1 of its elements .*float16 \(65504\)"):
        engine.save_pretrained(tmp_path / "saved", FP16)
    assert not list(tmp_path.iterdir())
    engine.save_pretrained(tmp_path / "saved", BF16)
    assert tensors_of(tmp_path / "saved")["weight"][0, 0].isinf()


def test_arguments(tmp_path: Path) -> None:
    engine = gs.manage(nn.Linear(2, 2), None, device="cpu")
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 must be one of"):
        engine.save_pretrained(tmp_path / "saved", torch.int8)
    with pytest.raises(ValueError, match="max_shard_size"):
        engine.save_pretrained(tmp_path / "saved", max_shard_size="many")
    engine.close()
    with pytest.raises(gs.GeminiError, match="closed"):
        engine.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


# ---- adapters ------------------------------------------------------------------------------------


def reads(patch: pytest.MonkeyPatch) -> set[str]:
    """The parameters that are read from now on."""
    names: set[str] = set()
    real_field, real_slot = Field.read, Slot._read

    def read_field(self: Field, *args: Any) -> Tensor:
        names.add(self.slot.name)
        return real_field(self, *args)

    def read_slot(self: Slot, *args: Any) -> Tensor:
        names.add(self.name)
        return real_slot(self, *args)

    patch.setattr(Field, "read", read_field)
    patch.setattr(Slot, "_read", read_slot)
    return names


def lora(**changes: Any) -> nn.Module:
    import peft

    how = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]} | changes
    base = llama(tie_word_embeddings=True)
    return peft.get_peft_model(base, peft.LoraConfig(r=4, **how))


def two_adapters() -> nn.Module:
    import peft

    model = lora()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["o_proj"]))
    return model


ADAPTERS: dict[str, Callable[[], nn.Module]] = {
    "lora": lora,
    "no task": lambda: lora(task_type=None),
    "a module besides": lambda: lora(modules_to_save=["norm"]),
    "two": two_adapters,
    "ranks that change": lambda: adalora(),
    "prompts": lambda: prompts("PromptTuningConfig"),
    "prefixes": lambda: prompts("PrefixTuningConfig"),
}


@turns(case=ADAPTERS, dtype=[None, BF16])
def test_of_peft_the_adapters_alone(
    case: str, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and configurations are those of peft; the frozen base is not read."""
    import peft

    engine = trained(ADAPTERS[case])
    model = engine.model
    with monkeypatch.context() as patch:
        names = reads(patch)
        engine.save_pretrained(tmp_path / "mine", dtype)
    assert names and all(
        "lora_" in name
        or (case == "a module besides" and "modules_to_save" in name)
        or (case in ("prompts", "prefixes") and name == "prompt_encoder.default.embedding.weight")
        for name in names
    )
    engine.close(dtype=FP32)
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(tmp_path / "its")
    for its in sorted((tmp_path / "its").rglob("adapter_*")):
        mine = tmp_path / "mine" / its.relative_to(tmp_path / "its")
        if its.suffix == ".json":
            assert told(mine) == told(its)
        else:
            assert_same_tensors(load_file(mine), load_file(its))
    n_files = 4 if case == "two" else 2
    assert len([p for p in (tmp_path / "mine").rglob("*") if p.is_file()]) == n_files
    again = peft.PeftModel.from_pretrained(
        llama(tie_word_embeddings=True), tmp_path / "mine", autocast_adapter_dtype=False
    )
    want = load_file(tmp_path / "its" / "adapter_model.safetensors")
    got = peft.get_peft_model_state_dict(again)
    assert_same_tensors(got, {name: value.to(FP32) for name, value in want.items()})


def prompts(kind: str) -> nn.Module:
    import peft

    how = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    return peft.get_peft_model(llama(tie_word_embeddings=True), getattr(peft, kind)(**how))


def test_prompts_that_are_computed_are_refused(tmp_path: Path) -> None:
    """Running their encoder would give what the 16-bit weights make of them."""
    engine = trained(lambda: prompts("PromptEncoderConfig"))
    with pytest.raises(gs.GeminiError, match=r"adapter default are computed by running"):
        engine.save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def adalora() -> nn.Module:
    import peft

    how = {"task_type": "CAUSAL_LM", "init_r": 4, "target_r": 2, "total_step": 10}
    return peft.get_peft_model(llama(), peft.AdaLoraConfig(target_modules=["q_proj"], **how))


def test_an_adapter_of_transformers_own(tmp_path: Path) -> None:
    def build() -> nn.Module:
        import peft

        model = llama()
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"]), "mine")
        return model

    engine = trained(build)
    engine.save_pretrained(tmp_path / "mine")
    model = engine.model
    engine.close(dtype=FP32)
    model.save_pretrained(tmp_path / "its")
    assert_same_tensors(tensors_of(tmp_path / "mine"), tensors_of(tmp_path / "its"))
    assert names_in(tmp_path / "mine") == names_in(tmp_path / "its")
    its = told(tmp_path / "its" / "adapter_config.json")
    assert told(tmp_path / "mine" / "adapter_config.json") == its


# ---- the folder ----------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_of_no_model_stays(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    engine = trained(llama)
    engine.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "second").mkdir()
    (folder / "second" / "adapter_config.json").write_text("{}")
    engine.save_pretrained(folder)
    assert set(contents(folder)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "second/adapter_config.json",
    }
    assert list(tmp_path.iterdir()) == [folder]
    plain = gs.manage(nn.Linear(2, 2), None, device="cpu")
    plain.save_pretrained(folder)  # no configuration of another model is left beside it
    assert set(contents(folder)) == {
        "model.safetensors",
        "tokenizer.json",
        "second/adapter_config.json",
    }


def test_folders_that_are_not_replaced(tmp_path: Path) -> None:
    engine = gs.manage(nn.Linear(2, 2), None, device="cpu")
    engine.save(tmp_path / "checkpoint")
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "model.safetensors").symlink_to("../file")
    before = contents(tmp_path)
    for name, text in {
        "checkpoint": r"is a checkpoint of engine\.save",
        "run": "has step-1, which is no file",
        "file": "is no folder",
        "link": "is no folder",
        "cache": r"has model\.safetensors, which is no file",
    }.items():
        with pytest.raises(gs.GeminiError, match=text):
            engine.save_pretrained(tmp_path / name)
    assert contents(tmp_path) == before and (tmp_path / "link").is_symlink()


def failing_job(rank: int, folder: str, who: int, what: str) -> tuple[str, bool]:
    """(the error, whether a later save works); rank `who` has the error."""
    patch = pytest.MonkeyPatch()
    engine = trained(mixtral)
    engine.save_pretrained(folder)
    engine.ranks.gather("saved")
    before = contents(Path(folder))
    engine.ranks.gather("looked")
    if rank == who:
        n = [0]
        real = os.pwrite

        def pwrite(*args: Any) -> int:
            n[0] += 1
            if n[0] == 7:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args)

        def fail(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if what == "write":
            patch.setattr(os, "pwrite", pwrite)
        elif what == "group":
            patch.setattr(pretrained, "_put_group", fail)
        elif what == "create":
            patch.setattr(pretrained, "_create", fail)
        else:
            patch.setattr(pretrained, "_finish", fail)
    error = "none"
    try:
        engine.save_pretrained(folder, BF16)
    except gs.GeminiError as raised:
        error = str(raised)
    patch.undo()
    engine.ranks.gather("failed")
    assert contents(Path(folder)) == before
    assert list(Path(folder).parent.iterdir()) == [Path(folder)]
    engine.ranks.gather("looked")
    engine.save_pretrained(folder, BF16)
    engine.ranks.gather("saved")
    return error, contents(Path(folder)) != before


@pytest.mark.parametrize(
    ("who", "what"), [(1, "write"), (0, "group"), (0, "create"), (0, "publish")]
)
def test_an_error_on_one_rank(who: int, what: str, forks: Forks, tmp_path: Path) -> None:
    """All raise, with that rank's number; the old folder is as it was; the next save works."""
    folder = str(tmp_path / "run" / "saved")
    for error, works in run(forks, failing_job, folder, who, what, ranks=2):
        assert "No space left on device" in error and f"rank {who}: " in error
        assert works


def kill_at_call(folder: str, n: int) -> int:
    """Saves, and dies at the n-th call that changes files; how many there were."""
    patch = pytest.MonkeyPatch()
    torch.manual_seed(1)
    engine = gs.manage(nn.Linear(4, 4), None, device="cpu")
    count = [0]

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return watch

    for name in ("open", "pwrite", "fsync", "link", "rename", "mkdir", "rmdir", "unlink"):
        patch.setattr(os, name, watched(getattr(os, name)))
    patch.setattr(folders, "rename_exchange", watched(folders.rename_exchange))
    engine.save_pretrained(folder, max_shard_size="64B")
    return count[0]


def test_kill_at_every_call(forks: Forks, tmp_path: Path) -> None:
    """The folder is the old one or the new one, and has the tokenizer; nothing is left after the next saving."""
    folder = tmp_path / "saved"
    engine = gs.manage(nn.Linear(4, 4), None, device="cpu")
    found = []
    for n in range(1, 1000):
        engine.save_pretrained(folder)
        (folder / "tokenizer.json").write_text("{}")
        old = contents(folder)
        assert list(tmp_path.iterdir()) == [folder] and len(old) == 2
        ended = forks.run(f"{__name__}:kill_at_call", str(folder), n)[0]
        found.append(contents(folder))
        assert found[-1]["tokenizer.json"] == old["tokenizer.json"]
        if ended.exit_code == 0:
            break
        assert ended.exit_code == -9, ended.how
    assert ended.value > 10 and found[0] == old and len(found[-1]) == 4
    assert all(each in (found[0], found[-1]) for each in found)


# ---- ranks ---------------------------------------------------------------------------------------


def ranks_job(rank: int, folder: str, family: str, shape: Any, dtype: Any) -> None:
    """Saves where memory that nothing has written holds numbers beyond the range of 16 bits."""
    empty = torch.empty_strided

    def dirty(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.finfo(made.dtype).max) if made.is_floating_point() else made

    torch.empty_strided = dirty
    how = {"mesh": torch.distributed.init_device_mesh("cpu", shape)} if shape else {}
    engine = trained(FAMILIES[family], **how)
    engine.save_pretrained(folder, dtype, max_shard_size="30KB")


def overflow_job(rank: int, folder: str) -> str:
    """One expert's weight is too large for fp16; rank 0 alone converts it, and every rank is told."""
    engine = trained(FAMILIES["mixtral"], timeout=30.0)
    experts = engine.model.model.layers[0].mlp.experts
    with engine.full_parameter(experts.down_proj) as whole:
        whole.fill_(1e6)
    with pytest.raises(gs.GeminiError) as raised:
        engine.save_pretrained(folder, FP16)
    assert not Path(folder).exists()
    engine.save_pretrained(folder, BF16)
    return str(raised.value)


def odd_job(rank: int, folder: str) -> None:
    odd_engine().save_pretrained(folder)


@pytest.mark.parametrize(
    ("ranks", "shape", "dtype"), [(2, None, None), (4, (2, 2), BF16)], ids=["shards", "hybrid"]
)
@pytest.mark.parametrize("family", ["llama tied", "mixtral"])
def test_any_number_of_ranks(
    family: str, ranks: int, shape: Any, dtype: Any, forks: Forks, tmp_path: Path
) -> None:
    """All ranks have the same batch, so the weights are those of one rank: the same files, byte for byte."""
    want, folder = tmp_path / "1", tmp_path / str(ranks)
    trained(FAMILIES[family]).save_pretrained(want, dtype, max_shard_size="30KB")
    run(forks, ranks_job, str(folder), family, shape, dtype, ranks=ranks)
    assert contents(folder) == contents(want)


def test_a_weight_that_is_too_large(forks: Forks, tmp_path: Path) -> None:
    for error in run(forks, overflow_job, str(tmp_path / "saved"), ranks=2):
        assert "rank 0: model.layers.0.mlp.experts.down_proj: " in error
        assert "beyond the range of torch.float16" in error


def test_odd_weights_on_ranks(forks: Forks, tmp_path: Path) -> None:
    odd_engine().save_pretrained(tmp_path / "1")
    run(forks, odd_job, str(tmp_path / "3"), ranks=3)
    assert contents(tmp_path / "3") == contents(tmp_path / "1")


def different_job(rank: int, folder: str) -> str:
    torch.manual_seed(0)
    engine = gs.manage(Exact(), None, device="cpu", timeout=60.0)
    with pytest.raises(gs.GeminiError) as raised:
        engine.save_pretrained(folder, BF16 if rank else None)
    return str(raised.value)


def test_ranks_that_want_different_files(forks: Forks, tmp_path: Path) -> None:
    for error in run(forks, different_job, str(tmp_path / "saved"), ranks=2):
        assert "the tensors to be written" in error
    assert not list(tmp_path.iterdir())


def its_own_job(rank: int, folder: str) -> None:
    """`model.save_pretrained` of transformers, while the model is managed."""
    engine = trained(lambda: llama(tie_word_embeddings=True))
    engine.model.save_pretrained(folder, is_main_process=rank == 0)
    want = engine.model_state_dict()
    if rank == 0:
        loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
        assert loaded.dtype is torch.float32
        assert_same_tensors(loaded.state_dict(), want)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_models_own_save_pretrained(ranks: int, forks: Forks, tmp_path: Path) -> None:
    """A model that came in fp32 is written so, and its configuration says that."""
    if ranks == 1:
        its_own_job(0, str(tmp_path / "saved"))
    else:
        run(forks, its_own_job, str(tmp_path / "saved"), ranks=ranks)


# ---- memory --------------------------------------------------------------------------------------


def peaks(folder: str) -> tuple[int, int, int]:
    """(of training, of saving, of saving in bf16), bytes of this process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)), nn.Linear(1024, 24 * 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = gs.manage(model, optimizer, precision="bf16-true", device="cpu")

    def step() -> None:
        engine.backward(engine.model(torch.randn(2, 1024).bfloat16()).float().square().mean())
        engine.step()
        engine.zero_grad()

    for _ in range(3):
        step()
    training = peak_resident_bytes(step)
    fp32 = peak_resident_bytes(lambda: engine.save_pretrained(Path(folder) / "fp32"))
    bf16 = peak_resident_bytes(lambda: engine.save_pretrained(Path(folder) / "bf16", BF16))
    assert engine.stats()["parameters"] > 40e6
    return training, fp32, bf16


def test_the_host_holds_one_piece_more(forks: Forks, tmp_path: Path) -> None:
    """164 MB of masters, 100 MB of them one tensor; a piece is 16 MiB in fp32 and 8 in bf16."""
    ended = forks.run(f"{__name__}:peaks", str(tmp_path))[0]
    assert ended.value is not None, ended.how
    training, fp32, bf16 = ended.value
    piece = 4 * pretrained._PIECE
    assert max(fp32, bf16) < training + 2 * piece + (16 << 20)
    assert (tmp_path / "fp32" / "model.safetensors").stat().st_size > 160e6
