"""One engine over several models that one optimizer trains: the bits of the same loop, names, states, the way back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gemini_strategy as gs
from helpers.pairs import turns
from helpers.ranks import run_ranks, values
from helpers.reference import (
    Managed,
    Outcome,
    Plain,
    Recipe,
    assert_same_bits,
    assert_same_outcome,
    assert_trained,
    drive,
    plain,
    start,
    state_bytes,
)

pytestmark = pytest.mark.core  # make check runs these on a core with its own assertions

WIDTH, WORDS = 32, 40
PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "16-mixed")


class Text(nn.Module):
    """A text encoder."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(2)
        )
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(self.norm(x))
        return x.mean(1)


class Unet(nn.Module):
    """What denoises, given what the text encoder says, or what gives that; with checkpointing."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Dropout(0.1), nn.Linear(2 * width, width))
            for _ in range(3)
        )
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, said: Any = None) -> Tensor:
        x = self.stem(x)
        said = said() if callable(said) else said
        x = x if said is None else x + said
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Tied(nn.Module):
    """Shares the words of a text encoder."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = text.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


def both() -> nn.ModuleList:
    return nn.ModuleList([Unet(), Text()])


class Pair:
    """As tests/helpers/zoo.py has cases. Each step calls the two another way."""

    build = staticmethod(both)

    @staticmethod
    def batch(step: int) -> tuple[int, Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(90_000 + step)
        noise = torch.randn(2, 6, WIDTH, generator=g)
        return step, noise[0], noise[1], torch.randint(0, WORDS, (6, 5), generator=g)

    @staticmethod
    def loss(run: Any, batch: tuple[int, Tensor, Tensor, Tensor]) -> Tensor:
        step, x, y, tokens = batch
        unet, text = called(run, 0), called(run, 1)
        if step % 5 == 0:
            out = unet(x, text(tokens))
        elif step % 5 == 1:  # the text encoder is not there
            out = unet(x)
        elif step % 5 == 2:  # twice each, the other way round
            out = unet(x) + unet(y, text(tokens) + text(tokens.flip(0)))
        elif step % 5 == 3:  # one inside the other
            out = unet(x, lambda: text(tokens))
        else:
            with torch.no_grad():
                before = text(tokens)
            out = unet(x, before) * text(tokens).float().tanh()
        return (out.float() - y).square().mean()


def called(run: Any, number: int) -> Any:
    """One model of a run: under an engine itself, else as the precision has it."""
    part = run.model[number]
    if run.engine is not None:
        return part
    return Plain(part, run.optimizer, dataclasses.replace(run.recipe, gradient_dtype=None))


def manage(models: list[nn.Module], recipe: Recipe, **how: Any) -> Managed:
    parameters = [p for model in models for p in model.parameters()]
    options = {"lr": recipe.lr, "weight_decay": recipe.weight_decay}
    optimizer = gs.HybridAdam(dict.fromkeys(parameters), **options)
    engine = gs.manage(
        models,
        optimizer,
        precision=recipe.precision,
        gradient_dtype=recipe.gradient_dtype,
        device="cpu",
        initial_scale=recipe.initial_scale,
        growth_interval=recipe.growth_interval,
        hysteresis=recipe.hysteresis,
        **{"chunk_size": 4096, **how},
    )
    return Managed(engine, recipe)


def managed(recipe: Recipe, build: Any = both, **how: Any) -> Managed:
    return manage(list(start(build, recipe, "cpu")), recipe, **how)


def reference(recipe: Recipe, case: Any = Pair) -> Outcome:
    run = plain(case.build, recipe)
    before = run.outcome()
    drive(run, case, recipe.steps)
    after = run.outcome()
    assert_trained(before, after)
    return after


# ---- bits ----------------------------------------------------------------------------------------

RECIPES = (
    {"clip": 0.35},
    {"accumulate": 2},
    {"clip": 0.35, "accumulate": 3, "gradient_dtype": torch.float32},
)
PLACES = ({"placement_policy": "cpu"}, {"placement_policy": "cuda"}, {}, {"device_budget": 0.45})


@turns(precision=PRECISIONS, number=range(len(RECIPES)))
def test_bits(precision: str, number: int) -> None:
    recipe = Recipe(precision, steps=12, **RECIPES[number])
    want = reference(recipe)
    whole = state_bytes(both, recipe)
    for place in PLACES:
        how = dict(place)
        if "device_budget" in how:
            how["device_budget"] = int(how["device_budget"] * whole)
        run = managed(recipe, **how)
        drive(run, Pair, recipe.steps)
        assert_same_outcome(run.outcome(), want)
        stats = run.engine.stats()
        assert stats["parameters"] == sum(p.numel() for p in run.model.parameters())
        assert stats["device_peak_bytes"] <= how.get("device_budget", 1 << 60)
        run.engine.close()


@pytest.mark.parametrize("budget", [None, 0.45])
def test_updates_inside_backward(budget: float | None) -> None:
    recipe = Recipe("bf16-mixed", steps=12)
    want = reference(recipe)
    size = None if budget is None else int(budget * state_bytes(both, recipe))
    run = managed(recipe, device_budget=size)
    run.backward = lambda loss: run.engine.backward(loss, step=True)  # type: ignore[method-assign]
    drive(run, Pair, recipe.steps)
    assert_same_outcome(run.outcome(), want)
    assert run.engine.stats()["immediate_updates"] or run.engine.stats()["planned"]


def test_one_of_them_is_frozen() -> None:
    class Case(Pair):
        @staticmethod
        def build() -> nn.ModuleList:
            models = both()
            models[1].requires_grad_(False)
            return models

        @staticmethod
        def loss(run: Any, batch: Any) -> Tensor:
            _, x, y, tokens = batch
            return (called(run, 0)(x, called(run, 1)(tokens)).float() - y).square().mean()

    recipe = Recipe("bf16-mixed", steps=5, clip=0.35)
    want = reference(recipe, Case)
    run = managed(recipe, Case.build, placement_policy="cpu")
    drive(run, Case, recipe.steps)
    assert_same_outcome(run.outcome(), want)


def test_a_parameter_of_both_is_one() -> None:
    class Case(Pair):
        @staticmethod
        def build() -> nn.ModuleList:
            text = Text()
            return nn.ModuleList([text, Tied(text)])

        @staticmethod
        def loss(run: Any, batch: Any) -> Tensor:
            scores = called(run, 1)(called(run, 0)(batch[3]))
            return nn.functional.cross_entropy(scores.float(), batch[3][:, 0])

    recipe = Recipe("bf16-true", steps=6, clip=0.35, accumulate=2)
    want = reference(recipe, Case)
    run = managed(recipe, Case.build, placement_policy="cpu")
    drive(run, Case, recipe.steps)
    assert_same_outcome(run.outcome(), want)
    state = run.engine.model_state_dict()
    assert state["0.words.weight"] is state["1.out.weight"]
    text, tied = run.model
    run.engine.close()
    assert text.words.weight is tied.out.weight


def check_ranks(rank: int, size: int, folder: str) -> None:
    recipe = Recipe("bf16-mixed", steps=10, clip=0.35)
    want = dataclasses.replace(reference(recipe), norms=[])
    own = dataclasses.replace(recipe, seed=recipe.seed + 100 * rank)  # rank 0's counts
    for how in ({"placement_policy": "cpu"}, {"device_budget": 120_000}):
        run = managed(own, timeout=300.0, **how)
        drive(run, Pair, recipe.steps)
        assert_same_outcome(dataclasses.replace(run.outcome(), norms=[]), want)
        run.engine.save(folder)
        run.engine.close()


def test_two_ranks_and_a_checkpoint_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    values(run_ranks(2, tmp_path, check_ranks, str(folder)))
    recipe = Recipe("bf16-mixed", steps=14, clip=0.35)
    run = managed(dataclasses.replace(recipe, seed=99))
    run.engine.load(folder)
    drive(run, Pair, 4, first=10)
    whole = managed(recipe)
    drive(whole, Pair, 14)
    assert_same_state(run.engine.state_dict(), whole.engine.state_dict())


def assert_same_state(got: Any, want: Any, what: str = "state") -> None:
    if isinstance(want, Tensor):
        assert_same_bits(got, want, what)
    elif isinstance(want, dict):
        assert list(got) == list(want), what
        for key in want:
            assert_same_state(got[key], want[key], f"{what}[{key}]")
    elif isinstance(want, list):
        assert len(got) == len(want), what
        for index, value in enumerate(want):
            assert_same_state(got[index], value, f"{what}[{index}]")
    else:
        assert got == want, what


# ---- names and states ----------------------------------------------------------------------------


def trained(steps: int = 4, **how: Any) -> Managed:
    run = managed(Recipe("bf16-mixed", steps=steps, clip=0.35), **how)
    drive(run, Pair, steps)
    return run


def test_models_stay_who_they_are() -> None:
    unet, text = models = [Unet(), Text()]
    inner = [*unet.modules(), *text.modules()]
    parameters = [*unet.parameters(), *text.parameters()]
    run = manage(models, Recipe("bf16-mixed"))
    engine = run.engine
    assert (type(unet), type(text)) == (Unet, Text)
    assert all(a is b for a, b in zip(inner, [*unet.modules(), *text.modules()], strict=True))
    assert [*unet.parameters(), *text.parameters()] == parameters
    assert gs.engine_of(unet) is gs.engine_of(text) is gs.engine_of(engine.model) is engine
    assert list(engine.model) == models
    assert repr(engine).startswith("<Engine: Unet + Text on cpu")
    assert "Unet + Text" in engine.report()
    engine.close()
    assert gs.engine_of(unet) is gs.engine_of(text) is None
    for model in models:
        assert "forward" not in vars(model)
        assert all(type(p) is nn.Parameter and p.dtype is torch.float32 for p in linears(model))
    unet(torch.ones(1, WIDTH))


def linears(model: nn.Module) -> list[nn.Parameter]:
    return [p for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters()]


def test_names() -> None:
    engine = trained().engine
    names = [name for name, _ in engine.model.named_parameters()]
    assert names[0] == "0.stem.weight" and "1.words.weight" in names
    assert [slot.name for slot in engine._runtime.slots] == names
    with pytest.raises(gs.GuardError, match=r"1\.words\.weight"):
        engine.model[1].load_state_dict(Text().state_dict(), assign=True)
    named = gs.manage(nn.ModuleDict({"unet": Unet(), "text": Text()}), device="cpu")
    assert next(slot.name for slot in named._runtime.slots) == "unet.stem.weight"
    assert named.model["text"](torch.zeros(1, 1, dtype=torch.long)).shape == (1, WIDTH)


def test_the_state_of_each_is_its_own() -> None:
    engine = trained().engine
    unet, text = engine.model
    assert list(unet.state_dict()) == list(Unet().state_dict())
    whole = engine.model_state_dict()
    for number, model in enumerate(engine.model):
        state = model.state_dict()
        assert {f"{number}.{name}" for name in state} <= set(whole)
        fresh = {
            name: torch.randn_like(value) for name, value in type(model)().state_dict().items()
        }
        model.load_state_dict(fresh)
        loaded = engine.model_state_dict()
        for name, value in fresh.items():
            assert_same_bits(loaded[f"{number}.{name}"], value, name)
    engine.load_model_state_dict(whole)
    assert_same_state(engine.model_state_dict(), whole)
    engine.close(dtype=torch.float32)
    for number, model in enumerate((unet, text)):
        for name, value in model.state_dict().items():
            assert_same_bits(value, whole[f"{number}.{name}"], name)


def test_save_and_load(tmp_path: Path) -> None:
    run = trained(steps=6)
    run.engine.save(tmp_path / "saved", {"step": 6})
    drive(run, Pair, 4, first=6)
    again = managed(Recipe("bf16-mixed", clip=0.35, seed=5), placement_policy="cpu")
    assert again.engine.load(tmp_path / "saved") == {"step": 6}
    drive(again, Pair, 4, first=6)
    assert_same_state(again.engine.state_dict(), run.engine.state_dict())
    state = run.engine.state_dict()
    third = managed(Recipe("bf16-mixed", clip=0.35, seed=6))
    third.engine.load_state_dict(state)
    assert_same_state(third.engine.state_dict(), state)
    other = manage([Text(), Unet()], Recipe("bf16-mixed"))
    with pytest.raises(gs.GeminiError, match=r"it lacks .*it has, and this model does not,"):
        other.engine.load(tmp_path / "saved")


def test_save_pretrained_is_of_one(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    engine = trained().engine
    with pytest.raises(
        gs.GeminiError, match=r"has Unet \+ Text: call it for each of them, with module="
    ):
        engine.save_pretrained(tmp_path / "no")
    whole = engine.model_state_dict()
    for number, model in enumerate(engine.model):
        folder = engine.save_pretrained(tmp_path / str(number), module=model)
        for name, value in load_file(folder / "model.safetensors").items():
            assert_same_bits(value, whole[f"{number}.{name}"], name)


def test_weights_are_of_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    source = [Unet(), Text()]
    paths = {str(number): tmp_path / f"{number}.safetensors" for number in range(2)}
    for path, model in zip(paths.values(), source, strict=True):
        save_file(model.state_dict(), path)
    with torch.device("meta"):
        models = [Unet(), Text()]
    with pytest.raises(gs.GeminiError, match=r'several models weights=."0": path, "1": other.'):
        gs.manage(models, weights=paths["0"], device="cpu")
    optimizer = gs.HybridAdam([p for model in models for p in model.parameters()])
    engine = gs.manage(models, optimizer, weights=paths, device="cpu")
    for number, model in enumerate(source):
        for name, value in model.state_dict().items():
            assert_same_bits(engine.model_state_dict()[f"{number}.{name}"], value, name)


# ---- what may happen between two forwards --------------------------------------------------------


class Stop(BaseException):
    """As KeyboardInterrupt."""


@pytest.mark.parametrize("error", [Stop, ValueError])
@pytest.mark.parametrize("is_nested", [False, True])
def test_an_error_between_two_forwards(error: type[BaseException], is_nested: bool) -> None:
    recipe = Recipe("bf16-mixed", steps=8, clip=0.35)
    want = reference(recipe)
    run = managed(recipe, placement_policy="cpu")
    unet, text = run.model
    drive(run, Pair, 3)
    _, x, _, tokens = Pair.batch(0)
    numbers = torch.get_rng_state()
    calls = text.calls.clone()

    def stop(module: nn.Module, *_: Any) -> None:
        raise error("now")

    handle = (text.blocks[1][0] if is_nested else unet.blocks[2][0]).register_forward_hook(stop)
    with pytest.raises(error, match="now"):
        unet(x, (lambda: text(tokens)) if is_nested else text(tokens))
    handle.remove()
    assert not any(unit.n_entered for unit in run.engine._runtime.units)
    assert not torch.is_autocast_enabled("cpu")
    text.calls.copy_(calls)
    torch.set_rng_state(numbers)
    drive(run, Pair, 5, first=3)
    assert_same_outcome(run.outcome(), want)


def test_each_forward_converts_its_inputs() -> None:
    for precision, dtype in (("bf16-true", torch.bfloat16), ("bf16-mixed", torch.bfloat16)):
        models = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8))]
        engine = gs.manage(models, precision=precision, device="cpu")
        for model in models:
            assert model(torch.ones(2, 8)).dtype is dtype
        engine.close()


def test_what_is_no_root_is_left_alone() -> None:
    unet, text = Unet(), Text()
    loss = nn.MSELoss()
    engine = gs.manage([unet, loss, unet.head, text], precision="bf16-true", device="cpu")
    assert [root.model for root in engine._runtime.roots] == [unet, text]
    assert loss(torch.ones(2), torch.zeros(2)).dtype is torch.float32
    assert gs.engine_of(unet.head) is engine
    engine.close()


def test_a_copy_of_one_is_an_ordinary_model() -> None:
    run = trained()
    text = run.model[1]
    copied = copy.deepcopy(text)
    assert gs.engine_of(copied) is None and copied.forward.__self__ is copied
    tokens = Pair.batch(0)[3]
    twin = copy.deepcopy(text)
    gs.cast_model_(twin, "bf16-mixed")  # the copy has the masters
    with torch.autocast("cpu", torch.bfloat16):
        want = twin(tokens)
    with torch.inference_mode():
        assert_same_bits(text(tokens), want)
    copied(tokens).sum().backward()
    assert text.words.weight.grad is None
    whole = copy.deepcopy(run.engine.model)
    assert [type(model) for model in whole] == [Unet, Text] and gs.engine_of(whole) is None


def test_gradients_of_one_are_dropped_alone() -> None:
    run = trained()
    unet, text = run.model
    run.backward(Pair.loss(run, Pair.batch(0)))
    text.zero_grad()
    assert all(p.grad is None for p in text.parameters())
    assert all(p.grad is not None for p in unet.parameters())
    run.engine.zero_grad()
    assert all(p.grad is None for p in unet.parameters())


def test_dropped_models_give_their_memory_back() -> None:
    from gemini_strategy.parameters import absent

    gc.collect()
    before = len(list(absent.nets))
    run = trained()
    run.engine.close()
    del run
    gc.collect()
    assert len(list(absent.nets)) == before


# ---- estimates, refusals -------------------------------------------------------------------------


def test_estimate() -> None:
    with torch.device("meta"):
        models = [Unet(128), Text(128)]
        inputs = torch.empty(6, 128), torch.empty(6, 5, dtype=torch.long)

    def step(model: Any, inputs: Any) -> Tensor:
        unet, text = model
        return unet(inputs[0], text(inputs[1])).float().square().mean()

    given = {"precision": "bf16-mixed", "device_budget": "1MB", "gpu": "rtx4090"}
    found = gs.estimate(models, inputs, step_fn=step, **given)
    assert found.model == "Unet + Text"
    assert found.parameters == sum(p.numel() for m in models for p in m.parameters())
    with pytest.raises(gs.GeminiError, match=r"Unet \+ Text has no forward: give step_fn"):
        gs.estimate(models, inputs, **given)


def test_what_is_no_model_is_refused_by_name() -> None:
    unet, text = Unet(), Text()
    for given, message in (
        ([], "a list of nothing"),
        ([unet, "text"], "a list of str"),
        (unet.parameters(), "or a list of them, got generator"),
        ({"unet": unet}, "or a list of them, got dict"),
    ):
        with pytest.raises(TypeError, match=message):
            gs.manage(given, device="cpu")
    optimizer = torch.optim.AdamW([*unet.parameters(), *text.parameters()])
    with pytest.raises(gs.GeminiError, match=r"manage\(\[model, other\], optimizer\)"):
        gs.manage(unet, optimizer, device="cpu")
    with contextlib.closing(gs.manage([unet, text], optimizer, device="cpu")):
        with pytest.raises(gs.GeminiError, match="managed already"):
            gs.manage([text], device="cpu")
        with pytest.raises(gs.GeminiError, match=r"where it trains both, manage\(\[model, other\]"):
            gs.manage(Unet(), optimizer, device="cpu")


def test_what_fails_leaves_all_of_them_as_they_were() -> None:
    models = [Unet(), Text()]
    before = [dict(vars(model)) for model in models]
    classes = [type(p) for model in models for p in model.parameters()]
    models[1].norm.register_buffer("bad", models[1].norm.weight.detach())
    before = [dict(vars(model)) for model in models]
    with pytest.raises(
        gs.GeminiError, match=r"1\.norm\.bad shows the memory of parameter 1\.norm\.weight"
    ):
        gs.manage(models, device="cpu")
    assert [dict(vars(model)) for model in models] == before
    assert [type(p) for model in models for p in model.parameters()] == classes
