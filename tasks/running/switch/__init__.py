"""A run's switches between its plans: those planned or asked for, and the task run that switches the ranks."""
