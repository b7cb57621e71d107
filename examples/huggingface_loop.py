"""A transformers model in a loop of one's own: accumulation, clipping, a schedule, generation, saving.

The model is tiny, made from a configuration, with random weights: nothing is downloaded.  Put
`AutoModelForCausalLM.from_pretrained(...)` in its place and the rest stays as it is.
"""

import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup

import gemini_strategy as gs

ACCUMULATE, STEPS = 2, 60

torch.manual_seed(0)
config = AutoConfig.for_model(
    "qwen2",
    vocab_size=128,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=0,
    pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=STEPS)

# After loading, in place: bf16 weights with packed fp32 masters, and at most 1 MB on the device.
engine = gs.manage(model, optimizer, precision="bf16-true", device_budget="1MB", device="cpu")

text = torch.tensor(
    [list(b"a chunk is fetched when its unit is entered, and evicted when room is needed. ")]
)
model.train()
for step in range(STEPS):
    for _ in range(ACCUMULATE):
        loss = model(input_ids=text, labels=text, use_cache=False).loss
        (loss / ACCUMULATE).backward()
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        print(f"step {step + 1}  loss {loss.item():.3f}  lr {schedule.get_last_lr()[0]:.1e}")

stats = engine.stats()
print(
    f"device peak {stats['device_peak_bytes'] / 1e6:.1f} MB of {stats['device_budget_bytes'] / 1e6:.1f} MB"
)
print(f"{stats['fetches']} fetches, {stats['evictions']} evictions")

model.eval()
start = text[:, :8]
written = model.generate(
    start, attention_mask=torch.ones_like(start), max_new_tokens=60, do_sample=False
)
print("generated:", bytes(written[0].tolist()).decode())

engine.close()
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)  # an ordinary model: what you would have had without Gemini
    print("saved and loaded:", type(AutoModelForCausalLM.from_pretrained(folder)).__name__)
