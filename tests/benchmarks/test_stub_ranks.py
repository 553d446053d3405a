"""The stub ranks of benchmarks/parts/many_nodes.py: a gang starts with them as with ranks that compute."""

from contextlib import closing

from benchmarks.parts.many_nodes import stub_gang
from prefect_rlhf.engines.rank.rank import Rank


def test_a_gang_of_stub_ranks_starts_and_answers():
    with closing(stub_gang(2)) as gang:
        answers = gang.call(Rank.open_dataset, {0: (None,), 1: (None,)}, doing="open", deadline_seconds=30)
    assert answers == {0: None, 1: None}
