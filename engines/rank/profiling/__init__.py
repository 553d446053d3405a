"""Timing engines: a rank that measures, and a clock inside the layers."""
