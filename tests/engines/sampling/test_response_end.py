"""Which responses were cut: those that came to their most tokens before anything ended them."""

import pytest

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.sampling.response_end import can_end, cut_rows
from tests.tasks.small_tokenizer import ids, save_small_tokenizer

END = 9
SHORT, LAST, CUT = [4, 5], [4, 5, END], [4, 5, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save_small_tokenizer(folder)


def test_a_response_that_its_last_token_ends_is_not_cut(folder):
    assert cut_rows([SHORT, LAST, CUT, [5, END]], SamplingSettings(3), [END], folder) == [False, False, True, False]


def test_a_stop_string_ends_a_response(folder):
    sampling = SamplingSettings(2, stop_at_eos=False, stop=("film",))
    assert cut_rows([ids("a film"), ids("is a")], sampling, [END], folder) == [False, True]


def test_without_an_end_token_and_stop_strings_nothing_but_its_length_ends_a_response(folder):
    never = SamplingSettings(3, stop_at_eos=False)
    assert cut_rows([LAST], never, [END], folder) == [True]
    by_string = SamplingSettings(3, stop_at_eos=False, stop=("film",))
    assert [can_end(each) for each in (never, SamplingSettings(3), by_string)] == [False, True, True]
