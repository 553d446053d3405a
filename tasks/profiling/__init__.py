"""Measuring a model on devices: the bench that is timed, and the profile made of it."""
