"""`make demo`: the main job on this machine, from packages to a trained model, through a real Prefect server."""
