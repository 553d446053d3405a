"""The request for a run, parsed once from its form: place of files, plans, switches."""
