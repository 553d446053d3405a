"""The error of host calls that fail on more rows than they may."""

from prefect_rlhf.placement.errors import RlhfError


class HostFunctionFailed(RlhfError):
    """A host function failed on more rows than `most_failed` allows; says which, where, on how many, and why first."""
