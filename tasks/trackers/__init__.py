"""A run's trackers: they show its journal in TensorBoard, MLflow or W&B, and never delay the run."""
