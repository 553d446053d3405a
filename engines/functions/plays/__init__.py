"""Plays: your coroutines that talk with a model, each row's in a worker process, and the rank's side."""
