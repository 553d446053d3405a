"""From a question to the best plan that a search finds, with a lower bound on every plan."""
