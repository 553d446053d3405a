"""A wrong job variable is refused in a line that names it."""

import asyncio

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.worker.configuration import GpuMeshConfiguration
from prefect_rlhf.blocks.worker.worker import GpuMeshWorker
from prefect_rlhf.errors.errors import InvalidInput

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def no_server():
    """No server is asked."""
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        yield


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mesh": None}, "job_variables.mesh: got None, expected text; for the pool's value leave it out"),
        ({"num_devices": "two"}, "job_variables.num_devices: got 'two', expected a whole number"),
        ({"mehs": "n0:0"}, "job_variables: got 'mehs', expected one of"),
        (
            {"mesh": None, "max_restarts": -1},
            "2 mistakes: (1) job_variables.mesh: got None, expected text; for the pool's value leave it out"
            " (2) job_variables.max_restarts: got -1, expected at least 0",
        ),
    ],
)
def test_a_wrong_job_variable_is_named_in_one_line(values, said):
    template = GpuMeshWorker.get_default_base_job_template()
    with pytest.raises(InvalidInput) as refused:
        asyncio.run(GpuMeshConfiguration.from_template_and_values(template, values))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_an_impossible_block_name_is_refused_in_one_line():
    with pytest.raises(InvalidInput) as refused:
        Model(saved="two\nlines")
    expected = r"Model.saved: got 'two\nlines', expected the name of a saved rlhf-model block (prefect block ls)"
    assert str(refused.value) == expected
