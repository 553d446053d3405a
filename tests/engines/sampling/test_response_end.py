"""Which responses were cut: those that came to their most tokens before anything ended them."""

import pytest

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.sampling.response_end import cut_rows
from tests.tasks.small_tokenizer import ids, save_small_tokenizer

END = 9
SHORT, LAST, CUT = [4, 5], [4, 5, END], [4, 5, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save_small_tokenizer(folder)


def test_a_response_that_its_last_token_ends_is_not_cut(folder):
    """Also at its most tokens."""
    assert cut_rows([SHORT, LAST, CUT, [5, END]], SamplingSettings(3), [END], folder) == [False, False, True, False]
    assert cut_rows([], SamplingSettings(3), [END], folder) == []


def test_a_stop_string_ends_a_response(folder):
    sampling = SamplingSettings(2, stop_at_eos=False, stop=("film",))
    assert cut_rows([ids("a film"), ids("film a")], sampling, [END], folder) == [False, False]
    assert cut_rows([ids("a film"), ids("is a")], sampling, [END], folder) == [False, True]


def test_responses_that_only_their_length_ends_were_all_cut(folder):
    assert cut_rows([CUT, LAST], SamplingSettings(3, stop_at_eos=False), [END], folder) == [True, True]
