"""The reports of a run for its users: artifacts, metrics, predicted next to measured times."""
