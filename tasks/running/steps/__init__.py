"""The steps in flight: their rows, and the nodes that each has left."""
