"""What transformers and peft say of their models: names in files, ties, patterns that are ignored, configurations.

Nothing here imports either: a program that has a model of them has loaded them.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini_strategy.errors import GeminiError

_ROTARY = re.compile(r"rotary_emb\.inv_freq")
_POSITIONS = re.compile(r"(^|\.)position_ids$")


def _loaded(module: str, name: str, package: str = "transformers.") -> Any:
    """A name of one of its modules; None where that is not loaded or has no such name."""
    return getattr(sys.modules.get(package + module), name, None)


def is_transformer(module: nn.Module) -> bool:
    """Whether `module` is a model of the package transformers, as a whole."""
    model_class = _loaded("modeling_utils", "PreTrainedModel")
    return model_class is not None and isinstance(module, model_class)


def adapter_parameters(model: nn.Module) -> set[int]:
    """id() of the parameters that peft's `set_adapter` trains or freezes, of every adapter that the model has now."""
    kinds = (
        _loaded("tuners_utils", "BaseTunerLayer", "peft.tuners."),
        _loaded("other", "AuxiliaryTrainingWrapper", "peft.utils."),
    )
    kinds = tuple(kind for kind in kinds if kind is not None)
    found: set[int] = set()
    for module in model.modules() if kinds else ():
        for name in module.adapter_layer_names if isinstance(module, kinds) else ():
            own = getattr(module, name, None)
            if isinstance(own, nn.Module):
                found.update(id(parameter) for parameter in own.parameters())
    return found


def base_prefix(module: nn.Module) -> str:
    """What the names of a model without its head lack ("" without such a thing)."""
    return getattr(module, "base_model_prefix", "") if is_transformer(module) else ""


def renaming(module: nn.Module) -> Callable[[str], str | None]:
    """Its new names for those of older files; None for what it would compute from several tensors."""
    mapping = _loaded("conversion_mapping", "get_model_conversion_mapping")
    rename_key = _loaded("core_model_loading", "rename_source_key")
    converter_class = _loaded("core_model_loading", "WeightConverter")
    if not is_transformer(module) or None in (mapping, rename_key, converter_class):
        return lambda name: name
    changes = mapping(module)
    converters = [change for change in changes if isinstance(change, converter_class)]
    renamings = [change for change in changes if not isinstance(change, converter_class)]

    def rename(name: str) -> str | None:
        now, converter = rename_key(name, renamings, converters)
        return None if converter is not None else now

    return rename


def declared_ties(model: nn.Module) -> dict[str, str]:
    """Names that the configuration ties, and to what, of every transformers model in `model`."""
    ties: dict[str, str] = {}
    for prefix, part in model.named_modules():
        if is_transformer(part) and hasattr(part, "get_expanded_tied_weights_keys"):
            start = f"{prefix}." if prefix else ""
            found = part.get_expanded_tied_weights_keys(all_submodels=False)
            ties.update((start + name, start + source) for name, source in found.items())
    return ties


def ignores_missing(module: nn.Module, name: str) -> bool:
    """Whether a file may lack `name`."""
    patterns = getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    return is_transformer(module) and any(re.search(pattern, name) for pattern in patterns)


def ignores_unused(module: nn.Module, name: str) -> bool:
    """Whether a file may have `name` without a place for it, as older versions have written some buffers."""
    if not is_transformer(module):
        return False
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()
    if any(re.search(pattern, name) for pattern in patterns):
        return True
    buffers = [buffer for buffer, _ in module.named_buffers()]
    if _ROTARY.search(name):
        return any(buffer.endswith("rotary_emb.inv_freq") for buffer in buffers)
    return bool(_POSITIONS.search(name)) and any(b.endswith("position_ids") for b in buffers)


# ---- saving ----


@dataclass(frozen=True)
class Output:
    """Files of one kind that a model's own class would write.

    Attributes:
        folder: where, below the folder of the model; "" is that itself.
        stem: of the files' names.
        tensors: by the names in the files, as `convert` makes them of stand-ins.
        convert: from tensors by the names of the state to those by the names in the files; what is not given takes no
            part.
        describe: writes the configurations into a folder, with the dtype that the weights have in the files.
        others: further names of tensors, with the name that the file has.
    """

    folder: str
    stem: str
    tensors: dict[str, Tensor]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    describe: Callable[[Path, torch.dtype | None], None]
    others: dict[str, str] = field(default_factory=dict)


def keeps_fp32(module: nn.Module, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which parameters `from_pretrained(dtype=dtype)` keeps in fp32, by name."""
    plan = getattr(module, "_get_dtype_plan", None) if is_transformer(module) else None
    patterns = [key.replace("*", ".*") for key in plan(dtype)] if plan is not None else []
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def is_adapted(module: nn.Module) -> bool:
    """Whether its class would write adapters alone."""
    peft_class = _loaded("peft_model", "PeftModel", "peft.")
    is_peft = peft_class is not None and isinstance(module, peft_class)
    return is_peft or (is_transformer(module) and getattr(module, "_hf_peft_config_loaded", False))


def outputs(module: nn.Module, state: dict[str, Tensor]) -> list[Output]:
    """What the module's class would write of its state: a model, or the adapters alone of one that has adapters.

    Args:
        module: any; what is of neither package becomes one file without a configuration.
        state: stand-ins by the names in its state dict; several names of one tensor have the same one.

    Raises:
        GeminiError: it cannot be saved so.
    """
    peft_class = _loaded("peft_model", "PeftModel", "peft.")
    if peft_class is not None and isinstance(module, peft_class):
        return [_adapter(module, state, name) for name in module.peft_config]
    if not is_transformer(module):
        tensors = _without_ties(module, state, False)
        first = {id(value): name for name, value in tensors.items()}
        others = {name: first[id(value)] for name, value in state.items() if name not in tensors}
        return [Output("", "model", tensors, dict, lambda *_: None, others)]
    if getattr(module, "_hf_peft_config_loaded", False):
        return [_own_adapter(module, state)]
    if getattr(module, "hf_quantizer", None) is not None:
        raise GeminiError(
            f"{type(module).__name__} is quantized, and what its quantizer adds to files is not written here: "
            "gemini_strategy.engine_of(model).close(), then model.save_pretrained()"
        )
    ignored = getattr(module, "_keys_to_ignore_on_save", None) or ()
    state = {name: value for name, value in state.items() if name not in ignored}
    revert = _loaded("core_model_loading", "revert_weight_conversion")

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if revert is None else revert(module, dict(tensors))

    tensors = convert(_without_ties(module, state, True))
    describe = functools.partial(_describe_model, module)
    return [Output("", "model", tensors, convert, describe)]


def _without_ties(
    module: nn.Module, state: dict[str, Tensor], has_undeclared: bool
) -> dict[str, Tensor]:
    """Each tensor under one name, the one that its class declares as the source where it does.

    has_undeclared: names that no class ties all stay, as nothing would tie them again at loading.
    """
    declared = declared_ties(module)
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    kept: set[str] = set()
    for same in names.values():
        sources = [name for name in same if name not in declared] or same[:1]
        kept.update(sources if has_undeclared else sources[:1])
    return {name: value for name, value in state.items() if name in kept}


def _describe_model(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """config.json, generation_config.json and the code of a model that is registered with its own."""
    config = copy.deepcopy(module.config)
    if dtype is not None:
        config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(module).__name__]
    if module.is_remote_code():
        _loaded("dynamic_module_utils", "custom_object_save")(module, str(folder), config=config)
    config.save_pretrained(str(folder))
    if module.can_generate() and getattr(module, "generation_config", None) is not None:
        module.generation_config.save_pretrained(str(folder))


def _adapter_state(module: nn.Module, state: dict[str, Tensor], adapter: str) -> dict[str, Tensor]:
    get = _loaded("save_and_load", "get_peft_model_state_dict", "peft.utils.")
    return get(module, state_dict=dict(state), adapter_name=adapter)  # type: ignore[no-any-return]


def _is_table(encoder: nn.Module) -> bool:
    """Whether an encoder of prompts gives the rows of its embedding as they are."""
    prefix = _loaded("model", "PrefixEncoder", "peft.tuners.prefix_tuning.")
    if prefix is not None and type(encoder) is prefix:
        return not encoder.prefix_projection
    return type(encoder) is _loaded("model", "PromptEmbedding", "peft.tuners.prompt_tuning.")


def _adapter(module: Any, state: dict[str, Tensor], name: str) -> Output:
    """One adapter of a PeftModel."""
    is_prompt = module.peft_config[name].is_prompt_learning
    if is_prompt and not _is_table(module.prompt_encoder[name]):
        raise GeminiError(
            f"the prompts of the adapter {name} are computed by running a part of the model, which would round them: "
            "engine.close(dtype=torch.float32), then model.save_pretrained()"
        )

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        known = {**state, **tensors}
        if not is_prompt:
            return _adapter_state(module, known, name)
        before = module.peft_config[name]
        module.peft_config[name] = copy.copy(before)
        try:
            module.peft_config[name].inference_mode = True  # else its prompts are computed
            found = _adapter_state(module, known, name)
        finally:
            module.peft_config[name] = before
        return found | {"prompt_embeddings": known[f"prompt_encoder.{name}.embedding.weight"]}

    def describe(folder: Path, dtype: torch.dtype | None) -> None:
        config = copy.deepcopy(module.peft_config[name])
        config.inference_mode = True
        base = module.get_base_model()
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
        kind = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.save_pretrained(
            str(folder), auto_mapping_dict=kind if config.task_type is None else None
        )

    folder = "" if name == "default" else name
    return Output(folder, "adapter_model", convert({}), convert, describe)


def _own_adapter(module: Any, state: dict[str, Tensor]) -> Output:
    """The adapter that a transformers model has been given by its `add_adapter`."""
    active = module.active_adapters()
    if len(active) != 1:
        raise GeminiError(
            f"{type(module).__name__} has the adapters {', '.join(active)} active, and a folder holds one: "
            "model.set_adapter(name) chooses it"
        )

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = _adapter_state(module, {**state, **tensors}, active[0])
        return {f"base_model.model.{name}": value for name, value in found.items()}

    def describe(folder: Path, dtype: torch.dtype | None) -> None:
        if module.can_generate() and getattr(module, "generation_config", None) is not None:
            module.generation_config.save_pretrained(str(folder))
        copy.deepcopy(module.peft_config[active[0]]).save_pretrained(str(folder))

    return Output("", "adapter_model", convert({}), convert, describe)
