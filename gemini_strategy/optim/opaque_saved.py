"""The state dict of an optimizer that steps by itself: made and taken in by its own class, as if it were not managed.

A class may have a form of its own for what it saves (quantized states in a place of their own, counters beside the
groups). So its own methods run, on an optimizer that stands in for the managed one. They write nothing there: what
they leave is checked first.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gemini_strategy.optim import parts


def packed(
    optimizer: Optimizer, kind: type, entries: Mapping[nn.Parameter, dict[Any, Any]]
) -> dict[str, Any]:
    """What `kind.state_dict()` makes of these entries and the optimizer's groups. Its hooks do not run."""
    made = parts.stand_in(optimizer, optimizer.param_groups, entries, kind)
    return dict(made.state_dict())


@dataclass(frozen=True)
class Loaded:
    """What an optimizer is to have.

    Attributes:
        entries: of its parameters, as the state dict has them; tensors may be the state dict's.
        others: under other keys.
        options: of its groups.
        attributes: its own, which others are now.
    """

    entries: dict[nn.Parameter, Any]
    others: dict[Any, Any]
    options: list[dict[str, Any]]
    attributes: dict[str, Any]

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        kind: type,
        state: dict[str, Any],
        dtypes: Mapping[nn.Parameter, torch.dtype],
    ) -> Loaded:
        """What the class makes of a state dict.

        Where it has no way of its own, torch's is taken without its rounding of states to the parameters' dtypes.

        Args:
            optimizer: the managed one, which stays as it is.
            kind: its plain class.
            state: with as many groups and parameters as the optimizer has.
            dtypes: of the parameters, as the class steps them.

        Raises:
            BaseException: what the class raises.
        """
        own = parts.Own.of(optimizer)
        groups: list[dict[str, Any]] = []
        real: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            stands = [_like(p, dtypes) for p in group["params"]]
            real |= zip(stands, group["params"], strict=True)
            groups.append({"params": stands})
        made: Any = parts.stand_in(optimizer, groups, defaultdict(dict), kind)
        own.copied(optimizer, made).put(made)
        if kind.load_state_dict is Optimizer.load_state_dict:  # type: ignore[attr-defined]
            _load(made, state)
        else:
            made.load_state_dict(state)
        after = parts.Own.of(made)
        changed = own.changed(after)
        return cls(
            {real[p]: entry for p, entry in made.state.items() if p in real},
            {key: entry for key, entry in made.state.items() if key not in real},
            after.options,
            {name: value for name, value in after.attributes.items() if name in changed},
        )


def _like(parameter: nn.Parameter, dtypes: Mapping[nn.Parameter, torch.dtype]) -> nn.Parameter:
    """A parameter on the host that takes no memory."""
    dtype = dtypes.get(parameter, parameter.dtype)
    values = torch.zeros((), dtype=dtype, device="cpu").expand(parameter.shape)
    is_trained = parameter.requires_grad and dtype.is_floating_point
    return nn.Parameter(values, requires_grad=is_trained)


def entries_of(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[Any, Any]:
    """The entries of a state dict, by the optimizer's parameters where they are of one."""
    numbers, parameters = (
        itertools.chain.from_iterable(group["params"] for group in groups)
        for groups in (state["param_groups"], optimizer.param_groups)
    )
    known = dict(zip(numbers, parameters, strict=True))
    return {known.get(key, key): entry for key, entry in state["state"].items()}


def _load(made: Any, state: Mapping[str, Any]) -> None:
    """What torch's own load_state_dict does, but for its rounding."""
    saved = copy.deepcopy(
        [{k: v for k, v in g.items() if k != "params"} for g in state["param_groups"]]
    )
    states = defaultdict(dict, entries_of(made, state))
    groups = [
        {**options, "params": group["params"]}
        for options, group in zip(saved, made.param_groups, strict=True)
    ]
    made.__setstate__({"state": states, "param_groups": groups})
