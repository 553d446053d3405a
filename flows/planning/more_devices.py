"""Finds out how many devices would be enough if no plan fits: tries a few larger clusters."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from prefect_rlhf.errors.errors import TooLittleMemory
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.hardware.cluster_spec import NODE, Groups, parse_cluster
from prefect_rlhf.flows.hardware.described_device import read_device
from prefect_rlhf.flows.planning.clusters import cluster_size
from prefect_rlhf.flows.planning.what_if import named_site
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.refusal import has_fitting_plan
from prefect_rlhf.placement.search.budget import Budget

EVALUATIONS = Budget(4_000)  # for each cluster: any plan that fits will do
MOST_NODES = 64  # of the largest cluster that is tried; each doubling takes a second or two


def with_enough_devices(error: TooLittleMemory, question: Question, options: PlanOptions) -> TooLittleMemory:
    """Add to the error how many devices of the same kind are enough, if a larger cluster has a plan.

    Clusters with several kinds of nodes and pinned calls are left alone.
    """
    groups = parse_cluster(options.cluster, read_device(options.device)) if options.cluster else ()
    words = enough_devices({groups: question}, options)
    return error.also(words) if words else error


def enough_devices(questions: Mapping[Groups, Question], options: PlanOptions) -> str:
    """Return in words how many devices of each kind are enough, if the question fits on no cluster of its own.

    Empty for clusters with several kinds of nodes, and for pinned calls.
    """
    if options.pins:
        return ""
    alone = [groups for groups in questions if len(groups) == 1]
    kinds = dict.fromkeys(group.device for (group,) in alone)
    largest = [
        max((each for each in alone if each[0].device == kind), key=lambda each: cluster_size(each).num_devices)
        for kind in kinds
    ]
    return "; ".join(_in_words(groups, questions[groups], options) for groups in largest)


def _in_words(groups: Groups, question: Question, options: PlanOptions) -> str:
    enough = enough_nodes(groups, question, options)
    if enough is None:
        return f"even {MOST_NODES} nodes of {groups[0].device} were not enough in a short search"
    size = cluster_size(enough)
    return f"{size.num_devices} devices are enough, as {size.name}"


def enough_nodes(groups: Groups, question: Question, options: PlanOptions) -> Groups | None:
    """Return the smallest larger cluster on which a short search finds a plan; None if even the largest has no plan."""

    def suffices(larger: Groups) -> bool:
        site = named_site(options, larger).with_profiles(question.site.sources.profiles)
        return has_fitting_plan(replace(question, site=site), EVALUATIONS)

    before = groups
    for larger in _larger(groups):
        if suffices(larger):
            break
        before = larger
    else:
        return None
    (least,), (most,) = before, larger
    low, high = least.num_nodes, most.num_nodes
    while least.devices_per_node == most.devices_per_node and high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices((replace(most, num_nodes=middle),)) else (middle, high)
    return (replace(most, num_nodes=high),)


def _larger(groups: Groups) -> Iterator[Groups]:
    """Yield larger clusters: twice the devices of a node until it has eight, then twice the nodes."""
    (group,) = groups
    while group.num_nodes == 1 and 2 * group.devices_per_node <= NODE:
        group = replace(group, devices_per_node=2 * group.devices_per_node)
        yield (group,)
    while group.num_nodes < MOST_NODES:
        group = replace(group, num_nodes=min(MOST_NODES, 2 * group.num_nodes))
        yield (group,)
