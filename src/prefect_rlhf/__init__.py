"""RLHF training as a Prefect plugin: algorithms are flows, model function calls are task runs on planned meshes."""
