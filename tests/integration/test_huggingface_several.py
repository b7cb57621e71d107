"""accelerate with one optimizer over two models, as diffusers' scripts train a unet and a text encoder."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini_strategy as gs
from gemini_strategy.huggingface import GeminiAccelerator, GeminiOptimizer
from huggingface_case import VOCABULARY, assert_same, make_model, masters, plugin, rows

CLIP = 0.7
WIDTH = 32


@pytest.fixture(autouse=True)
def _fresh_state() -> Any:
    """accelerate keeps one state per process."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def reset() -> None:
        for kind in (AcceleratorState, GradientState, PartialState):
            kind._reset_state()

    reset()
    yield
    reset()


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.words(tokens))))


def models() -> tuple[Any, Any]:
    unet = make_model()
    torch.manual_seed(4)
    return unet, Text()


def make(**given: Any) -> GeminiAccelerator:
    return GeminiAccelerator(cpu=True, gemini_plugin=plugin(device_budget="110KB"), **given)


def loader() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(rows(16), batch_size=2)


def pieces(*trained: nn.Module, kind: type = torch.optim.AdamW) -> tuple[Any, Any]:
    parameters = itertools.chain(*(model.parameters() for model in trained))
    optimizer = kind(parameters, lr=1e-2, weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 4)


def loss_of(unet: Any, text: Any, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
    if number % 3 == 2:  # the text encoder is not called
        return unet(**batch).loss
    return unet(inputs_embeds=text(batch["input_ids"]), labels=batch["labels"]).loss


def train(
    accelerator: Any, unet: Any, text: Any, optimizer: Any, scheduler: Any, batches: Any
) -> list[float]:
    norms = []
    for number, batch in enumerate(batches):
        with accelerator.accumulate(unet, text):
            accelerator.backward(loss_of(unet, text, batch, number))
            if accelerator.sync_gradients:
                parameters = itertools.chain(unet.parameters(), text.parameters())
                norms.append(float(accelerator.clip_grad_norm_(parameters, CLIP)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return norms


def by_hand(precision: str) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """The masters of the same loop without accelerate and without an engine."""
    pair = [gs.cast_model_(model, precision) for model in models()]
    optimizer, scheduler = pieces(*pair, kind=gs.HybridAdam)
    norms = []
    torch.manual_seed(5)

    def called(model: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                out = model(*args, **kwargs)
            return out.float() if isinstance(out, torch.Tensor) else out

        return forward

    for number, batch in enumerate(loader()):
        (loss_of(*map(called, pair), batch, number).float() / 2).backward()
        if number % 2:
            norms.append(float(optimizer.clip_grad_norm_(CLIP)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return [masters(model, optimizer) for model in pair], norms


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_the_bits_of_a_loop_by_hand(mixed: str) -> None:
    weights, norms = by_hand({"no": "32-true", "bf16": "bf16-mixed"}[mixed])
    accelerator = make(mixed_precision=mixed, gradient_accumulation_steps=2)
    pair = models()
    optimizer, scheduler = pieces(*pair)
    unet, text, wrapped, batches, scheduler = accelerator.prepare(
        *pair, optimizer, loader(), scheduler
    )
    assert (unet, text) == pair and isinstance(wrapped, GeminiOptimizer)
    engine = gs.engine_of(unet)
    assert gs.engine_of(text) is engine and engine.optimizer is optimizer
    torch.manual_seed(5)
    assert train(accelerator, unet, text, wrapped, scheduler, batches) == norms
    for model, want in zip(pair, weights, strict=True):
        got = {name: value for name, value in model.state_dict().items() if name in want}
        assert_same(got, want)
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
    assert engine.stats()["device_peak_bytes"] <= 110_000
    want = [accelerator.get_state_dict(model) for model in pair]
    accelerator.free_memory(unet, text)
    for model, state in zip(pair, want, strict=True):
        assert gs.engine_of(model) is None
        assert_same(dict(model.state_dict()), state)


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_models_first_and_their_optimizer_later(mixed: str) -> None:
    ends = []
    for way in range(3):
        accelerator = make(mixed_precision=mixed)
        unet, text = models()
        if way == 0:
            optimizer, scheduler = pieces(unet, text)
            _, _, optimizer, scheduler = accelerator.prepare(unet, text, optimizer, scheduler)
        else:
            accelerator.prepare(unet)
            accelerator.prepare(text)
            assert gs.engine_of(unet) is not gs.engine_of(text)
            loss_of(unet, text, next(iter(loader())), 0)
            optimizer, scheduler = pieces(unet, text)
            if way == 2:  # the models are given again
                _, _, optimizer = accelerator.prepare(unet, text, optimizer)
            else:
                optimizer = accelerator.prepare(optimizer)
            scheduler = accelerator.prepare(scheduler)
        torch.manual_seed(5)
        train(accelerator, unet, text, optimizer, scheduler, loader())
        ends.append([accelerator.get_state_dict(model) for model in (unet, text)])
    for other in ends[1:]:
        for got, want in zip(other, ends[0], strict=True):
            assert_same(got, want)


@pytest.mark.parametrize("mixed", ["no", "bf16", "fp16"])
def test_load_state_is_the_uninterrupted_run(mixed: str, tmp_path: Path) -> None:
    def start() -> tuple[Any, ...]:
        accelerator = make(mixed_precision=mixed)
        pair = models()
        return accelerator, *accelerator.prepare(*pair, *pieces(*pair))

    batches = list(loader())
    accelerator, *trained = start()
    train(accelerator, *trained, batches[:4])
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, *trained, batches[4:])
    again, *loaded = start()
    again.load_state(str(tmp_path / "state"))
    train(again, *loaded, batches[4:])
    ends = [gs.engine_of(each[0]).state_dict() for each in (trained, loaded)]
    assert_same(ends[1]["model"], ends[0]["model"])
    for index, entry in ends[0]["optimizer"]["state"].items():
        assert_same(
            {key: ends[1]["optimizer"]["state"][index][key] for key in ("exp_avg", "exp_avg_sq")},
            {key: entry[key] for key in ("exp_avg", "exp_avg_sq")},
        )


def test_a_frozen_model_beside_has_an_engine_of_its_own() -> None:
    accelerator = make(mixed_precision="bf16")
    unet, text = models()
    text.requires_grad_(False)
    optimizer, _ = pieces(unet)
    accelerator.prepare(unet, text, optimizer)
    assert gs.engine_of(unet) is not gs.engine_of(text)
    assert gs.engine_of(text).optimizer is None


def test_a_model_that_its_optimizer_leaves_stays_managed() -> None:
    accelerator = make(mixed_precision="bf16")
    unet, text = models()
    accelerator.prepare(unet, text, pieces(unet, text)[0])
    want = accelerator.get_state_dict(text)
    accelerator.prepare(pieces(unet)[0])
    engine = gs.engine_of(text)
    assert engine is not gs.engine_of(unet) and engine.optimizer is None
    assert_same(accelerator.get_state_dict(text), want)
    accelerator.prepare(pieces(unet, text)[0])
    assert gs.engine_of(text) is gs.engine_of(unet)
    assert_same(accelerator.get_state_dict(text), want)


def test_save_pretrained_of_each(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    accelerator = make(mixed_precision="bf16")
    unet, text = models()
    prepared = accelerator.prepare(unet, text, *pieces(unet, text))
    train(accelerator, *prepared, list(loader())[:2])
    accelerator.unwrap_model(unet).save_pretrained(
        tmp_path / "unet", state_dict=accelerator.get_state_dict(unet)
    )
    assert_same(
        load_file(tmp_path / "unet" / "model.safetensors"), accelerator.get_state_dict(unet)
    )


def test_what_cannot_be_done_is_refused_by_name() -> None:
    accelerator = make()
    unet, text = models()
    strange = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([*unet.parameters(), *text.parameters(), strange])
    with pytest.raises(gs.GeminiError, match=r"has 1 of the \d+ parameters of this AdamW"):
        accelerator.prepare(unet, text, optimizer)
    assert gs.engine_of(unet) is gs.engine_of(text) is None
    unet, text, optimizer, _ = accelerator.prepare(unet, text, *pieces(unet, text))
    accelerator.backward(loss_of(unet, text, next(iter(loader())), 0))
    with pytest.raises(gs.GeminiError, match="those of models that share an optimizer"):
        accelerator.clip_grad_norm_(unet.parameters(), 1.0)
    text.zero_grad()
    assert all(p.grad is None for p in text.parameters())
    assert any(p.grad is not None for p in unet.parameters())


def test_a_list_of_layers_is_one_model() -> None:
    accelerator = make(mixed_precision="bf16")
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    accelerator.prepare(layers)
    optimizer = accelerator.prepare(pieces(layers)[0])
    before = accelerator.get_state_dict(layers)
    assert list(before) == list(layers.state_dict())
    accelerator.backward(layers[1](layers[0](torch.ones(2, 8))).square().mean())
    optimizer.step()
    assert not torch.equal(accelerator.get_state_dict(layers)["0.weight"], before["0.weight"])
    assert gs.engine_of(layers).model is layers
