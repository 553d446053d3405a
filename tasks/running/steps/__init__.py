"""The steps in flight, and the nodes and rows that each has left."""
