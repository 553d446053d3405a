"""Code on the devices: rank processes, Megatron-core, vLLM, weights; also users' functions on the hosts."""
