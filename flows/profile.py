"""The flow `rlhf/profile`: measure a model's layers on the leased devices, for plans and predictions."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from pydantic import Field

from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.files.storable import Storable
from prefect_rlhf.flows.hardware.device_kind import check_leased_gpus, device_line
from prefect_rlhf.flows.hardware.installed_engines import check_engines
from prefect_rlhf.flows.hardware.probes import TOO_BUSY
from prefect_rlhf.flows.hardware.profiles import Machine, devices_and_nodes, keep_profile, profile_file
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.placement.cost.times.profile import Subject
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, Backend, DeviceMesh
from prefect_rlhf.placement.layout.layout import splits_key_value_heads
from prefect_rlhf.placement.models.model import Dtype, TransformerShape
from prefect_rlhf.tasks.model_shape import runnable_shape
from prefect_rlhf.tasks.profiling.bench import Sizes
from prefect_rlhf.tasks.profiling.limits import MOST_ROWS, MOST_TOKENS
from prefect_rlhf.tasks.profiling.measure import Say, check_sizes, measure, number_of_measurements
from prefect_rlhf.tasks.reporting.publish import publish
from prefect_rlhf.tasks.server.failures import failed

MODEL = Field(
    description="A Hugging Face folder or a model on the Hub, of which config.json is enough, or llama-7b, ..."
)
ROWS = Field(ge=1, le=MOST_ROWS, description="Most rows in a timed micro-batch; powers of two up to it are timed.")
LONGEST = Field(ge=16, le=MOST_TOKENS, description="Longest timed row, in tokens.")
DEGREE = Field(ge=1, le=MOST_DEVICES)
DEGREES = Field(
    max_length=100,
    description="Degrees of tensor parallelism; empty means all that divide the leased devices and the model.",
)


@flow(name="rlhf")
def profile(
    model: Annotated[str, MODEL, Storable()],
    dtype: Dtype = "bfloat16",
    most_rows: Annotated[int, ROWS] = 32,
    longest: Annotated[int, LONGEST] = 128,
    tensor_parallel: Annotated[list[Annotated[int, DEGREE]] | None, DEGREES] = None,
) -> Any:
    """Time single layers, the optimizer, messages and copies on all leased devices at once; takes minutes.

    Later plans and predictions for a model of this shape, on the same number and kind of devices, use the measurements.

    Args:
        model: A Hugging Face folder or a model on the Hub, of which config.json is enough, or a known model.
        dtype: Compute format.
        most_rows: Largest number of rows in a timed micro-batch.
        longest: Longest timed row, in tokens.
        tensor_parallel: Degrees of tensor parallelism; empty means all that divide devices and model.
    """
    try:
        with leased_devices() as leased, _progress() as say:
            check_engines(leased.kind)
            check_leased_gpus(leased)
            log_info(device_line(leased))
            sizes = Sizes(most_rows, longest)
            device = kind_of_nodes(leased)
            request = profile_request(model, dtype, leased.kind, leased.mesh, sizes, tensor_parallel, device)
            return str(measure_profile(leased, request, say, log_info))
    except RlhfError as error:
        return failed(error)


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """A checked request for measurements."""

    subject: Subject
    sizes: Sizes

    @property
    def file(self) -> Path:
        """The file of the profile."""
        return profile_file(self.subject)

    @property
    def num_measurements(self) -> int:
        return number_of_measurements(self.subject, self.sizes)


def kind_of_nodes(leased: Lease) -> str:
    """Return the device of a lease's nodes, empty if unknown. Raises InvalidInput if the nodes differ."""
    kinds = list(dict.fromkeys(leased.node_devices))
    if len(kinds) > 1:
        raise InvalidInput("mesh", f"{leased.mesh.name} of {' and '.join(kinds)}", "nodes of the same kind")
    if kinds and leased.kind == "cpu":
        raise InvalidInput("node_kinds", kinds, "GPUs, or no kinds: a profile does not distinguish nodes without GPUs")
    return kinds[0] if kinds else ""


def profile_request(
    model: str,
    dtype: Dtype,
    kind: Backend,
    mesh: DeviceMesh,
    sizes: Sizes,
    tensor_parallel: list[int] | None,
    device: str = "",
) -> ProfileRequest:
    """Read the model's shape; `device` is the kind of the nodes' GPUs, by default this machine's kind.

    Raises InvalidInput for sizes or degrees that the model does not have, and for unknown devices.
    """
    shape = runnable_shape("model", model)
    degrees = tuple(tensor_parallel) if tensor_parallel else legal_degrees(shape, mesh.devices_per_node)
    if min(degrees) < 1:
        raise InvalidInput("tensor_parallel", list(degrees), "degrees of 1 or more")
    subject = Machine.read(kind, device).subject(shape, dtype, *devices_and_nodes(mesh))
    request = ProfileRequest(subject, replace(sizes, tensor_parallel=degrees))
    check_sizes(request.subject, request.sizes)
    return request


def measure_profile(leased: Lease, request: ProfileRequest, say: Say, report: Callable[[str], object]) -> Path:
    """Measure on a lease's devices and store the profile; returns its file.

    `report` receives the share of the cores that other programs had. If there are several nodes, they are assumed to be
    alike: layers are timed on the first node and messages between all.
    """
    made = measure(request.subject, request.sizes, say, leased.node_devices, leased.gpus)
    if leased.kind == "cpu":
        advice = "; its times are too long, so measure again when they end" if made.busy > TOO_BUSY else ""
        report(f"other programs had {made.busy:.0%} of the cores during the profile{advice}")
    return keep_profile(made, request.file)


def legal_degrees(shape: TransformerShape, num_devices: int) -> tuple[int, ...]:
    """Return the divisors of the device count that split heads, key-value heads and feed-forward columns."""
    counts = (num_devices, shape.num_attention_heads, shape.intermediate_size)
    even = (tp for tp in range(1, num_devices + 1) if all(count % tp == 0 for count in counts))
    return tuple(tp for tp in even if splits_key_value_heads(shape.num_kv_heads, tp))


@contextmanager
def _progress() -> Iterator[Say]:
    """Yield a function that logs each measurement and updates a progress bar in Prefect."""
    bar = publish(create_progress_artifact, 0.0, key="profile", description="Measurements")

    def say(number: int, total: int, words: str) -> None:
        log_info(f"{number}/{total} {words}")
        if bar is not None:
            publish(update_progress_artifact, bar, progress=100.0 * number / total)  # type: ignore[arg-type]  # an id

    yield say
