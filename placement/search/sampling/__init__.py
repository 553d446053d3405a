"""Searches by random changes: simulated annealing, and ReaL's Metropolis-Hastings."""
