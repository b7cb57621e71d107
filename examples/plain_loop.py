"""A plain PyTorch loop under a memory budget: one line more than without."""

import torch
from torch import nn

import gemini_strategy as gs

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine = gs.manage(model, optimizer, device_budget="10MB", device="cpu")  # the line; 16 MB of state

for step in range(50):
    x = torch.randn(64, 256)
    loss = (model(x) - x.square().mean(1, keepdim=True)).square().mean()
    loss.backward()
    norm = engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1}  loss {loss.item():.4f}  gradient norm {norm:.3f}")

print(engine.report())  # what was planned after the first step, and what was measured since
engine.close()  # an ordinary model again, with the trained weights
