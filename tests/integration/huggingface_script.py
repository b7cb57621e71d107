"""Scripts as people write them, which know nothing of Gemini: `... trainer FOLDER OPTION=VALUE ...`."""

import json
import sys
from pathlib import Path
from typing import Any

import torch


def model_and_data() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    tokens = torch.randint(0, 64, (32, 12))
    return model, [{"input_ids": row, "labels": row} for row in tokens]


def from_folder(kind: Any, folder: Path) -> Any:
    """A model that was saved before is trained on, beside one that is only looked at."""
    from transformers import AutoModelForCausalLM, TrainingArguments

    data = model_and_data()[1]
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    teacher = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    ours = sys.modules.get("gemini_strategy.weights.unread")  # under the runner
    left = [ours is not None and ours.home(p) is not None for p in model.parameters()]
    with torch.no_grad():
        seen = [teacher(input_ids=data[0]["input_ids"][None]).logits for _ in range(3)]
    args = TrainingArguments(
        str(folder / "out"), max_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True
    )
    trainer = kind(model, args, train_dataset=data)
    trainer.train()
    trainer.save_model(str(folder / "end"))
    torch.save({"seen": seen, "unread": left}, folder / "seen.pt")
    return trainer


def train(kind: Any, folder: Path, resume: str | None = None, **given: Any) -> Any:
    """transformers' Trainer; `kind` for a test that has another one."""
    from transformers import TrainingArguments

    model, data = model_and_data()
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=2,
        max_steps=4,
        logging_steps=1,
        save_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.7,
        report_to=[],
        use_cpu=True,
        **given,
    )
    trainer = kind(model, args, train_dataset=data, eval_dataset=data[:4])
    trainer.train(resume_from_checkpoint=resume)
    trainer.evaluate()
    trainer.save_model(str(folder / "end"))
    if trainer.is_world_process_zero():
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))
        (folder / "kinds.txt").write_text(
            f"{type(trainer.model_wrapped).__name__} {kind.__module__}"
        )
    return trainer


def small() -> tuple[Any, Any]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(64))
    return model, torch.randn(8, 64)


def loop(folder: Path) -> None:
    """A plain accelerate loop."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, data = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward((model(batch) ** 3).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_model(model, str(folder / "end"))


def states(folder: Path) -> None:
    """A loop that saves its state, and one that goes on from there."""
    from accelerate import Accelerator

    for again in (False, True):
        accelerator = Accelerator(cpu=True)
        model, data = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        if again:
            torch.nn.init.zeros_(model[0].weight)
            accelerator.load_state(str(folder / "state"))
        for number, batch in enumerate(data.split(2)):
            if again and number < 2:
                continue
            accelerator.backward((model(batch) ** 3).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                accelerator.save_state(str(folder / "state"))
        accelerator.save_model(model, str(folder / ("again" if again else "whole") / "end"))


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    options = {
        name: json.loads(value) for name, value in (word.split("=") for word in sys.argv[3:])
    }
    if what == "loop":
        loop(folder)
    elif what == "folder":
        from transformers import Trainer

        from_folder(Trainer, folder)
    else:
        from transformers import Trainer

        train(Trainer, folder / "whole", **options)
        if what == "twice":
            checkpoint = str(folder / "whole" / "checkpoint-2")
            train(Trainer, folder / "again", checkpoint, **options)
            states(folder / "states")
