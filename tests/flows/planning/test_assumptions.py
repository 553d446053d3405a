"""What an answer assumes, and how a person changes it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.read_flags import read_flags
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.plan import plan, read_options
from prefect_rlhf.flows.planning.assumptions import AT_LIMIT, assumptions, tail
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.cost.workload import LengthDistribution

pytestmark = pytest.mark.quick

WORDS = ["--cluster", "1x8:h100", "--model", "actor=llama-7b", "--model", "critic=llama-7b", "--prompt-length", "64"]


def asked(*more, algorithm="ppo", models=WORDS[2:6]):
    options = read_options(read_flags(plan, [algorithm, *WORDS[:2], *models, *WORDS[6:], *more]))
    return read_question(find_flow(algorithm), options)


@given(st.integers(1, 100_000))
def test_a_tail_ends_at_its_limit_and_most_of_it_is_far_below(limit):
    lengths = tail(limit)
    assert sum(share for _, share in lengths.shares) == pytest.approx(1)
    assert lengths.longest == limit
    assert all(1 <= length <= limit for length, _ in lengths.shares)
    if limit > 100:
        assert dict(lengths.shares)[limit] == pytest.approx(AT_LIMIT)
        assert lengths.mean == pytest.approx(0.39 * limit, rel=0.02)


def test_a_number_is_a_limit_and_shares_are_exact():
    assumed, said = asked("--response-length", "512"), asked("--response-length", "512:1")
    assert assumed.workload.responses == tail(512)
    assert said.workload.responses == LengthDistribution.fixed(512)
    assert assumed.workload.longest == said.workload.longest == 576  # memory counts the longest
    assert any("--response-length 512:1" in line for line in assumptions(assumed))
    assert not any("log-normal" in line for line in assumptions(said))


def test_the_hosts_part_of_a_call_is_named_and_may_be_said():
    words = ["--response-length", "64"]
    ours, slower = asked(*words), asked(*words, "--call-seconds", "2.2")
    assert any("10 ms" in line and "--call-seconds" in line for line in assumptions(ours))
    assert any("2200 ms" in line for line in assumptions(slower))
    nodes = [question.site.sources.nodes[0].efficiency.call_seconds for question in (ours, slower)]
    assert nodes == [0.01, 2.2]


def test_host_memory_follows_the_kind_unless_stated():
    """Eight H100s have 2 TiB; of two kinds of nodes the smaller counts; a kind without a usual host has no limit."""
    words = ["--response-length", "64"]

    def room(*more, cluster="1x8:h100"):
        question = asked(*words, *more, "--cluster", cluster)
        said = [line for line in assumptions(question) if "--host-memory-gib" in line]
        return question.site.cluster.host_memory_bytes / 2**30, len(said)

    assert room() == (1536, 1)
    assert room(cluster="1x2:h100") == (384, 1)
    assert room(cluster="1x8:a100-40+1x8:v100-32") == (384, 1)
    assert room("--host-memory-gib", "100") == (100, 0)
    assert room(cluster="1x8:rtx4090") == (0, 0)
    assert asked(*words).workload.has_checkpoints


def test_the_constant_of_vllms_steps_is_named_if_vllm_generates_on_gpus():
    said = list(assumptions(asked("--response-length", "64")))
    assert any("40 us for a layer" in line and "42 us for each row" in line for line in said)
    dpo = asked("--response-length", "64", algorithm="dpo", models=WORDS[2:4])
    assert not any("vLLM" in line for line in assumptions(dpo))


def test_the_load_of_experts_is_named_for_a_mixture_alone():
    mixture = asked("--response-length", "64", algorithm="dpo", models=["--model", "actor=mixtral-8x7b"])
    assert any("1.5 times the mean of tokens" in line for line in assumptions(mixture))
    assert not any("experts" in line for line in assumptions(mixture, states_imbalance=True))
    more = ["--response-length", "64", "--expert-imbalance", "2"]
    worse = asked(*more, algorithm="dpo", models=["--model", "actor=mixtral-8x7b"])
    assert worse.workload.expert_imbalance == 2 and not any("experts" in line for line in assumptions(worse))
    dense = asked("--response-length", "64", algorithm="dpo", models=WORDS[2:4])
    assert not any("experts" in line for line in assumptions(dense))


def test_measured_values_are_not_listed_as_assumptions(tmp_path):
    with pytest.raises(InvalidInput, match="call_seconds"):
        asked("--response-length", "64", "--call-seconds", "1", "--profile", str(tmp_path / "none.json"))


def test_answers_that_are_data_have_no_tail():
    """DPO generates nothing."""
    found = asked("--response-length", "100", algorithm="dpo", models=WORDS[2:4])
    assert found.workload.responses == LengthDistribution.fixed(164)
