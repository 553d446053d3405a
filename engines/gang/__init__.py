"""The gang: one process per device, its start, its calls, its failures and its end."""
