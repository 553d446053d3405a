"""Evaluation without training: any model on named sets, in a run of its own, and two models on the same prompts."""
