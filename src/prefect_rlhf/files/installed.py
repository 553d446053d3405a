"""Versions of installed packages, by their metadata: no package is imported."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None.

    >>> installed_version("no-such-package") is None
    True
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
