"""A train_step: micro-batches, sums of losses, gradient buffers, and the optimizer."""
