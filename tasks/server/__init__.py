"""Resilience against Prefect server outages: requests wait, and lost task run events are sent again."""
