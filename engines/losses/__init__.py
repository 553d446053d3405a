"""Losses as an engine sees them."""
