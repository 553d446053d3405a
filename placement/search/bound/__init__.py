"""Lower bounds on the time of every completion of a partial plan."""
