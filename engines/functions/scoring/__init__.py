"""Workers that score rows: the pool, a worker from its side, the worker itself, and their messages."""
