"""When each node of an augmented graph runs, and how long an iteration takes."""
