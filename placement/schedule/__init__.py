"""The schedule of an augmented graph: when each node runs, and how long an iteration takes."""
