"""The proof that a plan fits, by a memory model that no GPU has confirmed as a whole: bytes of devices by moment."""
