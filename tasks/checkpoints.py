"""Checkpoint folders as the controller sees them: described before any device is taken, never loaded."""

from prefect_rlhf.engines.huggingface import read_model_spec

__all__ = ["read_model_spec"]
