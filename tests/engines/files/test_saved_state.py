"""States of computations as JSON: they come back as they were, or are refused where they are written."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.engines.compute import saved_state
from prefect_rlhf.engines.files.saved_state import decode, encode
from prefect_rlhf.errors.errors import GraphError, InvalidInput

pytestmark = pytest.mark.quick


@saved_state
@dataclass(frozen=True)
class Moments:
    count: int
    mean: float
    recent: tuple[float, ...] = ()
    by_name: dict[str, int] = field(default_factory=dict)


class Opaque:
    """What JSON cannot hold."""


@dataclass(frozen=True)
class Unregistered:
    """What has no name that a move of its file would leave."""

    count: int = 0


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


@pytest.mark.parametrize("state", [Opaque(), lambda: 0, {1: (2, 3)}, float("nan"), Unregistered()])
def test_what_would_not_come_back_is_refused_by_the_name_of_its_call(state):
    with pytest.raises(
        InvalidInput, match=r"^state of rewards: got '\w+', expected a dataclass with @saved_state or plain values"
    ) as error:
        encode(state, "rewards")
    assert "\n" not in str(error.value)


def test_a_state_is_saved_under_its_name_not_under_its_module():
    assert encode(Moments(1, 0.5), "rewards")["type"] == "Moments"
    with pytest.raises(GraphError, match="^no state is registered as 'Momenta'$"):
        decode({"type": "Momenta", "value": {}})


def test_two_state_types_with_the_same_name_are_both_named_in_one_line():
    """The same one again, as a module that is loaded twice has it, is not another."""
    again = saved_state(Moments)
    assert again is Moments
    other = type("Moments", (), {"__qualname__": "Other.Moments"})
    with pytest.raises(
        GraphError, match=r"^two definitions of state 'Moments': \S+:Moments and \S+:Other.Moments; reg"
    ):
        saved_state(other)
