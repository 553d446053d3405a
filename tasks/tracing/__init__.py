"""The functions for a flow's body, and the graph that they record when the body is traced."""
