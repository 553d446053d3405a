"""The settings of the algorithms."""
