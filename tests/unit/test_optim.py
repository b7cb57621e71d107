"""HybridAdam and CPUAdam as torch optimizers: state, groups, schedulers, memory, refusals."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from gemini_strategy.errors import GeminiError
from gemini_strategy.optim.adam import CPUAdam, HybridAdam, cast_model_, clip_coefficient, grad_norm


def small_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 17), nn.LayerNorm(17), nn.Linear(17, 5))


def set_grads(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def snapshot(model, optimizer):
    """Every bit that training has: weights, low parts, moments, steps."""
    tensors = []
    for p in model.parameters():
        tensors.append(p.detach().clone())
        tensors += [optimizer.state[p][key].clone() for key in sorted(optimizer.state.get(p, {}))]
        if hasattr(p, "_gm_low"):
            tensors.append(p._gm_low.clone())
    return tensors


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert torch.equal(x, y)


PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-mixed"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_is_fp32_and_keyed_as_documented(precision):
    model = cast_model_(small_model(), precision)
    optimizer = HybridAdam(model.parameters())
    set_grads(model, 0)
    optimizer.step()
    for p in model.parameters():
        state = optimizer.state[p]
        low = {torch.bfloat16: "remainder", torch.float16: "master"}.get(p.dtype)
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", *([low] if low else [])}
        assert state["step"].shape == ()
        assert state["step"].item() == 1.0
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
        assert not hasattr(p, "_gm_low")
        if low:
            assert state[low].dtype == (torch.int16 if low == "remainder" else torch.float32)


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_half_weights_train_as_fp32_masters_do(precision):
    """Given the same gradients, half weights follow the fp32 run: nothing is lost in between."""
    full, halves = small_model(), small_model()
    cast_model_(halves, precision)
    ours = HybridAdam(halves.parameters(), lr=1e-3, weight_decay=0.1)
    reference = HybridAdam(full.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(20):
        set_grads(halves, step)
        for p, q in zip(full.parameters(), halves.parameters(), strict=True):
            p.grad = q.grad.float()
        ours.step()
        reference.step()
    for p, q in zip(full.parameters(), halves.parameters(), strict=True):
        state = ours.state[q]
        if q.dtype is torch.bfloat16:
            bits = (q.detach().view(torch.int16).int() << 16) + state["remainder"].int()
            master = bits.view(torch.float32)
        else:
            master = state.get("master", q.detach())
        assert torch.equal(master, p.detach())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_dict_round_trip_resumes_bit_for_bit(precision):
    model = cast_model_(small_model(), precision)
    optimizer = HybridAdam(model.parameters(), weight_decay=0.1)
    for step in range(3):
        set_grads(model, step)
        optimizer.step()
    saved = pickle.loads(pickle.dumps((model.state_dict(), optimizer.state_dict())))
    other = cast_model_(small_model(seed=9), precision)
    resumed = HybridAdam(other.parameters(), lr=0.5)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert resumed.param_groups[0]["lr"] == 1e-3
    for step in range(3, 6):
        for m, o in ((model, optimizer), (other, resumed)):
            set_grads(m, step)
            o.step()
    assert_same(snapshot(model, optimizer), snapshot(other, resumed))


def test_loaded_tensors_are_copies():
    model = small_model()
    optimizer = HybridAdam(model.parameters())
    set_grads(model, 0)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    before = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    set_grads(model, 1)
    optimizer.step()
    for index, entry in state["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, before["state"][index][key])


def test_groups_have_the_same_options_after_loading() -> None:
    optimizer = HybridAdam(nn.Linear(2, 2).parameters())
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    for group in optimizer.param_groups:
        del group["params"]
        assert group == options


def test_hooks_see_plain_tensors():
    model = small_model()
    optimizer = HybridAdam(model.parameters())
    set_grads(model, 0)
    optimizer.step()
    seen = []
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.extend(type(v) for s in o.state.values() for v in s.values())
    )
    optimizer.load_state_dict(optimizer.state_dict())
    assert set(seen) == {torch.Tensor}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_takes_the_state_of_torch_optimizers(kind):
    model = small_model()
    theirs = kind(model.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(3):
        set_grads(model, step)
        theirs.step()
    mine = copy.deepcopy(model)
    optimizer = HybridAdam(mine.parameters(), adamw_mode=kind is torch.optim.AdamW)
    optimizer.load_state_dict(theirs.state_dict())
    for step in range(3, 6):
        set_grads(model, step)
        set_grads(mine, step)
        theirs.step()
        optimizer.step()
    assert optimizer.state[next(mine.parameters())]["step"].item() == 6
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    for p, q in zip(mine.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    back = kind(model.parameters())
    back.load_state_dict(optimizer.state_dict())
    back.step()


def test_a_dict_without_low_parts_keeps_the_masters():
    model = cast_model_(small_model(), "bf16-true")
    optimizer = HybridAdam(model.parameters())
    set_grads(model, 0)
    optimizer.step()
    p = model[0].weight
    remainder = optimizer.state[p]["remainder"].clone()
    assert remainder.any()
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry.pop("remainder")
    optimizer.load_state_dict(state)
    assert torch.equal(p._gm_low, remainder)
    with torch.no_grad():
        set_grads(model, 1)
        p.grad.zero_()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    assert torch.equal(optimizer.state[p]["remainder"], remainder)
    optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    assert not optimizer.state
    assert torch.equal(p._gm_low, remainder)


def test_groups_learning_rates_and_add_param_group():
    model = small_model()
    optimizer = HybridAdam([{"params": model[0].parameters(), "lr": 0.0}], lr=1e-2)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": torch.tensor(1e-2)})
    before = [p.detach().clone() for p in model.parameters()]
    set_grads(model, 0)
    optimizer.step()
    after = list(model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(after[:4], before[:4], strict=True))
    assert all(not torch.equal(a, b) for a, b in zip(after[4:], before[4:], strict=True))
    alone = small_model()
    HybridAdam(alone[2].parameters(), lr=float(torch.tensor(1e-2)))
    other = HybridAdam(alone[2].parameters(), lr=torch.tensor(1e-2))
    set_grads(alone, 0)
    other.step()
    assert torch.equal(alone[2].weight, model[2].weight)


def schedulers(o):
    s = torch.optim.lr_scheduler
    yield s.LambdaLR(o, lambda e: 0.9**e)
    yield s.MultiplicativeLR(o, lambda _: 0.9)
    yield s.StepLR(o, 2)
    yield s.MultiStepLR(o, [1, 3])
    yield s.ConstantLR(o)
    yield s.LinearLR(o)
    yield s.ExponentialLR(o, 0.9)
    yield s.CosineAnnealingLR(o, 5)
    yield s.PolynomialLR(o, 5)
    yield s.CosineAnnealingWarmRestarts(o, 3)
    yield s.CyclicLR(o, 1e-4, 1e-2, step_size_up=2, cycle_momentum=True)
    yield s.OneCycleLR(o, 1e-2, total_steps=9)
    yield s.ReduceLROnPlateau(o)
    yield s.SequentialLR(o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [2])
    yield s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)])


@pytest.mark.parametrize("index", range(15))
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_works_with_every_scheduler_as_torch_does(index, tensor_lr):
    lr = torch.tensor(1e-2) if tensor_lr else 1e-2
    ours, theirs = small_model(), small_model()
    runs = []
    for model, kind in ((ours, HybridAdam), (theirs, torch.optim.AdamW)):
        optimizer = kind(model.parameters(), lr=copy.deepcopy(lr), weight_decay=0.01)
        rates = []
        try:
            scheduler = list(schedulers(optimizer))[index]
        except Exception as error:  # some schedulers refuse some rates: then both must
            runs.append(type(error))
            continue
        for step in range(6):
            set_grads(model, step)
            optimizer.step()
            needs_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(1.0) if needs_metric else scheduler.step()
            rates.append(float(optimizer.param_groups[0]["lr"]))
        runs.append(rates)
    assert runs[0] == runs[1]
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_closure_and_return_value():
    model = small_model()
    optimizer = HybridAdam(model.parameters())

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = model(torch.ones(2, 13)).square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(20):
        last = optimizer.step(closure)
    assert last.item() < first.item()
    assert optimizer.step() is None


def make_parameters(kind):
    torch.manual_seed(1)
    base = torch.randn(6, 8, 4, 4)
    if kind == "channels_last":
        return base.to(memory_format=torch.channels_last)
    if kind == "transposed":
        return base.permute(3, 1, 0, 2)
    if kind == "sliced":
        return torch.randn(12, 8, 4, 9)[::2, :, :, 1:5]
    return base


@pytest.mark.parametrize("kind", ["contiguous", "channels_last", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_order_does_not_change_a_bit(kind, dtype):
    data = make_parameters(kind).to(dtype)
    if kind == "sliced":
        store = torch.zeros(12, 8, 4, 9, dtype=dtype)
        view = store[::2, :, :, 1:5]
        view.copy_(data)
        data = view
    p, q = nn.Parameter(data), nn.Parameter(data.contiguous().clone())
    assert p.is_contiguous() == (kind == "contiguous")
    a, b = HybridAdam([p], lr=1e-2), HybridAdam([q], lr=1e-2)
    generator = torch.Generator().manual_seed(4)
    for step in range(4):
        grad = torch.randn(p.shape, generator=generator).to(dtype)
        q.grad = grad.clone()
        p.grad = torch.empty_like(p).copy_(grad) if step % 2 else grad
        a.step()
        b.step()
    assert torch.equal(p, q)
    for key in a.state[p]:
        assert torch.equal(a.state[p][key], b.state[q][key]), key
    if kind == "sliced":
        assert not store[1::2].any()
        assert not store[::2, :, :, 0].any()


def test_memory_order_may_change_between_steps():
    torch.manual_seed(2)
    model = nn.Conv2d(3, 8, 3)
    other = copy.deepcopy(model)
    a, b = HybridAdam(model.parameters()), HybridAdam(other.parameters())
    for step in range(4):
        set_grads(model, step)
        set_grads(other, step)
        a.step()
        b.step()
        if step == 1:
            model.to(memory_format=torch.channels_last)
    assert torch.equal(model.weight, other.weight)


def test_clipping_is_fused_and_reset():
    model, other = small_model(), small_model()
    optimizer = HybridAdam(model.parameters(), weight_decay=0.1)
    reference = HybridAdam(other.parameters(), weight_decay=0.1)
    for step in range(4):
        set_grads(model, step)
        set_grads(other, step)
        grads = [p.grad for p in model.parameters()]
        expected = torch.nn.utils.get_total_norm(grads)
        norm = optimizer.clip_grad_norm_(0.5)
        assert norm.dtype == torch.float32
        assert norm.shape == ()
        torch.testing.assert_close(norm, expected)
        assert norm.item() == torch.tensor(grad_norm(grads)).item()
        factor = clip_coefficient(grad_norm(grads), 0.5)
        assert factor < 1.0
        optimizer.step()
        reference.step(grad_divisor=1.0 / factor)
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)
    # the factor is used once
    twin = copy.deepcopy(model)
    fresh = HybridAdam(twin.parameters(), weight_decay=0.1)
    fresh.load_state_dict(optimizer.state_dict())
    for m, o in ((model, optimizer), (twin, fresh)):
        set_grads(m, 9)
        o.step()
    assert_same(snapshot(model, optimizer), snapshot(twin, fresh))


def _drop_by_model(model, _):
    model.zero_grad()


def _drop_by_hand(model, _):
    for p in model.parameters():
        p.grad = None


def _zero_by_model(model, _):
    model.zero_grad(set_to_none=False)


def _another_backward(model, x):
    model(x).square().sum().backward()


def _one_more(model, x):
    model[0].weight.grad = None


@pytest.mark.parametrize(
    "change", [_drop_by_model, _drop_by_hand, _zero_by_model, _another_backward, _one_more]
)
def test_a_clip_is_for_the_gradients_that_it_has_seen(change):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = HybridAdam(model.named_parameters(), lr=1e-2)
    x = torch.randn(5, 4)
    model(x).square().sum().backward()
    optimizer.clip_grad_norm_(1e-3)
    change(model, x)
    model(x).square().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(GeminiError, match=r'"0.weight" \(3, 4\).*zero_grad\(\)'):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.clip_grad_norm_(1e-3)  # of the gradients as they are now
    optimizer.step()
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def test_a_clip_goes_with_its_gradients():
    """Nothing is left to clip, so nothing is refused, and the next step's are not clipped."""
    weights = []
    for clips in (False, True):
        torch.manual_seed(3)
        model = nn.Linear(4, 3)
        optimizer = HybridAdam(model.parameters(), lr=1e-2)
        x = torch.randn(5, 4)
        model(x).square().sum().backward()
        if clips:
            optimizer.clip_grad_norm_(1e-3)
        model.zero_grad()
        optimizer.step()  # a batch that is left out
        model(x).square().sum().backward()
        optimizer.step()
        weights.append(model.weight.detach().clone())
    assert torch.equal(*weights)


def test_clipping_like_torch_with_scale_and_infinity_norm():
    model = small_model()
    optimizer = HybridAdam(model.parameters())
    set_grads(model, 0)
    true = grad_norm([p.grad for p in model.parameters()])
    for p in model.parameters():
        p.grad *= 1024.0
    norm = optimizer.clip_grad_norm_(1.0, grad_divisor=1024.0)
    assert norm.item() == torch.tensor(true).item()
    largest = max(p.grad.abs().max().item() for p in model.parameters())
    assert optimizer.clip_grad_norm_(1.0, math.inf).item() == largest
    model[0].bias.grad[0] = math.nan
    assert math.isnan(optimizer.clip_grad_norm_(1.0, math.inf).item())
    assert math.isnan(optimizer.clip_grad_norm_(1.0).item())
    with pytest.raises(GeminiError, match="nan"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type is 1"):
        optimizer.clip_grad_norm_(1.0, 1.0)
    with pytest.raises(ValueError, match="max_norm is -1"):
        optimizer.clip_grad_norm_(-1.0)
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm_(1.0).item() == 0.0


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.5, math.inf, math.nan])
def test_clip_coefficient_is_that_of_torch(norm):
    gradient = nn.Parameter(torch.ones(1))
    gradient.grad = torch.ones(1)
    torch.nn.utils.clip_grads_with_norm_([gradient], 1.0, torch.tensor(norm, dtype=torch.float64))
    ours = torch.tensor([clip_coefficient(norm, 1.0)])
    torch.testing.assert_close(gradient.grad, ours, equal_nan=True)


def test_grad_divisor_is_exact_for_powers_of_two():
    model, other = small_model(), small_model()
    a, b = HybridAdam(model.parameters()), HybridAdam(other.parameters())
    for step in range(3):
        set_grads(model, step)
        set_grads(other, step)
        for p in other.parameters():
            p.grad *= 65536.0
        a.step()
        b.step(grad_divisor=65536.0)
    assert_same(snapshot(model, a), snapshot(other, b))


def test_an_fp16_weight_that_somebody_wrote_counts():
    model = cast_model_(nn.Linear(4, 4), "16-mixed")
    optimizer = HybridAdam(model.parameters(), lr=0.0)
    set_grads(model, 0)
    optimizer.step()
    master = optimizer.state[model.weight]["master"].clone()
    model.weight.data[1, 2] = 3.0
    set_grads(model, 1)
    optimizer.step()
    assert model.weight[1, 2] == 3.0
    master[1, 2] = 3.0
    assert torch.equal(optimizer.state[model.weight]["master"], master)


def test_a_graph_from_before_the_step_is_noticed():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = HybridAdam(model.parameters())
    loss = model(torch.ones(1, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_and_pickles():
    model = small_model()
    optimizer = HybridAdam(model.named_parameters())
    set_grads(model, 0)
    optimizer.step()
    optimizer.clip_grad_norm_(1e-3)
    both = copy.deepcopy((model, optimizer))
    again = pickle.loads(pickle.dumps(both))
    for m, o in (both, again):
        assert o.param_groups[0]["params"][0] is m[0].weight
        o.zero_grad()
        set_grads(m, 1)
        o.step()
    optimizer.zero_grad()
    set_grads(model, 1)
    optimizer.step()
    assert_same(snapshot(model, optimizer), snapshot(*both))
    assert_same(snapshot(model, optimizer), snapshot(*again))


def refused(model_or_parameter, match, error=TypeError, kind=HybridAdam):
    """A step that raises and changes nothing."""
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    parameters = [("good", other), ("embed.weight", model_or_parameter)]
    optimizer = kind(parameters)
    with pytest.raises(error, match=match):
        optimizer.step()
    assert torch.equal(other, torch.ones(3))
    assert not optimizer.state


def test_sparse_and_other_gradients_are_refused_by_name():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    refused(embedding.weight, r'"embed.weight" \(5, 3\) is torch.sparse_coo')
    expanded = nn.Parameter(torch.ones(1, 3).expand(4, 3))
    expanded.grad = torch.ones(4, 3)
    refused(expanded, "expanded view")
    meta = nn.Parameter(torch.ones(3, device="meta"))
    meta.grad = torch.ones(3, device="meta")
    refused(meta, '"embed.weight".* is on meta')


def test_dtypes_are_refused_when_the_optimizer_is_made():
    for dtype in (torch.complex64, torch.float64):
        p = nn.Parameter(torch.ones(3, dtype=dtype))
        with pytest.raises(TypeError, match=f'"w" \\(3,\\) is {dtype}'):
            HybridAdam([("w", p)])
        with pytest.raises(TypeError, match=f"parameter 0 of param group 0 .*{dtype}"):
            HybridAdam([p])
    good = HybridAdam([nn.Parameter(torch.ones(3))])
    with pytest.raises(TypeError, match="param group 1"):
        good.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
    assert len(good.param_groups) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr is -1"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1e-8}, "eps is"),
        ({"weight_decay": -1.0}, "weight_decay is -1"),
    ],
)
def test_hyperparameters_are_refused_when_the_optimizer_is_made(options, match):
    with pytest.raises(ValueError, match=match):
        HybridAdam([nn.Parameter(torch.ones(3))], **options)


def test_options_that_we_lack_are_refused_when_loaded():
    model = small_model()
    theirs = torch.optim.AdamW(model.parameters(), amsgrad=True)
    optimizer = HybridAdam(model.parameters())
    set_grads(model, 0)
    optimizer.step()
    theirs.step()
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.load_state_dict(theirs.state_dict())
    assert "amsgrad" not in optimizer.param_groups[0]
    other = copy.deepcopy(optimizer.state_dict())
    other["state"][1]["exp_avg"] = torch.ones(2)
    with pytest.raises(ValueError, match=r'"exp_avg" has shape \(2,\)'):
        optimizer.load_state_dict(other)
    assert_same(snapshot(model, optimizer), before)
    optimizer.step()


def test_empty_parameters_and_missing_gradients():
    empty, without = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.ones(2))
    empty.grad = torch.empty(0, 3)
    optimizer = CPUAdam([empty, without])
    optimizer.step()
    assert without not in optimizer.state
    assert optimizer.state[empty]["step"].item() == 1
    assert torch.equal(without, torch.ones(2))


def test_a_gradient_of_other_strides_or_in_fp32():
    p = nn.Parameter(torch.ones(4, 6))
    q = nn.Parameter(torch.ones(4, 6))
    a, b = CPUAdam([p]), CPUAdam([q])
    grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    p.grad, q.grad = grad.t(), grad.t().contiguous()
    a.step()
    b.step()
    assert torch.equal(p, q)


def test_cast_model_rounds_and_keeps_the_rest():
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.LayerNorm(5))
    model[0].bias.requires_grad_(False)
    model.register_buffer("extra", torch.ones(2, dtype=torch.float64))
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    identity = [id(p) for p in model.parameters()]
    assert cast_model_(model, "bf16-true") is model
    assert [id(p) for p in model.parameters()] == identity
    assert model[1].weight.dtype == torch.float32
    assert model[1].running_mean.dtype == torch.float32
    assert model.extra.dtype == torch.float64
    assert not hasattr(model[0].bias, "_gm_low")
    for name in ("0.weight", "2.weight"):
        p = model.get_parameter(name)
        assert p.dtype == torch.bfloat16
        bits = (p.detach().view(torch.int16).int() << 16) + p._gm_low.int()
        assert torch.equal(bits.view(torch.float32), masters[name])
    ties = nn.Linear(2, 1, bias=False)
    ties.weight.data = torch.tensor([1.0 + 2.0**-8, -1.0 - 2.0**-8])[None]
    cast_model_(ties, "bf16-true")
    assert ties.weight.tolist() == [[1.0 + 2.0**-7, -1.0 - 2.0**-7]]


def test_cast_model_fp16_ties_and_refusals():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    weight = model[0].weight.detach().clone()
    cast_model_(model, "16-mixed")
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight._gm_low, weight)
    assert torch.equal(model[0].weight, weight.half())
    with pytest.raises(GeminiError, match=r'"0.weight" was cast'):
        cast_model_(model, "16-mixed")
    untouched = small_model()
    assert cast_model_(untouched, None)[0].weight.dtype == torch.float32
    with pytest.raises(ValueError, match="bf17"):
        cast_model_(untouched, "bf17")
    set_grads(untouched, 0)
    with pytest.raises(GeminiError, match="zero_grad"):
        cast_model_(untouched, "bf16-true")
    complex_model = nn.Linear(2, 2, dtype=torch.complex64)
    with pytest.raises(TypeError, match=r'"weight" is torch.complex64'):
        cast_model_(complex_model, "bf16-true")


def test_cast_keeps_dense_memory_orders():
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    weight = model.weight.detach().clone()
    cast_model_(model, "bf16-true")
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    bits = (model.weight.detach().view(torch.int16).int() << 16) + model.weight._gm_low.int()
    assert torch.equal(bits.view(torch.float32), weight)


def test_step_order_and_threads_do_not_change_a_bit():
    """Parameters in one group or in many, in any order: the same bits."""
    model, other = small_model(), small_model()
    a = HybridAdam(model.parameters())
    b = HybridAdam([{"params": [p]} for p in reversed(list(other.parameters()))])
    for step in range(3):
        set_grads(model, step)
        set_grads(other, step)
        a.clip_grad_norm_(0.1)
        b.clip_grad_norm_(0.1)
        a.step()
        b.step()
    assert_same(snapshot(model, a), snapshot(other, b))


# ---- 16-bit weights that are written -------------------------------------------------------------


def _stepped(dtype: torch.dtype) -> tuple[nn.Parameter, HybridAdam]:
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(64, 8).to(dtype))
    optimizer = HybridAdam([p], lr=1e-2)
    for _ in range(3):
        p.grad = torch.randn(64, 8).to(dtype)
        optimizer.step()
    return p, optimizer


def _low(p: nn.Parameter, optimizer: HybridAdam) -> torch.Tensor:
    key = "remainder" if p.dtype is torch.bfloat16 else "master"
    return optimizer.state_dict()["state"][0][key].clone()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_written_weight_is_its_own_master_where_it_is_another(dtype: torch.dtype) -> None:
    p, optimizer = _stepped(dtype)
    low, weight = _low(p, optimizer), p.detach().clone()
    p.data[::2] = 0  # a remainder below it would make no number of a zero
    own = torch.zeros_like(low)
    assert torch.equal(_low(p, optimizer)[::2], own[::2])
    assert torch.equal(_low(p, optimizer)[1::2], low[1::2])
    p.data = weight  # and where it is the same again, its master is
    assert torch.equal(_low(p, optimizer), low)
    p.data[::2] = 0
    p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert not p.isnan().any() and not p[::2].any()
    assert torch.equal(_low(p, optimizer)[1::2], low[1::2])
    p.data[::2] = weight[::2]  # the step has ended it
    low = _low(p, optimizer)
    assert torch.equal(low[::2], weight[::2].to(low.dtype) if low.is_floating_point() else own[::2])


def test_a_parameter_that_was_resized_is_refused() -> None:
    """As transformers' resize_token_embeddings does; the states have the old shape."""
    p, optimizer = _stepped(torch.float32)
    p.grad = None
    p.data = torch.zeros(100, 8)
    p.grad = torch.ones(100, 8)
    with pytest.raises(ValueError, match=r"\(100, 8\) has an exp_avg of shape \(64, 8\)"):
        optimizer.step()
    assert not p.any()
