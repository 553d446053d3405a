"""Searches by random changes: simulated annealing, and the Metropolis-Hastings of ReaL."""
