"""The range of an answer, by the record of public runs."""

from dataclasses import replace

import pytest

from benchmarks.planner.read_flags import read_flags
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.plan import plan, read_options
from prefect_rlhf.flows.hardware.profiles import origin
from prefect_rlhf.flows.hardware.runtimes import OURS, PUBLIC, runtime_of, with_runtime
from prefect_rlhf.flows.planning.record import RECORD, public_range
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.planner.preset_plan import preset

pytestmark = pytest.mark.quick

MODEL = ["--model", "actor=qwen2.5-1.5b", "--prompt-length", "64", "--response-length", "64", "--batch-size", "16"]


def asked(*more, algorithm="grpo", cluster="1x2:h100"):
    options = read_options(read_flags(plan, [algorithm, *MODEL, "--cluster", cluster, *more]))
    return read_question(find_flow(algorithm), options)


def planned(question):
    return preset("flattening", question.graph, question.site.cluster, question.site.mesh)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_the_range_is_the_record_of_the_kind_around_the_estimate_for_public_runs(algorithm):
    question = asked(algorithm=algorithm)
    chosen = planned(question)
    found = public_range(question, chosen)
    record = RECORD[found.kind]
    assert found.kind == ("rollouts" if algorithm == "grpo" else "training")
    public = replace(question, site=with_runtime(question.site, PUBLIC)).estimate(chosen).seconds
    assert (found.least, found.most, found.runs) == (public * record.least, public * record.most, record.runs)
    assert str(found).startswith("public runs of this kind: ")


def test_no_public_run_was_on_cpus():
    question = asked(cluster="1x2:cpu")
    assert public_range(question, planned(asked())) is None


def test_an_answer_states_the_runtime_that_its_seconds_are_of():
    ours, public = asked(), asked("--runtime", "public")
    assert [runtime_of(each.site.sources.nodes[0]) for each in (ours, public)] == [OURS, PUBLIC]
    assert origin(ours.site.sources) == "from datasheets and readings of an H100"
    assert origin(public.site.sources) == "from datasheets and half of the public runs"
    assert public.estimate(planned(ours)).seconds > ours.estimate(planned(ours)).seconds
    stated = asked("--runtime", "public", "--call-seconds", "0.5").site.sources.nodes[0]
    assert stated.efficiency.call_seconds == 0.5 and runtime_of(stated) == PUBLIC


def test_an_unknown_runtime_and_a_runtime_for_cpus_are_refused_in_a_line():
    for more, cluster, right in (
        (["--runtime", "verl"], "1x2:h100", "'prefect-rlhf' or 'public'"),
        (["--runtime", "public"], "1x2:cpu", "prefect-rlhf, or a cluster of GPUs"),
    ):
        with pytest.raises(InvalidInput, match="runtime: got") as refused:
            asked(*more, cluster=cluster)
        assert right in str(refused.value) and "\n" not in str(refused.value)
