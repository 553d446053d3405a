"""Layer times, from a profile or from the datasheet's roofline."""
