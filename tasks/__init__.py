"""The algorithm side of a task run: tracing, losses, advantages, the runner. Imported by ranks, so kept light."""
