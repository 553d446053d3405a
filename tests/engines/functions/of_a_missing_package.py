"""A module that imports a package that is not installed."""

import no_such_package  # noqa: F401
