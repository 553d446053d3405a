"""The address of a page of the Hub is refused with the name to write in its place."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.hub.hub_path import hub_path

pytestmark = pytest.mark.quick

SITE = "https://huggingface.co"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (f"{SITE}/Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        (f"{SITE}/Qwen/Qwen2.5-0.5B/", "Qwen/Qwen2.5-0.5B"),
        (f"{SITE}/Qwen/Qwen2.5-0.5B/tree/main", "Qwen/Qwen2.5-0.5B"),
        (f"{SITE}/Qwen/Qwen2.5-0.5B/tree/v1?show=all", "Qwen/Qwen2.5-0.5B@v1"),
        ("huggingface.co/Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B"),
        ("https://hf.co/Qwen/Qwen2.5-0.5B#use", "Qwen/Qwen2.5-0.5B"),
        (f"{SITE}/datasets/openai/gsm8k", "hf://datasets/openai/gsm8k"),
        (f"{SITE}/datasets/openai/gsm8k/blob/main/a/b.parquet", "hf://datasets/openai/gsm8k/a/b.parquet"),
    ],
)
def test_an_address_of_a_page_is_answered_with_the_name(address, name):
    with pytest.raises(InvalidInput) as refused:
        hub_path(address, "actor.path")
    assert str(refused.value).endswith(f"expected a name, not the address of a page: {name}")


@pytest.mark.parametrize("path", [f"{SITE}/datasets/openai/gsm8k/resolve/main/b.parquet", "hf.co", "./hf.co/a"])
def test_a_readable_file_is_not_a_hub_page(path):
    assert hub_path(path, "prompts.path") is None
