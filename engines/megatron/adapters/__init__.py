"""Adapters in Megatron: linear layers with a low-rank adapter, and frozen weights in four bits below it."""
