"""Evaluate a model on named sets without training, in a run of its own, or compare two models on the same prompts."""
