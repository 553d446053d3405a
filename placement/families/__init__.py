"""Model families: what a config.json says, the weights of a layer and what is refused, one file a family."""
