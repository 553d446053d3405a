"""Code for vLLM that only ranks on CPU run: a reader with GPUs may skip this folder."""
