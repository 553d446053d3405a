"""Workers that score rows: the pool, a worker from the pool's side, the worker itself, and their messages."""
