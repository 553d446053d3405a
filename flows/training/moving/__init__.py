"""Later plans of a run: their predictions, and the decision to move to a better plan."""
