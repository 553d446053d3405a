"""Choosing a run's plan: given, preset, searched or measured."""
