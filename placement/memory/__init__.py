"""The proof that a plan fits, by a memory model that no GPU has confirmed yet: bytes of devices over the schedule."""
