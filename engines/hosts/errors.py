"""The error of host calls that fail on too many rows."""

from prefect_rlhf.placement.errors import RlhfError


class HostFunctionFailed(RlhfError):
    """A host function failed on more rows than `most_failed` allows; names it, its file, the count and a reason."""
