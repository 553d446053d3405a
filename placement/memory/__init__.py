"""The proof that a plan fits: bytes of every device along the schedule."""
