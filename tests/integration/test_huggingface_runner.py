"""`gemini-strategy run`: scripts that know nothing of Gemini train under a budget, on one rank and on two.

The first is started as a person starts it. The others, and what their launchers start, are forks of a process that has
imported what takes seconds, but nothing that the runner replaces a class in.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainingArguments

import gemini_strategy as gs
import huggingface_script
from gemini_strategy import cli
from gemini_strategy.huggingface.install import _ACTS
from gemini_strategy.huggingface.refusals import check_arguments
from helpers.forked import Forks
from huggingface_case import ReferenceTrainer, assert_same, losses, masters

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(huggingface_script.__file__)
RUN = ("-m", "gemini_strategy", "run")
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
IMPORTED = ("transformers", "torchao", "datasets", "bitsandbytes", "networkx", "helpers.program")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Forks((), IMPORTED, has_had_engine=False)
    with made:
        (ended,) = made.run("helpers.program:imported", list(_ACTS))
        assert ended.value == [], ended.how
        yield made


def fork(
    forks: Forks, folder: Path, *words: str, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Like run(), in a fork."""
    (ended,) = forks.run(
        *("helpers.program:started", str(folder), list(words), [str(ROOT)]),
        ENVIRONMENT | environment,
        timeout=280.0,
    )
    assert ended.value is not None, ended.how
    code, said, errors = ended.value
    assert code == status, f"{said[-2000:]}\n{errors[-4000:]}"
    return subprocess.CompletedProcess(words, code, said, errors)


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "end" / "model.safetensors")


def reference(folder: Path, **given: Any) -> Any:
    return huggingface_script.train(ReferenceTrainer, folder, **given)


def test_a_script_with_a_trainer(tmp_path: Path) -> None:
    words = ("--device-budget", "80KB", "--report", str(SCRIPT), "trainer", str(tmp_path))
    done = run(*RUN, *words, "bf16=true")
    plain = reference(tmp_path / "reference", bf16=True)
    assert_same(saved(tmp_path / "whole"), masters(plain))
    log = json.loads((tmp_path / "whole" / "log.json").read_text())
    keys = losses(plain)
    assert [{k: entry[k] for k in key} for entry, key in zip(log, keys, strict=True)] == keys
    assert "device 80 kB" in done.stderr
    assert done.stderr.count("Gemini: the result") == 1 and "after 4 steps" in done.stderr
    assert (tmp_path / "whole" / "kinds.txt").read_text() == "LlamaForCausalLM transformers.trainer"
    assert "gave no model" not in done.stderr


def test_two_ranks_share_a_model_and_save_and_resume(tmp_path: Path, forks: Forks) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", *RUN[:-1], RUN[-1])
    words = ("--device-budget", "80KB", str(SCRIPT), "twice", str(tmp_path))
    fork(forks, tmp_path, *launcher, *words)
    # Two ranks with a batch each are one with two micro-batches: all that differs is divided by two, exactly.
    plain = reference(tmp_path / "reference", gradient_accumulation_steps=2)
    assert_same(saved(tmp_path / "whole"), masters(plain))
    assert_same(saved(tmp_path / "again"), saved(tmp_path / "whole"))
    assert (tmp_path / "whole" / "kinds.txt").read_text().startswith("LlamaForCausalLM ")
    ends = saved(tmp_path / "states" / "again"), saved(tmp_path / "states" / "whole")
    assert_same(*ends)
    start = huggingface_script.small()[0].state_dict()
    assert not torch.equal(start["0.weight"], ends[0]["0.weight"])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ["--cpu"]),
        # With --cpu there would be one process; the script keeps several of --multi_gpu on the CPU.
        (2, ["--multi_gpu", "--num_processes=2", "--main_process_port=0"]),
    ],
)
def test_accelerate_launch_starts_the_runner_and_gives_the_precision(
    ranks: int, options: list[str], tmp_path: Path, forks: Forks
) -> None:
    launcher = ("-m", "accelerate.commands.launch", *options, "--mixed_precision=bf16", *RUN)
    words = ("--device-budget", "80KB", "--report", str(SCRIPT), "trainer", str(tmp_path))
    done = fork(forks, tmp_path, *launcher, *words)
    plain = reference(tmp_path / "reference", bf16=True, gradient_accumulation_steps=ranks)
    assert_same(saved(tmp_path / "whole"), masters(plain))
    assert "device 80 kB" in done.stderr
    assert (tmp_path / "whole" / "kinds.txt").read_text().startswith("LlamaForCausalLM ")


def test_a_loop_with_accelerate_and_a_budget_of_the_environment(
    tmp_path: Path, forks: Forks
) -> None:
    done = fork(
        forks,
        tmp_path,
        *RUN,
        "--policy",
        "cpu",
        "--report",
        str(SCRIPT),
        "loop",
        str(tmp_path),
        GEMINI_DEVICE_BUDGET="70KB",
    )
    assert "device 70 kB" in done.stderr
    assert 'placement_policy "cpu"' in done.stderr
    model, data = huggingface_script.small()
    optimizer = gs.HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    for batch in data.split(2):
        (model(batch) ** 3).square().mean().backward()
        optimizer.clip_grad_norm_(0.7)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(saved(tmp_path), masters(model, optimizer))


def test_a_model_from_a_folder_stays_there_until_it_is_managed(
    tmp_path: Path, forks: Forks
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "reference"
    for folder in (mine, other):
        huggingface_script.model_and_data()[0].save_pretrained(folder / "model")
    fork(forks, tmp_path, *RUN, "--device-budget", "80KB", str(SCRIPT), "folder", str(mine))
    plain = huggingface_script.from_folder(ReferenceTrainer, other)
    assert_same(saved(mine), masters(plain))
    got, want = (torch.load(folder / "seen.pt") for folder in (mine, other))
    assert all(got["unread"]) and not any(want["unread"])
    for one in got["seen"]:
        assert torch.equal(one, want["seen"][0])


def test_a_script_that_meets_nothing_is_told(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "beside.py").write_text("value = 3")
    (tmp_path / "train.py").write_text(
        "import sys, beside; print(sys.argv[1:], beside.value, __name__, __file__)"
    )
    words = ["--", "--lr", "1", "--device-budget"]
    done = fork(forks, tmp_path, *RUN, "train.py", *words, status=1)
    assert done.stdout == f"{words} 3 __main__ {tmp_path / 'train.py'}\n"
    assert "gave no model to a Trainer" in done.stderr


@pytest.mark.parametrize(("end", "status"), [("sys.exit()", 1), ("sys.exit(7)", 7)])
def test_a_script_that_meets_nothing_and_ends_itself(
    end: str, status: int, tmp_path: Path, forks: Forks
) -> None:
    (tmp_path / "train.py").write_text(f"import sys; {end}")
    done = fork(forks, tmp_path, *RUN, "train.py", status=status)
    assert "gave no model to a Trainer" in done.stderr


_LOOP = """
import sys, torch
from accelerate import Accelerator

def train():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        accelerator.backward(model(torch.randn(2, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return accelerator

"""


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("import gc; train(); gc.collect()", 0),  # the engine has gone before the script ends
        ("train().end_training()", 0),
        ("accelerator = train(); sys.exit(3)", 3),
        ("accelerator = train(); 1 / 0", 1),
    ],
)
def test_the_result_of_a_loop_is_told(end: str, status: int, tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(f"{_LOOP}{end}")
    words = ("--device-budget", "90KB", "--report", "train.py")
    done = fork(forks, tmp_path, *RUN, *words, status=status)
    assert done.stderr.count("\n\nGemini: the plan\n") == 1
    assert done.stderr.count("\n\nGemini: the result\n") == 1
    assert "after 4 steps" in done.stderr
    if "1 / 0" in end:  # what is read first, the last line, is the error
        assert done.stderr.index("Gemini: the result") < done.stderr.index("ZeroDivisionError")


def test_the_results_of_trainers_are_told_below_their_bars(tmp_path: Path, forks: Forks) -> None:
    """trl's after two trainings; the second of a Trainer of transformers is ended by a callback."""
    (tmp_path / "train.py").write_text(
        """
import huggingface_script as case
from datasets import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

class Ends(TrainerCallback):
    def on_step_end(self, args, state, control, **given):
        if state.global_step == 4:
            raise RuntimeError("my own")

def options(folder):
    return {"output_dir": folder, "max_steps": 5, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "per_device_train_batch_size": 2}

def train():
    model, rows = case.model_and_data()
    data = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows]})
    trainer = SFTTrainer(model, SFTConfig(**options("a"), bf16=False, gradient_checkpointing=False),
                         train_dataset=data, processing_class=tokenizer())
    trainer.train()
    model, rows = case.model_and_data()
    trainer = Trainer(model, TrainingArguments(**options("b")), train_dataset=rows, callbacks=[Ends()])
    trainer.train()

def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    plain = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")

train()
"""
    )
    words = ("--device-budget", "150KB", "--report", "train.py")
    here = f"{ROOT}{os.pathsep}{SCRIPT.parent}"
    done = fork(forks, tmp_path, *RUN, *words, status=1, PYTHONPATH=here)
    lines = done.stderr.replace("\r", "\n\r").splitlines()
    assert [line for line in lines if "Gemini: the" in line] == [
        "Gemini: the plan",
        "Gemini: the result",
    ] * 2
    assert "after 5 steps" in done.stderr and "after 4 steps" in done.stderr
    assert done.stderr.rindex("Gemini: the result") < done.stderr.index("RuntimeError: my own")


def test_ranks_tell_their_result_once(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(f"{_LOOP}train()")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    done = fork(
        *(forks, tmp_path, *launcher, *RUN, "--device-budget", "90KB", "--report", "train.py")
    )
    assert done.stderr.count("Gemini: the result") == 1
    assert done.stderr.count(" trains Sequential, with 2 ranks; device budget: 90.00 kB") == 1


def test_one_run_after_the_other_in_a_process(tmp_path: Path, forks: Forks) -> None:
    """As in a notebook: each says what came of it, and the environment is as it was."""
    (tmp_path / "train.py").write_text(f"{_LOOP}train()")
    (tmp_path / "none.py").write_text("pass")
    (tmp_path / "cells.py").write_text(
        """
import os
from gemini_strategy import cli
before = dict(os.environ)
words = ["run", "--device-budget", "90KB"]
print(cli.main([*words, "train.py"]), cli.main([*words, "none.py"]), cli.main([*words, "train.py"]))
assert dict(os.environ) == before
"""
    )
    done = fork(forks, tmp_path, "cells.py")
    assert done.stdout == "0 1 0\n"
    assert done.stderr.count("trains Sequential") == 2
    assert done.stderr.count("none.py gave no model") == 1


def test_a_script_that_manages_its_model_itself(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(
        """
import os, torch, gemini_strategy as gs
from gemini_strategy.inherited import told
(marks,) = told()["marks"]
model = torch.nn.Linear(8, 8)
gs.manage(model, torch.optim.AdamW(model.parameters()), device="cpu", device_budget="1MB")
os.unlink(marks)  # as what clears old files does in a long run
"""
    )
    done = fork(forks, tmp_path, *RUN, "train.py")
    assert " trains Linear; device budget: 1.000 MB" in done.stderr
    assert "gave no model" not in done.stderr


def test_a_script_that_names_our_classes(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "train.py").write_text(
        f"""
from gemini_strategy.huggingface import GeminiAccelerator, GeminiTrainer
{_LOOP}
import transformers
assert transformers.Trainer is GeminiTrainer and Accelerator is GeminiAccelerator
print(train().gemini_plugin.device_budget)
"""
    )
    done = fork(forks, tmp_path, *RUN, "--device-budget", "90KB", "train.py")
    assert done.stdout == "90KB\n"


def test_the_report_of_a_loop_that_manages_by_itself(tmp_path: Path, forks: Forks) -> None:
    """The runner's --report is for all that trains in its run."""
    (tmp_path / "train.py").write_text(
        """
import os, torch, gemini_strategy
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
gemini_strategy.manage(model, optimizer, device="cpu", device_budget="200KB")
for _ in range(6):
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    done = fork(forks, tmp_path, *RUN, "--report", "train.py")
    assert done.stderr.count("Gemini: the plan") == 1
    assert done.stderr.count("Gemini: the result") == 1
    assert "Gemini:" not in fork(forks, tmp_path, *RUN, "train.py").stderr


def test_arguments_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="--device-budget 'many': expected"):
        cli.main(["run", "--device-budget", "many", __file__])
    with pytest.raises(SystemExit, match="there is no file no-such-file.py"):
        cli.main(["run", "no-such-file.py"])
    with pytest.raises(SystemExit, match="there is no file /dev/null"):  # nor in a pipe
        cli.main(["run", "/dev/null"])
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    assert "--device-budget" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"optim": "lomo"}, r"optim='lomo'\)"),
        ({"optim": "galore_adamw_layerwise"}, r"optim='galore_adamw_layerwise'\)"),
        ({"fp16_full_eval": True}, "use bf16_full_eval"),
        ({"save_on_each_node": True}, "a folder that all hosts can write"),
    ],
)
def test_arguments_of_a_trainer_that_are_refused(
    given: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(gs.GeminiError, match=text):
        check_arguments(TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], **given))
