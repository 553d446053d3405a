"""How a token is drawn, from which seed, and when a response ends: one rule for every engine."""
