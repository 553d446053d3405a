"""Model families: the meaning of a config.json, the weights of a layer and the refused settings, a file per family."""
