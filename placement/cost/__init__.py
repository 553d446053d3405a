"""Seconds and bytes of every node of an augmented graph, from datasheets or from a profile."""
