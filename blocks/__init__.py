"""Prefect blocks and the gpu-mesh worker: what a person types once in the UI or CLI."""
