"""The place of an error: the innermost line that a person wrote."""

import json

import pytest

from prefect_rlhf.errors.blame import described, is_own, own_place

pytestmark = pytest.mark.quick


def caught(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001  whatever it is
        return error
    raise AssertionError("it raised nothing")


def test_an_error_is_described_by_the_line_in_your_own_file():
    """Not by the library's, where it was raised."""
    error = caught(lambda: json.loads("{"))
    line = test_an_error_is_described_by_the_line_in_your_own_file.__code__.co_firstlineno + 2
    assert own_place(error) == f"{__file__}:{line} in <lambda>"
    assert described(error).startswith("JSONDecodeError: Expecting property name")
    assert described(error).endswith(f"({__file__}:{line} in <lambda>)")


@pytest.mark.parametrize("file", [json.__file__, pytest.__file__, "<string>", is_own.__code__.co_filename])
def test_python_and_packages_are_nobodys_own(file):
    assert not is_own(file)
