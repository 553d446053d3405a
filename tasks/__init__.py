"""The algorithm side of a task run: tracing, losses, the runner, trackers, profiling. Ranks import the losses."""
