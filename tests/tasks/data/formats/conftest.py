"""A tokenizer with the chat template of Qwen 2.5, and files of rows."""

import pytest

from tests.engines.sampling.stand_ins import stand_in
from tests.tasks.data.stored import json_lines, parquet
from tests.tasks.small_tokenizer import save_small_tokenizer


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    return stand_in("qwen2_5", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(params=["json", "parquet"])
def stored(request, tmp_path):
    """Write rows as JSON lines or as Parquet; return the path."""

    def write(*rows, name="rows"):
        if request.param == "json":
            return json_lines(tmp_path / f"{name}.jsonl", *rows)
        columns = dict.fromkeys(key for row in rows for key in row)
        return parquet(tmp_path / f"{name}.parquet", **{key: [row.get(key) for row in rows] for key in columns})

    return write


@pytest.fixture(scope="session")
def tokenizer_without_template(tmp_path_factory):
    return save_small_tokenizer(tmp_path_factory.mktemp("plain"), None)
