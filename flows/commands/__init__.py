"""The command line `prefect-rlhf`."""
