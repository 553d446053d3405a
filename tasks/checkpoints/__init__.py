"""Checkpoints as the controller sees them: folders, manifests, and whether a run may resume from them."""
