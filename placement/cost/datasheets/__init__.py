"""Speeds of devices and links from datasheets, and what collectives take on them."""
