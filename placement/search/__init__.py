"""Search for plans: a planning problem as a value, list scheduling, a valid lower bound, and a driver of searches."""
