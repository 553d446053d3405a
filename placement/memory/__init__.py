"""The proof that a plan fits, by a memory model that one GPU has confirmed in parts: bytes of devices by moment."""
