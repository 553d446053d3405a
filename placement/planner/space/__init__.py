"""The space of plans: candidates of each call, meshes, weight copies, and the problem to search."""
