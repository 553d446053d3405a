"""One training run: its inputs, its plan, and its steps."""
