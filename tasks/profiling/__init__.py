"""Measuring a model on devices: the measured setup, and the profile made from the measurements."""
