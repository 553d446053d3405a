"""Rows: the rows that each device has and needs, and the moves between them."""
