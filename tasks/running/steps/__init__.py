"""The steps in flight, and each step's remaining nodes and rows."""
