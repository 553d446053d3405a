"""All that only ranks on CPU run beside vLLM: a reader with GPUs may skip this folder."""
