"""Model families, a file each: the meaning of a config.json, the weights of a layer, and refused settings."""
