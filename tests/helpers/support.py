"""Which test shows which feature with which adapter, and the page docs/support.md that follows from it.

Invariants
    1. A cell names a test that exists with these parameters, which is checked; that the test would fail without the
       feature is for whoever adds the cell to see. "refused": the test meets the refusal. A cell without a test is a
       dash, whatever the code may do.
    2. The page is printed from here: `python tests/helpers/support.py --write`. tests/unit/test_support.py compares.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FEATURES", "PACKAGES", "PAGE", "Cell", "page", "pins"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support.md"

ADAPTERS = {
    "plain": "plain loop",
    "lightning": "Lightning",
    "fabric": "Fabric",
    "trainer": "Trainer, trl",
    "accelerate": "accelerate",
}
PACKAGES = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "bitsandbytes",
    "torchao",
)


@dataclass(frozen=True)
class Cell:
    """A test: its path in tests/, its name and parameters as pytest prints them; and what it shows."""

    test: str
    is_refused: bool = False

    @property
    def node(self) -> str:
        return f"tests/{self.test}"

    @property
    def text(self) -> str:
        path = self.node.partition("::")[0]
        return f"[{'refused' if self.is_refused else 'yes'}](../{path})"


def _refused(test: str) -> Cell:
    return Cell(test, is_refused=True)


_EXACT = "unit/test_exact.py::test_bits_under_pressure"
_FIT = "integration/test_lightning_exact.py::test_"
_FABRIC = "integration/test_fabric.py::test_"
_BITS = "bits_are_those_of_a_managed_loop_and_of_a_single_device"
_TRAINER = "integration/test_huggingface_trainer.py::test_"
_TRL = "integration/test_huggingface_trl.py::test_"
_RUNNER = "integration/test_huggingface_runner.py::test_"
_ACCELERATE = "integration/test_huggingface_accelerate.py::test_"

# Feature: the test by the adapter.
FEATURES: dict[str, dict[str, str | Cell]] = {
    "fp32, the bits of the run without Gemini": {
        "plain": f"{_EXACT}[4096-32-true]",
        "lightning": f"{_FIT}fit[32-true-lightning]",
        "fabric": f"{_FABRIC}{_BITS}[32-true-lightning]",
        "trainer": f"{_TRAINER}the_bits_of_the_reference[no]",
        "accelerate": f"{_ACCELERATE}the_bits_of_a_loop_by_hand[no]",
    },
    "bf16 mixed, likewise": {
        "plain": f"{_EXACT}[4096-bf16-mixed]",
        "lightning": f"{_FIT}fit[bf16-mixed-lightning]",
        "fabric": f"{_FABRIC}{_BITS}[bf16-mixed-lightning]",
        "trainer": f"{_TRAINER}the_bits_of_the_reference[bf16]",
        "accelerate": f"{_ACCELERATE}the_bits_of_a_loop_by_hand[bf16]",
    },
    "weights in bf16, likewise": {
        "plain": f"{_EXACT}[4096-bf16-true]",
        "lightning": f"{_FIT}fit[bf16-true-lightning]",
        "fabric": f"{_FABRIC}{_BITS}[bf16-true-lightning]",
        "trainer": f"{_TRAINER}the_bits_of_the_reference[bf16 weights]",
    },
    "fp16: a step that overflows is skipped": {
        "plain": "unit/test_precision.py::test_skip_leaves_every_bit",
        "lightning": f"{_FIT}fp16_skips_overflows_and_keeps_the_bits[1]",
        "fabric": f"{_FABRIC}fp16_scales_the_loss_and_skips_overflows",
        "accelerate": f"{_ACCELERATE}a_step_of_fp16_that_overflows_is_skipped",
    },
    "a device budget below the training state is kept": {
        "plain": f"{_EXACT}[4096-bf16-mixed]",
        "lightning": f"{_FIT}fit_within_a_device_budget[bf16-mixed]",
        "trainer": f"{_TRAINER}the_bits_of_the_reference[bf16]",
        "accelerate": f"{_ACCELERATE}the_bits_of_a_loop_by_hand[bf16]",
    },
    "gradient accumulation": {
        "plain": "unit/test_accumulation.py::test_shapes_of_trouble",
        "lightning": f"{_FIT}accumulation_with_leftovers[4-bf16-mixed]",
        "fabric": f"{_FABRIC}accumulation_without_sync_is_accumulation[bf16-mixed]",
        "trainer": f"{_TRAINER}settings_of_the_trainer[remainder]",
        "accelerate": f"{_ACCELERATE}the_bits_of_a_loop_by_hand[bf16]",
    },
    "clipping by norm": {
        "plain": "unit/test_accumulation.py::test_clip_verbs",
        "lightning": f"{_FIT}clipping[norm-bf16-mixed]",
        "fabric": f"{_FABRIC}clipping_by_norm_returns_the_norm_before[bf16-mixed]",
        "trainer": f"{_TRAINER}the_bits_of_the_reference[bf16]",
        "accelerate": f"{_ACCELERATE}the_bits_of_a_loop_by_hand[bf16]",
    },
    "clipping by value": {
        "plain": "unit/test_accumulation.py::test_clip_value_equals_torch",
        "lightning": f"{_FIT}clipping[value-bf16-mixed]",
        "fabric": f"{_FABRIC}clipping_by_value_is_that_of_a_single_device",
        "accelerate": f"{_ACCELERATE}clip_grad_value",
    },
    "LR schedules": {
        "plain": "unit/test_takeover.py::test_scheduler",
        "lightning": f"{_FIT}schedules[onecycle]",
        "fabric": f"{_FABRIC}schedulers_and_closures_are_served",
        "trainer": f"{_TRAINER}the_bits_of_the_reference[bf16]",
        "accelerate": f"{_ACCELERATE}the_bits_of_a_loop_by_hand[bf16]",
    },
    "updates inside the backward": {
        "plain": "unit/test_immediate.py::test_zoo",
        "lightning": "integration/test_lightning_schedule.py::test_updates_run_inside_backward"
        "[bf16-mixed]",
        "fabric": f"{_FABRIC}updates_may_run_inside_a_backward",
        "trainer": f"{_TRAINER}no_norm_is_measured_where_nothing_clips",
    },
    "evaluation between steps": {
        "plain": "unit/test_planned.py::test_evaluation_between_steps_has_its_own_trace",
        "lightning": "integration/test_lightning_stages.py::"
        "test_sanity_check_and_validation_inside_fit[bf16-mixed]",
        "trainer": f"{_TRAINER}the_bits_of_the_reference[bf16]",
    },
    "generation between steps": {
        "plain": "unit/test_transformers.py::test_generate_between_steps",
        "trainer": f"{_TRL}grpo",
    },
    "activation checkpointing": {
        "plain": "unit/test_transformers.py::test_family[llama_checkpointed-32-true]",
        "trainer": f"{_TRAINER}settings_of_the_trainer[checkpointing]",
    },
    "a resumed run is the one that went on, bit for bit": {
        "plain": "unit/test_checkpoint.py::test_resume_is_exact",
        "lightning": "integration/test_lightning_checkpoints.py::"
        "test_resume_equals_going_on[bf16-mixed-lightning]",
        "fabric": "integration/test_fabric_checkpoints.py::"
        "test_a_resumed_run_is_the_run_that_went_on[bf16-mixed-lightning]",
        "trainer": f"{_TRAINER}resume_is_the_uninterrupted_run[bf16]",
        "accelerate": f"{_ACCELERATE}load_state_is_the_uninterrupted_run[bf16]",
    },
    "a checkpoint is read without Gemini": {
        "plain": "unit/test_checkpoint.py::test_torchs_tools_read_it",
        "lightning": "integration/test_lightning_checkpoints.py::"
        "test_our_file_in_plain_lightning[bf16-mixed]",
        "fabric": "integration/test_fabric_checkpoints.py::"
        "test_a_file_is_that_of_a_single_device[bf16-mixed]",
        "trainer": f"{_TRAINER}a_checkpoint_goes_on_without_gemini",
    },
    "safetensors with fp32 masters": {
        "plain": "unit/test_save_pretrained.py::"
        "test_the_folder_is_the_one_that_transformers_writes",
        "trainer": f"{_TRAINER}save_model_into_a_folder_of_checkpoints",
        "accelerate": f"{_ACCELERATE}save_model_and_get_state_dict_have_masters",
    },
    "weights go from files to their places": {
        "plain": "unit/test_loading.py::test_transformers_folder",
        "lightning": "integration/test_lightning_loading.py::test_weights_from_a_file[bf16-mixed]",
        "trainer": f"{_RUNNER}a_model_from_a_folder_stays_there_until_it_is_managed",
    },
    "two ranks have the bits of one": {
        "plain": "unit/test_sharded.py::test_bits[2]",
        "lightning": "integration/test_lightning_sharded.py::test_bits_are_those_of_one_process[2]",
        "fabric": "integration/test_fabric_ranks.py::"
        "test_ranks_have_the_bits_of_one[2-lightning-32-true-how0]",
        "trainer": f"{_RUNNER}two_ranks_share_a_model_and_save_and_resume",
    },
    "two ranks save and resume": {
        "plain": "unit/test_checkpoint_ranks.py::test_any_number_of_ranks[2]",
        "lightning": "integration/test_lightning_folders.py::"
        "test_ranks_write_their_parts_and_go_on",
        "trainer": f"{_RUNNER}two_ranks_share_a_model_and_save_and_resume",
        "accelerate": f"{_RUNNER}two_ranks_share_a_model_and_save_and_resume",
    },
    "two ranks save and resume an optimizer that is not Adam or AdamW": {
        "plain": "unit/test_opaque_saving_ranks.py::"
        "test_any_number_loads_what_any_other_has_saved[0]",
    },
    "LoRA": {
        "plain": "unit/test_peft.py::test_training_has_the_bits_of_the_plain_run[LoRA-bf16-mixed]",
        "trainer": f"{_TRL}sft_with_adapters_that_it_adds_itself",
    },
    "a quantized base (bitsandbytes, torchao)": {
        "plain": "unit/test_quantized.py::test_training_has_the_bits_of_the_plain_run",
    },
    "kernels and compiled functions with another module's weight": {
        "plain": "unit/test_borrowing.py::test_bits",
    },
    "fp8 (torchao)": {
        "plain": "unit/test_written_in_backward.py"
        "::test_fp8_trains_with_the_bits_of_the_plain_run[bf16-true]",
    },
    "trl: SFT": {"trainer": f"{_TRL}sft"},
    "trl: DPO with a reference model": {"trainer": f"{_TRL}dpo_with_a_reference_model"},
    "trl: DPO with adapters": {"trainer": f"{_TRL}dpo_with_adapters"},
    "trl: GRPO": {"trainer": f"{_TRL}grpo"},
    "trl: reward models": {"trainer": f"{_TRL}reward"},
    "a script as it is, by `gemini-strategy run`": {
        "trainer": f"{_RUNNER}a_script_with_a_trainer",
        "accelerate": f"{_RUNNER}a_loop_with_accelerate_and_a_budget_of_the_environment",
    },
    "compiled layers": {
        "plain": "unit/test_compile.py::test_compiled_blocks_train_to_the_same_bits[inductor]",
        "fabric": f"{_FABRIC}compiled_blocks_stay_compiled_and_a_compiled_model_is_refused"
        "[inductor]",
        "trainer": f"{_TRAINER}compiled_layers",
    },
    "a model that is compiled as a whole": {
        "lightning": _refused(
            "integration/test_lightning_stages.py::test_compiled_module_is_refused"
        ),
        "fabric": _refused(
            f"{_FABRIC}compiled_blocks_stay_compiled_and_a_compiled_model_is_refused[inductor]"
        ),
    },
    "unfreezing during training": {
        "lightning": "integration/test_lightning_finetuning.py::"
        "test_unfreezing_at_an_epoch[1-bf16-mixed]",
    },
    "averages of the weights": {
        "plain": "unit/test_masters_shown.py::test_an_average_has_the_bits_of_one_over_a_plain_model",
        "lightning": "integration/test_lightning_averaging.py::"
        "test_in_half_precision_the_average_is_of_the_masters[bf16-mixed-EMAWeightAveraging]",
    },
    "two models beside each other, on a CPU": {
        "plain": "unit/test_exact.py::test_two_managed_models_do_not_meet",
        "fabric": f"{_FABRIC}two_models_train_beside_each_other",
        "trainer": f"{_TRL}dpo_with_a_reference_model",
        "accelerate": f"{_ACCELERATE}two_models_and_a_loss_that_has_no_parameters",
    },
    "two optimizers of one model": {
        "plain": "unit/test_several_optimizers.py::test_bits",
        "lightning": _refused(
            "integration/test_lightning_stages.py::test_number_and_kind_of_optimizers"
        ),
        "fabric": _refused(f"{_FABRIC}what_cannot_be_set_up_is_refused_by_name"),
        "accelerate": _refused(f"{_ACCELERATE}the_optimizer_that_was_replaced_is_refused"),
    },
    "an optimizer that is not Adam or AdamW": {
        "plain": "unit/test_opaque_doors.py::test_settings_of_one_parameter",
        "lightning": "integration/test_lightning_exact.py::"
        "test_an_optimizer_that_is_not_adam[SGD-32-true-lightning]",
        "fabric": f"{_FABRIC}an_optimizer_that_is_not_adam[SGD-32-true-lightning]",
        "trainer": f"{_TRAINER}an_optimizer_by_its_name[adamw_8bit-no]",
        "accelerate": f"{_ACCELERATE}an_optimizer_that_is_not_adam[False]",
    },
    "an optimizer that steps inside the backward": {
        "trainer": _refused(
            f"{_TRL}an_optimizer_that_goes_past_the_engine_is_refused_before_a_model_is_loaded"
        ),
    },
    "DeepSpeed, FSDP": {"accelerate": _refused(f"{_ACCELERATE}refused_by_name")},
    "weights that accelerate has offloaded": {
        "accelerate": _refused(f"{_ACCELERATE}offloaded_weights_are_refused"),
    },
}

_HEAD = """# What is tested with what

Every cell comes from a test of `make test`, which needs no GPU: **yes** where a test shows it,
**refused** where a test meets the refusal, and a dash where there is no test. A dash does not say
that it fails. The link is the test's file, and
[tests/helpers/support.py](../tests/helpers/support.py) names the test itself. It prints this page.
"""

_BETWEEN = """
Where a feature stands in several columns each adapter has a test of its own. What has run on GPUs
is in [measured](measured.md), and what is refused beside this in [limits](limits.md).

## Versions

The tests run with these, which [constraints.txt](../requirements/constraints.txt) pins. Those of
Hugging Face's libraries run with the oldest too, which [oldest.txt](../requirements/oldest.txt)
pins: `make test-oldest`.
"""


def cells(feature: str) -> dict[str, Cell]:
    """By adapter."""
    given = FEATURES[feature].items()
    return {name: Cell(test) if isinstance(test, str) else test for name, test in given}


def pins(file: str = "constraints.txt") -> dict[str, str]:
    """Versions by package, as a file of requirements/ has them."""
    text = (ROOT / "requirements" / file).read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE))


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join((lines[0], "|---" * len(head) + "|", *lines[1:]))


def page() -> str:
    """docs/support.md."""
    rows = []
    for feature in FEATURES:
        found = cells(feature)
        rows.append((feature, *(found[a].text if a in found else "-" for a in ADAPTERS)))
    versions, oldest = pins(), pins("oldest.txt")
    parts = (
        _HEAD,
        _table(("", *ADAPTERS.values()), rows),
        _BETWEEN,
        _table(
            ("package", "version", "oldest"),
            [(name, versions[name], oldest.get(name, "-")) for name in PACKAGES],
        ),
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page())
    else:
        print(page(), end="")
