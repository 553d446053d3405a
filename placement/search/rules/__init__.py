"""Scheduling rules, each with its order of nodes and its bounds; a search is given a rule."""
