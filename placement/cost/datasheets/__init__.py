"""Device and link speeds from datasheets, and how long collectives take on them."""
