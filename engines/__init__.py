"""The code that runs on the devices: rank processes, Megatron-core, vLLM, tensor moves and weight versions."""
