"""An algorithm as a value: the decorator that traces it, its name, and its runs from Python."""
