"""From a question to the best plan that a search finds, with a bound on every other."""
