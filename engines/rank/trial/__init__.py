"""A rank without engines, which runs computations and losses on made-up rows before a run."""
