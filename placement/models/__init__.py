"""Models as numbers: shapes, heads and optimizers, the models known by name, and their families."""
