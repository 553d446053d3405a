"""Resilience against Prefect server outages: requests wait, and lost events of task runs are sent again."""
