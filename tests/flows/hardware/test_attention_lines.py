"""A run on GPUs says which kernel its attention takes."""

from dataclasses import replace

from prefect_rlhf.flows.hardware.attention import attention_lines
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.strategies import TWO_DEVICES, ppo


def test_each_kernel_gets_a_line_with_its_roles_and_uncounted_memory():
    graph = ppo()
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    narrow = [replace(each, dtype="bfloat16" if each.role != "critic" else "float32") for each in graph.models]
    assert set(attention_lines(replace(graph, models=tuple(narrow)), [plan])) == {
        "attention of ref, reward, actor: flash attention",
        "attention of critic: scores of all pairs of tokens, which the certificate of memory does not count",
    }
