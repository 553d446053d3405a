"""Weights and training state on disk: Hugging Face folders, checkpoints, exports."""
