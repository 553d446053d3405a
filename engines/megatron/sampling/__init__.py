"""Generation with the training engine: groups of rows, one token at a time."""
