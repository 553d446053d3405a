"""An augmented graph's schedule: when each node runs, and how long an iteration takes."""
