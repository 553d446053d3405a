"""The code on the devices: rank processes, Megatron-core, vLLM, weights; also object stores and host functions."""
