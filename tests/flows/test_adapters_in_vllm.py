"""Runs that generate in vLLM with an adapter: the tokens of Megatron, and folders for peft and for the next run."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file

from prefect_rlhf.files.model_folder import MERGED
from prefect_rlhf.flows.grpo import grpo
from tests.support import plan_matrix
from tests.support.cases import first
from tests.support.plan_matrix import COMPUTATIONS_OF_GRPO, Case, grpo_plan
from tests.support.runs import first_differences, loss_difference, weight_difference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

ADAPTER = {"rank": 4, "alpha": 8.0}  # vLLM's slot has rank 8
TOLERANCE = 1e-5


def parameters(folder):
    given = plan_matrix.grpo_parameters(plan_matrix.parameters(folder))
    return given | {"actor": given["actor"] | {"adapter": ADAPTER}, "export_merged": True}


CASE = Case(
    grpo,
    parameters,
    {
        "vllm": grpo_plan("0 engine=vllm", "0", "0", "0"),  # which holds the base for all
        "vllm offloaded": grpo_plan("0 engine=vllm offload=all", "0", "0 offload=all", "0 offload=all"),
        "megatron": grpo_plan("0 engine=megatron", "0", "0", "0"),
        "split": grpo_plan("0-1 tp2 engine=vllm", "1", "0-1 tp2", "0-1 pp2"),
    },
    COMPUTATIONS_OF_GRPO,
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The parameters, and their run under a plan; each made once."""
    given = parameters(tmp_path_factory.mktemp("adapters"))

    @cache
    def run(plan):
        return CASE.run(given, plan)

    return given, run


@pytest.mark.parametrize("plan", first(1, ["megatron", "vllm offloaded", "split"]))
def test_tokens_losses_and_adapters_match_another_plan(ran, plan):
    one, other = ran[1]("vllm"), ran[1](plan)
    assert not first_differences(one, other)
    assert loss_difference(one, other) < TOLERANCE
    assert weight_difference(one, other) < TOLERANCE


def test_a_run_writes_the_adapter_for_peft_and_the_merged_model(ran):
    run_dir = ran[1]("vllm").run_dir
    loaded = AutoPeftModelForCausalLM.from_pretrained(run_dir / "actor", dtype=torch.float32)
    expected = loaded.merge_and_unload().state_dict()
    for name, values in load_file(run_dir / f"actor{MERGED}" / "model.safetensors").items():
        torch.testing.assert_close(values, expected[name], rtol=1e-6, atol=1e-7)
    assert (run_dir / "actor" / "tokenizer.json").is_file()


@pytest.mark.all
def test_a_run_starts_from_an_adapter_and_a_frozen_reference_adapter(ran):
    """Both are of one folder, so the KL at version 0 is zero. The rank is the folder's."""
    given, run = ran
    begun = {"path": str(run("vllm").run_dir / "actor")}
    later = {role: given[role] | {"adapter": begun} for role in ("actor", "ref")}
    case = replace(CASE, parameters=lambda folder: given)
    result = case.run({**given, **later, "export_merged": False}, "megatron")
    (kl,) = (value for name, value in result.metrics[0].items() if name.endswith("initial_kl_per_token"))
    assert abs(kl) < 1e-9
    assert weight_difference(replace(run("vllm"), weights={"actor": run("vllm").weights["actor"]}), result) > 1e-4
