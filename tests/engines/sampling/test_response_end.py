"""How many responses were cut: those that came to their most tokens before anything ended them."""

import pytest

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.sampling.response_end import cut_share
from tests.tasks.small_tokenizer import ids, save_small_tokenizer

END = 9
SHORT, LAST, CUT = [4, 5], [4, 5, END], [4, 5, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return save_small_tokenizer(folder)


def test_a_response_that_its_last_token_ends_is_not_cut(folder):
    assert cut_share([SHORT, LAST, CUT, [5, END]], SamplingSettings(3), [END], folder) == 0.25
    assert cut_share([LAST], SamplingSettings(3), [END], folder) == 0
    assert cut_share([CUT, CUT], SamplingSettings(3), [END], folder) == 1


def test_a_stop_string_ends_a_response(folder):
    sampling = SamplingSettings(2, stop_at_eos=False, stop=("film",))
    assert cut_share([ids("a film"), ids("film a")], sampling, [END], folder) == 0
    assert cut_share([ids("a film"), ids("is a")], sampling, [END], folder) == 0.5


def test_responses_that_only_their_length_ends_are_not_cut(folder):
    assert cut_share([CUT], SamplingSettings(3, stop_at_eos=False), [END], folder) is None
    assert cut_share([], SamplingSettings(3), [END], folder) is None
