"""The exact search: iterative deepening, and annealing that finds plans for it."""
