"""The choice of a run's plan: given, preset, searched or measured."""
