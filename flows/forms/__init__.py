"""Forms: the typed parameters of every flow, and their check."""
