"""The words of a flow's body, and the graph that they make when the body is traced."""
