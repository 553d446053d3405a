"""The rows of a dataset that a run reads: their order, their lengths, and the checks of many rows."""
