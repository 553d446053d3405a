"""The code on the devices: rank processes, Megatron-core, vLLM, weights; also functions of users on the hosts."""
