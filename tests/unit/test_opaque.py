"""The tensors of an optimizer's state entry: found whatever its form, and put back in the same form."""

import collections
import json
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gemini_strategy import GeminiError
from gemini_strategy.optim import opaque


class Pair(NamedTuple):
    left: Any
    right: Any


class Coded(torch.Tensor):
    """Made of other tensors, as quantized states are."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, sign: str) -> "Coded":
        kind = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        kind.codes, kind.scale, kind.sign = codes, scale, sign
        return kind

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.sign

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, sign: Any, size: Any, stride: Any) -> "Coded":
        return cls(inner["codes"], inner["scale"], sign)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Marked(torch.Tensor):
    """A class of tensors that cannot be taken apart."""


def paths(entry: Any) -> list[opaque.Path]:
    return [path for path, _ in opaque.leaves(entry)]


def test_leaves_have_paths_through_all_containers() -> None:
    a, b, c, d, e, f = (torch.full((3,), float(i)) for i in range(6))
    entry = {
        "list": [a, {"deep": (b,)}, None, 3],
        "pair": Pair(c, "text"),
        "coded": Coded(d, Coded(e, f, "inner"), "outer"),
        "nothing": None,
        "number": 4,
        7: torch.tensor(1.0),
    }
    found = opaque.leaves(entry)
    assert paths(entry) == [
        (7,),
        ("coded", "codes"),
        ("coded", "scale", "codes"),
        ("coded", "scale", "scale"),
        ("list", 0),
        ("list", 1, "deep", 0),
        ("pair", 0),
    ]
    assert [id(tensor) for _, tensor in found[1:]] == [id(x) for x in (d, e, f, a, b, c)]
    assert [tuple(json.loads(json.dumps(path))) for path, _ in found] == paths(entry)


def test_the_order_is_that_of_paths_not_of_the_dict() -> None:
    one = {"a": torch.zeros(2), "b": torch.zeros(2)}
    other = {key: one[key] for key in ("b", "a")}
    assert paths(one) == paths(other) == [("a",), ("b",)]
    assert opaque.leaves(torch.zeros(2))[0][0] == ()
    assert opaque.leaves(None) == opaque.leaves({}) == []


def test_with_leaves_keeps_the_form_and_shares_the_rest() -> None:
    note = object()
    table = {"x": 1}
    entry = collections.defaultdict(
        list,
        {
            "pair": Pair(torch.zeros(2), note),
            "plain": (torch.zeros(2), 5),
            "ordered": collections.OrderedDict(z=torch.zeros(2), a=table),
            "coded": Coded(torch.zeros(2), torch.ones(1), "minus"),
            "step": torch.tensor(3.0),
            "table": table,
        },
    )
    new = {path: torch.full_like(t, 9) for path, t in opaque.leaves(entry) if path != ("step",)}
    made = opaque.with_leaves(entry, new)
    assert type(made) is type(entry) and made.default_factory is list
    assert list(made) == list(entry)
    assert type(made["pair"]) is Pair and made["pair"].right is note
    assert type(made["plain"]) is tuple and made["plain"][1] == 5
    assert type(made["ordered"]) is collections.OrderedDict and made["ordered"]["a"] is table
    assert type(made["coded"]) is Coded and made["coded"].sign == "minus"
    assert made["step"] is entry["step"] and made["table"] is table
    again = dict(opaque.leaves(made))
    assert all(again[path] is tensor for path, tensor in new.items())
    assert float(entry["pair"].left.sum()) == 0  # the entry itself is as it was


def test_with_leaves_refuses_a_path_that_is_none() -> None:
    with pytest.raises(GeminiError, match="state exp_avg.codes is none of the parameter's.* m"):
        opaque.with_leaves({"m": torch.zeros(2)}, {("exp_avg", "codes"): torch.zeros(2)})


def test_a_tensor_in_two_places_is_one_leaf_and_stays_one() -> None:
    tensor = torch.zeros(4)
    entry = {"b": [tensor], "a": tensor, "coded": Coded(torch.ones(4), tensor, "x")}
    assert paths(entry) == [("a",), ("coded", "codes")]
    made = opaque.with_leaves(entry, {("a",): torch.ones(4)})
    assert made["a"] is made["b"][0] is made["coded"].scale


def test_views_of_one_storage_are_apart_unless_they_overlap() -> None:
    whole = torch.arange(8.0)
    assert paths({"a": whole[:4], "b": whole[4:]}) == [("a",), ("b",)]
    for other in (whole[3:6], whole.view(2, 4), whole[::2]):
        with pytest.raises(
            GeminiError, match=r"a and b of one parameter share memory \(\d+ bytes\)"
        ):
            opaque.leaves({"a": whole[:4], "b": other})


def test_what_a_leaf_is() -> None:
    view = torch.zeros(100)[10:34].view(4, 6).t()
    leaf = opaque.Leaf.of(("m",), view)
    assert leaf == opaque.Leaf(("m",), torch.float32, (6, 4), (1, 6))
    assert leaf.nbytes == 96
    assert opaque.Leaf.of((), torch.zeros(2, 1, 3)[:, :, :].bfloat16()).nbytes == 12
    channels = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert opaque.Leaf.of((), channels).stride == (48, 1, 12, 3)
    holes = torch.zeros(4, 6)[:, :3]
    for tensor in (holes, torch.zeros(1).expand(5), torch.zeros(8)[::2]):
        with pytest.raises(GeminiError, match="state m.codes .*strides .*contiguous"):
            opaque.Leaf.of(("m", "codes"), tensor)


def test_which_leaves_go_into_a_chunk() -> None:
    parameter = nn.Parameter(torch.zeros(5))
    kept = [torch.zeros(2), torch.zeros(1, 2), torch.zeros(3, dtype=torch.uint8)]
    others = [torch.tensor(1.0), torch.zeros(1), torch.zeros(0), torch.zeros(5, device="meta")]
    assert all(opaque.is_kept_in_chunk(tensor, parameter) for tensor in kept)
    assert not any(opaque.is_kept_in_chunk(tensor, parameter) for tensor in others)


def test_leaves_that_several_entries_share() -> None:
    table = torch.zeros(256)
    entries = [{"m": torch.zeros(4), "map": {"t": table[:]}, "twice": [x := torch.zeros(2), x]}] + [
        {"m": torch.zeros(4), "map": {"t": table}} for _ in range(2)
    ]
    assert opaque.shared(entries) == {("map", "t")}
    assert opaque.shared(entries[:1]) == opaque.shared([]) == set()
    coded = [{"c": Coded(torch.zeros(4), table, "x")} for _ in range(2)]
    assert opaque.shared(coded) == {("c", "scale")}


def test_what_cannot_be_taken_apart_is_refused_by_name() -> None:
    refused: list[tuple[Any, str]] = [
        ({"m": torch.zeros(3).as_subclass(Marked)}, "state m is a Marked.*__tensor_flatten__"),
        ({"m": torch.zeros(3).to_sparse()}, "state m has the layout torch.sparse_coo"),
        ({"m": {0.5: torch.zeros(3)}}, "state m has tensors under 0.5, a float"),
    ]
    for entry, text in refused:
        with pytest.raises(GeminiError, match=text):
            opaque.leaves(entry)
    assert opaque.leaves({"m": {0.5: 1}}) == []
    assert paths({"p": nn.Parameter(torch.zeros(3))}) == [("p",)]
