"""The formats in which other libraries write rows: found by their columns, and read as our own columns."""
