"""The augmented graph: one iteration unrolled, with every move, checkpoint and export as a node."""
