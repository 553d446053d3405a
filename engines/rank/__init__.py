"""A rank: the engines and rows of a device, and the commands that it executes."""
