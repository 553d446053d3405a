"""The groups of steps that a run submits, computed from the whole augmented graph."""

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import Node


def in_groups(augmented: AugmentedGraph, num_steps: int) -> tuple[tuple[Node, ...], ...]:
    """Return groups of `num_steps` steps; each group in order, and after the groups that its nodes wait for.

    Step 0, the evaluation before training, joins the first group.
    """
    index: dict[str, int] = {}
    groups: list[list[Node]] = []
    for node in augmented.nodes:
        of_step = max(0, node.step - augmented.finished - 1) // num_steps
        index[node.id] = max([of_step, *(index[name] for name in node.depends_on)])
        groups += [[] for _ in range(index[node.id] + 1 - len(groups))]
        groups[index[node.id]].append(node)
    return tuple(tuple(group) for group in groups)
