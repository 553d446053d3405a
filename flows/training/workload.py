"""The rows of a run as the cost model counts them: prompts as the data has them, responses as long as they may be."""

from __future__ import annotations

from prefect_rlhf.flows.training.inputs import RunInputs, longest_sequence
from prefect_rlhf.flows.training.lengths import distribution
from prefect_rlhf.placement.cost.made_rows import with_made_rows
from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.graph import DataflowGraph

ROWS_READ = 1024  # of a dataset, evenly from all of it: enough to know its lengths


def run_workload(graph: DataflowGraph, inputs: RunInputs) -> Workload:
    """Return the lengths of the rows that are trained on; the longest possible one counts for memory alone.

    Where nothing generates, any token may be one that is scored, so all of them count as responses. Raises InvalidInput
    where the models take no row that long.
    """
    longest = longest_sequence(graph, inputs)
    trained = [call for call in graph if call.every is None]
    source = inputs.sources[trained[0].rows.dataset]
    rows = source.read(range(0, len(source), -(-len(source) // ROWS_READ)))
    prompts_or_pairs = rows["prompt_tokens" if "prompt_tokens" in rows else "tokens"]
    lengths = distribution([len(tokens) for tokens in prompts_or_pairs])
    most_new = max((call.max_new_tokens for call in trained if call.kind == "generate"), default=0)
    if most_new:
        workload = Workload(lengths.reaching(longest - most_new), LengthDistribution.fixed(most_new))
    else:
        workload = Workload(LengthDistribution.fixed(0), lengths.reaching(longest))
    return with_made_rows(workload, graph, inputs.longest)
