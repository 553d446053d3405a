"""All that runs on the devices: the gang of rank processes, Megatron-core, vLLM, moving tensors, weight versions."""
