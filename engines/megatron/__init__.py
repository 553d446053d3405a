"""TrainingEngine on Megatron-core: explicit process groups, its GPTModel, DDP buffers, optimizer and schedules."""
