"""Seconds of a layer, from a profile or from a roofline of the datasheet."""
