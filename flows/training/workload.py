"""A run's rows for the cost model: prompts as long as in the data, responses as expected or allowed."""

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.flows.training.inputs import RunInputs, longest_sequence
from prefect_rlhf.flows.training.lengths import distribution, parse_lengths
from prefect_rlhf.placement.cost.made_rows import with_made_rows
from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.graph import DataflowGraph

EXPECTED = "expected_response_length"
ROWS_COUNTED = 1024  # at most, evenly spaced: enough to estimate the lengths of a dataset


def run_workload(graph: DataflowGraph, inputs: RunInputs, expected: str = "") -> Workload:
    """Return the lengths of trained rows; the longest possible row matters only for memory.

    Responses have the `expected` lengths, or the maximum length if that is empty. If no call generates, any token may
    be scored, so all tokens count as responses. Raises InvalidInput if a model does not accept the longest row, and for
    invalid expected lengths.
    """
    longest = longest_sequence(graph, inputs)
    trained = [call for call in graph if call.every is None]
    rows = inputs.checked_rows[trained[0].rows.dataset].lengths
    lengths = distribution(rows[:: -(-len(rows) // ROWS_COUNTED)])
    most_new = max((call.max_new_tokens for call in trained if call.kind == "generate"), default=0)
    if most_new:
        responses = _expected(expected, most_new) if expected else LengthDistribution.fixed(most_new)
        workload = Workload(lengths.reaching(longest - most_new), responses)
    elif expected:
        raise NotUsed(EXPECTED, expected, "no call generates")
    else:
        workload = Workload(LengthDistribution.fixed(0), lengths.reaching(longest))
    return with_made_rows(workload, graph, inputs.longest)


def _expected(text: str, most: int) -> LengthDistribution:
    """Return expected lengths of responses, which may have `most` tokens. Raises InvalidInput for longer lengths."""
    lengths = parse_lengths(text, EXPECTED, "response")
    if lengths.longest > most:
        raise InvalidInput(EXPECTED, lengths.longest, f"at most {most}, the longest response")
    return lengths.reaching(most)
