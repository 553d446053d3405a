"""What a person may set: the typed parameters of every flow, and their check."""
