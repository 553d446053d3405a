"""All that only ranks on CPU run beside Megatron-core: a reader with GPUs may skip this folder."""
