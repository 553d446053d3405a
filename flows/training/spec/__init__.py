"""The request for a run, read from its form once: the place of its files, its plans, its switches."""
