"""The trackers of a run: its journal's lines shown in TensorBoard, MLflow or W&B, which never hold it up."""
