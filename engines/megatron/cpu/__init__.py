"""Code for Megatron-core that only ranks on CPU run: a reader with GPUs may skip this folder."""
