"""Search for plans: a planning problem as a value, list scheduling, a true lower bound, and a driver of searches."""
