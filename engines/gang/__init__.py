"""The gang, a process per device: start, calls, failures and end."""
