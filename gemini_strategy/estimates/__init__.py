"""What a training run will take, before it: a step is recorded on tensors without bytes, and the core plans it."""
