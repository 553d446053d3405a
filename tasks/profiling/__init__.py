"""Measuring a model on devices: what is timed, and the profile made of it."""
