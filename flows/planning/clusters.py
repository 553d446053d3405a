"""The clusters of a question: those that the options name, or the sizes of a sweep, each with its question."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.hardware.cluster_spec import SINGLE_KIND, Groups, parse_cluster, parse_clusters
from prefect_rlhf.flows.hardware.described_device import read_device
from prefect_rlhf.flows.planning.what_if import named_site
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.sweep import ClusterSize


def read_clusters(options: PlanOptions) -> tuple[Groups, ...]:
    """Return the clusters of the table, in its order; empty if the question is about a single cluster.

    Raises InvalidInput for an invalid cluster, and for options that a single cluster does not use or a list does not.
    """
    if options.sweep and not options.cluster:
        raise InvalidInput("sweep", options.cluster, SINGLE_KIND)
    clusters = parse_clusters(options.cluster, options.sweep, read_device(options.device)) if options.cluster else ()
    if len(clusters) < 2 and not options.sweep:
        if options.at_least is not None:
            remedy = "name more clusters, or sizes as in --sweep 1,2,4"
            raise NotUsed("at_least", options.at_least, "there is a single cluster", remedy)
        return ()
    if options.plan and named_cluster(options) is None:
        raise NotUsed("plan", options.plan, "a plan file is for a single cluster", "name its cluster alone")
    return clusters


def named_cluster(options: PlanOptions) -> ClusterSize | None:
    """Return the cluster that the options name alone and with its size, which is then the cluster of the answer.

    None for a list and for a kind without a size, and if the answer must reach a throughput.
    """
    if options.at_least is not None or "," in options.cluster or ":" not in options.cluster:
        return None
    return cluster_size(parse_cluster(options.cluster, read_device(options.device)))


def cluster_size(groups: Groups) -> ClusterSize:
    """Return a cluster's row in the table."""
    kind = "+".join(dict.fromkeys(group.device for group in groups))
    name = "+".join(f"{group.num_nodes}x{group.devices_per_node}:{group.device}" for group in groups)
    return ClusterSize(name, kind, sum(group.num_nodes for group in groups), groups[0].devices_per_node)


def questions_by_cluster(
    question: Question, options: PlanOptions, clusters: Sequence[Groups]
) -> Mapping[ClusterSize, Question]:
    """Return the question on each cluster, with the question's profiles."""
    profiles = question.site.sources.profiles
    return {
        cluster_size(groups): replace(question, site=named_site(options, groups).with_profiles(profiles))
        for groups in clusters
    }
