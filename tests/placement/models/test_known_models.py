"""Models by name have the sizes that the hub says, whatever of their names a person writes."""

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES, find_shape, known_shape

PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-2407": 12_247_782_400,
    "mistral-small-24b-2501": 23_572_403_200,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
}
"""As the hub counts the parameters of their safetensors files."""
ACTIVE = {"mixtral-8x7b": 12.9e9, "qwen3-30b-a3b": 3.3e9, "qwen3-235b-a22b": 22e9}
"""Of a token, as their publishers say (Jiang et al. 2024, arXiv:2401.04088; Qwen3, arXiv:2505.09388)."""
NAMES = {
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "Qwen/Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3-30b-a3b-2507",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "qwen/qwen2.5-0.5b-instruct": "qwen2.5-0.5b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b-instruct",
    "Qwen/Qwen3-8B-Base": "qwen3-8b-base",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "meta-llama/Llama-2-13b-chat-hf": "llama-13b",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral-7b-v0.2",
    "mistralai/Mistral-Nemo-Instruct-2407": "mistral-nemo-2407",
    "google/gemma-3-12b-pt": "gemma-3-12b",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_as_many_parameters_as_the_hub_says(name):
    assert ModelSizes.of_shape(KNOWN_SHAPES[name]).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_a_mixture_of_experts_has_as_many_active_parameters_as_its_publisher_says(name):
    sizes = ModelSizes.of_shape(KNOWN_SHAPES[name])
    passed_by = sizes.num_layers * (sizes.num_experts - sizes.experts_per_token) * sizes.feed_forward
    assert sizes.num_parameters - passed_by == pytest.approx(ACTIVE[name], rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_an_id_on_the_hub_is_the_model_of_its_short_name(name):
    assert find_shape(name) is KNOWN_SHAPES[NAMES[name]]


@pytest.mark.parametrize("name", ["someone/Qwen2.5-7B", "models/llama-7b", "/data/qwen3-8b", "", "qwen2.5-8b"])
def test_a_missing_folder_is_not_a_known_model(name):
    """Its last part may be the name of one: who wrote a path meant the folder."""
    assert find_shape(name) is None


def test_the_line_for_an_unknown_name_has_names_like_it():
    with pytest.raises(InvalidInput, match="model: got 'Qwen/Qwen2.5-8B', expected the name of .*qwen2.5-7b"):
        known_shape("Qwen/Qwen2.5-8B")


def test_all_names_stand_in_the_documentation(pytestconfig):
    page = (pytestconfig.rootpath / "docs" / "planning.md").read_text()
    assert not [name for name in KNOWN_SHAPES if f"`{name}`" not in page]
