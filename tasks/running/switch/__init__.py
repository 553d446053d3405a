"""A run's switches between plans: planned or requested, and the task run that switches the ranks."""
