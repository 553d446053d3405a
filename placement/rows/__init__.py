"""Rows: those that each device has and needs, and the moves between them."""
