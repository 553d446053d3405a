"""A run's reports for its users: artifacts, metrics, predicted and measured times."""
