"""Weights in device memory: versions, fingerprints, moves between layouts, offload."""
