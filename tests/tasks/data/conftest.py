"""The folder of the small tokenizer."""

import pytest

from tests.tasks.small_tokenizer import save_small_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_small_tokenizer(tmp_path_factory.mktemp("tokenizer"))
