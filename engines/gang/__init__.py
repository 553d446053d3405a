"""The gang of one process per device: start, calls, failures and end."""
