"""Replanning: prices checked by measured steps, later plans predicted, and the switch to a better plan."""
