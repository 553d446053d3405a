"""What Megatron-core needs where there is no CUDA; a reader with GPUs may skip it."""
