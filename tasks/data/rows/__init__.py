"""The rows of a dataset that a run reads: their order, their lengths, and checks of many rows."""
