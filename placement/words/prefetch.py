"""When an offloaded part comes back: while the previous call runs, or only when its devices are idle.

The latter costs the time of the copies, but no other call needs memory for the part.
"""

from collections.abc import Iterator

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.words.word import Word, every_engine, field_of


def _wrong(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    if placement.offload == "none":
        yield NotUsed(field_of(call, PREFETCH.name), False, "offload is none, so nothing is reloaded")


PREFETCH = Word(
    name="prefetch",
    default=True,
    type=bool,
    description="Reload during the call before, or only when devices are idle.",
    offered=every_engine,
    wrong=_wrong,
    of_copy=True,
    of_evaluation=True,
)
