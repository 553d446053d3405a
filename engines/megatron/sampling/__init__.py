"""Generation with the training engine: groups of rows, a token at a time."""
