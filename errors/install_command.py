"""The command that installs an extra. The package is on no index, so pip takes it from the clone."""


def install_command(*extras: str) -> str:
    """Say how to install extras.

    >>> install_command("ray")
    "pip install '.[ray]' in the clone of prefect-rlhf"
    """
    return f"pip install '.[{','.join(extras)}]' in the clone of prefect-rlhf"
