"""A file of JSON is read whole, plain or gzipped, or refused in one line."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.closed_problem import read_json
from prefect_rlhf.errors.errors import InvalidInput

NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
)
WHOLE = gzip.compress(b'{"calls": []}')


@given(value=VALUES)
def test_json_round_trips(value, tmp_path_factory):
    """By the standard library, with which it shares no code."""
    for name, packed in (("plain.json", lambda content: content), ("packed.gz", gzip.compress)):
        path = tmp_path_factory.mktemp("json") / name
        path.write_bytes(packed(json.dumps(value).encode()))
        assert read_json(path, "FILE") == value


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"a": NaN}', b"\xff", b"[1,]", WHOLE[:-9], WHOLE[:12] + b"\0" * 4 + WHOLE[16:], b"\x1f\x8b"],
    ids=["empty", "cut short", "no number", "no text", "a comma", "cut short in gzip", "damaged gzip", "no gzip"],
)
def test_malformed_json_is_refused_in_one_line(content, tmp_path):
    path = tmp_path / "problem.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"\AFILE: got '.*problem.json', expected JSON, or gzipped JSON \(.*\)\Z"):
        read_json(path, "FILE")


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_missing_json_file_is_refused_in_one_line(name, tmp_path):
    with pytest.raises(InvalidInput, match=r"\AFILE: got '.*', expected a file of JSON \(.*\)\Z"):
        read_json(tmp_path / name, "FILE")
