"""The space of plans: each call's candidates, meshes, weight copies, and the problem to search."""
