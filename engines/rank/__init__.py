"""A rank: a device's engines and rows, and the commands that it executes."""
