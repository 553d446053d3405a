"""Replanning: measured steps check predicted times, later plans are predicted, and a run switches to a better plan."""
