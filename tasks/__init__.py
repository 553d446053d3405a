"""The algorithm side of a task run: tracing, losses, advantages, the runner. Ranks import it, so imports are light."""
