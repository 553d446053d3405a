"""Search for plans: a planning problem as a value, list scheduling, a true lower bound, searches behind one driver."""
