"""Execution of an augmented graph: every node becomes a Prefect task run and commands to ranks."""
