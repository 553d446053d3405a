"""States of computations as JSON: they come back as they were, or are refused where they are written."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.engines.files.saved_state import decode, encode
from prefect_rlhf.placement.errors import InvalidInput


@dataclass(frozen=True)
class Moments:
    count: int
    mean: float
    recent: tuple[float, ...] = ()
    by_name: dict[str, int] = field(default_factory=dict)


class Opaque:
    """What JSON cannot hold."""


numbers = st.floats(allow_nan=False, allow_infinity=False)
states = st.one_of(
    st.none(),
    numbers,
    st.integers(),
    st.dictionaries(st.text(), numbers),
    st.builds(Moments, st.integers(), numbers, st.lists(numbers).map(tuple), st.dictionaries(st.text(), st.integers())),
)


@given(states)
def test_a_state_comes_back_as_it_was_through_a_file(state):
    """Every bit of a number, tuples as tuples."""
    found = decode(json.loads(json.dumps(encode(state, "rewards"))))
    assert found == state and type(found) is type(state)


@pytest.mark.parametrize("state", [Opaque(), lambda: 0, {1: (2, 3)}, float("nan")])
def test_what_would_not_come_back_is_refused_by_the_name_of_its_call(state):
    with pytest.raises(
        InvalidInput, match=r"^state of rewards: got '\w+', expected a dataclass or plain values"
    ) as error:
        encode(state, "rewards")
    assert "\n" not in str(error.value)
