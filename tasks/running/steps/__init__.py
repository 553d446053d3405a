"""The steps in flight, the nodes and rows that each has left, and the moves between steps."""
