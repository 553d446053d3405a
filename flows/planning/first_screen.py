"""The first three lines of an answer: whether it fits, time and price of a step, and the command that runs it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any

from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.planning.record import Range
from prefect_rlhf.flows.training.lengths import names_rollouts
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.memory.certificate import Certificate, during
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.schedule.throughput import IterationWork
from prefect_rlhf.tasks.reporting.pictures.speeds import money
from prefect_rlhf.tasks.reporting.step_line import duration

STEPS = 100  # of the second line, unless the parameters state a number
YOURS = "YOURS.yaml"  # in the command: a file with the models' folders and the data


def fit_line(certificate: Certificate, plan: ExecutionPlan) -> str:
    """Return whether a plan fits, with the fullest device, and how many bytes stay free on each."""
    cluster, peak = plan.cluster, certificate.fullest
    if peak is None:
        return "fits: no device is used"
    whole = cluster.whole_memory_bytes(DeviceMesh.parse(peak.device).first_node)
    fits = "fits" if certificate.fits else "does not fit"
    line = (
        f"{fits}: {peak.num_bytes / GIB:.1f} of {whole / GIB:.1f} GiB ({peak.num_bytes / whole:.1%}) on the fullest "
        f"device, {peak.device} {during(peak.node)}"
    )
    if cluster.headroom:
        return f"{line}; {cluster.headroom * whole / GIB:.1f} GiB are headroom"
    if cluster.room:
        purpose = "room for its process" if cluster.backend == "cpu" else "room"
        return f"{line}; {cluster.room * whole / GIB:.1f} GiB are kept as {purpose}"
    return line


def steps_line(seconds: float, work: IterationWork, steps: int, record: Range | None) -> str:
    """Return a step's seconds and dollars, the range of public runs, and the same for `steps` steps."""
    per_hour = work.dollars_per_hour
    each, every = (f", {money(per_hour * s / 3600)}" if per_hour else "" for s in (seconds, steps * seconds))
    named = f"{steps} step{'s' if steps > 1 else ''}"
    known = f" ({record})" if record else ""
    return f"{seconds:.4g} s a step{known}{each}; {named}: {duration(steps * seconds)}{every}"


def planned_steps(options: PlanOptions) -> int:
    """Return the number of steps that the question states, or the usual number."""
    stated = options.parameters.get("steps")
    return stated if isinstance(stated, int) and stated > 0 else STEPS


def run_command(options: PlanOptions, question: Question, stated: Sequence[str] | None = None) -> str:
    """Return the command that runs the plan written to the output folder.

    `stated` is how the question's own command stated parameters; None writes the options' parameters one by one. Other
    options that the plan depends on follow.
    """
    words = list(_words(options.parameters)) if stated is None else list(stated)
    if "--parameters" not in words:
        words = ["--parameters", YOURS, *words]
    words += [word for name, value in _job(options, question) for word in ("-p", f"{name}={value}")]
    words += ["-p", f"plan={Path(options.output_dir) / 'plan.yaml'}"]
    site = question.site
    if site.cluster.num_nodes > 1 or not options.cluster:
        return join(["prefect", "deployment", "run", f"rlhf/{question.graph.name}", *_without_file(words)])
    kind = ["--kind", "cpu"] if site.backend == "cpu" else []
    devices = ["--devices", str(site.mesh.num_devices)]
    return join(["prefect-rlhf", "run", options.algorithm, *words, *devices, *kind])


def place_of(site: Site) -> str:
    """Describe the work pool that runs the plan; empty for this machine."""
    nodes, devices = site.cluster.num_nodes, site.cluster.devices_per_node
    return f", in a work pool of {nodes} x {devices} devices" if nodes > 1 else ""


def _without_file(words: Sequence[str]) -> list[str]:
    """The words without a file of parameters: a deployment has parameters of its own."""
    if "--parameters" not in words:
        return list(words)
    place = list(words).index("--parameters")
    return [*words[:place], *words[place + 2 :]]


def _job(options: PlanOptions, question: Question) -> Iterator[tuple[str, Any]]:
    """Return the job's parameters that the question's flags state, by name."""
    algo = options.parameters.get("algo") or {}
    stated = algo if isinstance(algo, Mapping) else {}
    if options.batch_size is not None:
        yield "algo.batch_size", options.batch_size
    samples = any(call.kind == "generate" and call.play is None for call in question.graph)
    sampling = stated.get("sampling") or {}
    has_length = options.response_length and not names_rollouts(options.response_length)
    if samples and has_length and "max_new_tokens" not in sampling:
        yield "algo.sampling.max_new_tokens", question.workload.responses.longest


def _words(parameters: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield `-p name=value` for each value of a group."""
    for name, value in parameters.items():
        if isinstance(value, Mapping) and value:
            yield from _words(value, f"{prefix}{name}.")
        else:
            yield from ("-p", f"{prefix}{name}={_as_yaml(value)}")


def _as_yaml(value: object) -> str:
    r"""Return a value as `-p` reads it.

    >>> _as_yaml(["\n"]), _as_yaml(False), _as_yaml("auto")
    ('["\\n"]', 'false', 'auto')
    """
    return value if isinstance(value, str) else json.dumps(value)
