"""The trackers of a run: they show its journal's lines in TensorBoard, MLflow or W&B, and never delay the run."""
