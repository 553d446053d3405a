"""Published measurements of calls (`real_ppo_7b_7b.json` and files like it), and what the cost model says of them.

ReaL's engine is not ours: it runs a plan's micro-batches one after the other and cuts each again for the pipeline, it
recomputes activations in training, and its head sees prompts too (`RealExecution`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from benchmarks.papers.engines import RealExecution
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.wrong_setting import refusing_invalid
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware, Network
from prefect_rlhf.placement.cost.datasheets.kinds import datasheet
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, ModelCallKind, Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.model import Dtype, TransformerShape

Positive = Annotated[int, Field(ge=1)]
Measured = Annotated[float, Field(gt=0)]
ITERATION_SECONDS = 7.3
"""The explicit overhead of an iteration beyond its calls in ReaL's runs (its table 6: 6.9 and 7.7 s): loading data,
requests of the master worker, and moving rows and weights. Not a part of any call."""
_NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*([TG])(?:bit/s|bps|b/s) per (node|device|gpu)", re.IGNORECASE)
_PHASES: Mapping[str, int] = {"generate": 0, "inference": 1, "train_step": 2}
_DTYPES: Mapping[str, Dtype] = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp32": "float32", "float32": "float32"}


class _Table(BaseModel):
    """A part of the file. Keys that only describe (sources, notes, parameter counts) are not read."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class ClusterTable(_Table):
    """`inter_node` says the bandwidth of a node: `RoCE 3.2 Tbit/s per node`; one node needs none."""

    nodes: Positive
    gpus_per_node: Positive
    device: str
    inter_node: str = ""

    def hardware(self) -> Hardware:
        """The devices and the network between nodes."""
        device = datasheet(self.device, "cluster.device")
        return Hardware(device, self.gpus_per_node, self._network() if self.nodes > 1 else None)

    def _network(self) -> Network:
        match = _NETWORK.search(self.inter_node)
        if match is None:
            raise InvalidInput("cluster.inter_node", self.inter_node, "a bandwidth such as `RoCE 3.2 Tbit/s per node`")
        bits = float(match[1]) * (1e12 if match[2].upper() == "T" else 1e9)
        bits *= 1 if match[3].lower() == "node" else self.gpus_per_node
        if not bits:
            raise InvalidInput("cluster.inter_node", self.inter_node, "a bandwidth above 0")
        return Network(self.inter_node, bits / 8)


class ModelTable(_Table):
    hidden_size: Positive
    intermediate_size: Positive
    num_layers: Positive
    num_attention_heads: Positive
    num_kv_heads: Positive
    vocab_size: Positive
    max_position_embeddings: Positive = 8192

    def shape(self) -> TransformerShape:
        """The model's shape; the base of the rotary embedding and the norm's epsilon cost nothing."""
        head_dim = self.hidden_size // self.num_attention_heads
        sizes = self.model_dump()
        return TransformerShape(**sizes, head_dim=head_dim, rope_theta=5e5, rms_norm_eps=1e-5, tied_embeddings=False)


class WorkloadTable(_Table):
    global_batch_size: Positive
    prompt_tokens: Positive
    generated_tokens: Positive
    ppo_mini_batches: Positive = 1
    dtype: Literal["bf16", "bfloat16", "fp32", "float32"] = "bf16"
    cuda_graphs: bool = True


class MeshTable(_Table):
    first_node: Annotated[int, Field(ge=0)]
    num_nodes: Positive
    first_gpu: Annotated[int, Field(ge=0)]
    gpus_per_node: Positive

    def mesh(self) -> DeviceMesh:
        """The mesh that the four numbers say."""
        return DeviceMesh(self.first_node, self.num_nodes, self.first_gpu, self.gpus_per_node)


class CallTable(_Table):
    role: str
    model: str
    kind: ModelCallKind
    mesh: MeshTable
    tp: Positive
    pp: Positive
    dp: Positive
    micro_batches: Positive
    measured_seconds: Measured | None = None

    @property
    def name(self) -> str:
        return f"{self.role}_{self.kind}"

    @property
    def head(self) -> Literal["lm", "scalar"]:
        return "scalar" if self.role.endswith(("critic", "reward")) else "lm"


class PlanTable(_Table):
    calls: Annotated[list[CallTable], Field(min_length=1)]
    measured_end_to_end_seconds: Measured | None = None


class Published(_Table):
    """The file: a cluster, models, a workload, and plans with what their calls took."""

    cluster: ClusterTable
    models: Mapping[str, ModelTable]
    workload: WorkloadTable
    plans: Annotated[Mapping[str, PlanTable], Field(min_length=1)]
    without_cuda_graph: Mapping[str, Mapping[str, float]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds predicted and measured of a call (or of a whole plan, named `end_to_end`)."""

    plan: str
    name: str
    terms: Seconds
    predicted_seconds: float
    measured_seconds: float | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return None if self.measured_seconds is None else self.predicted_seconds / self.measured_seconds


def read_published(path: Path) -> Published:
    """Read a file; raises InvalidInput, one line, for a missing or malformed one."""
    try:
        with refusing_invalid(str(path), "the format of real_ppo_7b_7b.json"):
            published = Published.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInput(str(path), error.strerror, "a readable file of published measurements") from error
    for plan, table in published.plans.items():
        for index, call in enumerate(table.calls):
            _check_call(published, call, f"{path}: plans.{plan}.calls.{index}")
    return published


def estimate_calls(published: Published, plan: str, cuda_graphs: bool | None = None) -> list[Estimate]:
    """Estimate every call of a plan, in the file's order; `cuda_graphs` overrides what the file's workload says."""
    hardware = published.cluster.hardware()
    estimates = []
    for call in published.plans[plan].calls:
        terms = _cost(published, call, hardware, cuda_graphs)
        estimates.append(Estimate(plan, call.name, terms, terms.total, call.measured_seconds))
    return estimates


def estimate_end_to_end(published: Published, plan: str, calls: Sequence[Estimate]) -> Estimate:
    """Estimate a plan: the critical path through its calls, and the iteration's explicit overhead."""
    table = published.plans[plan]
    path = critical_path_seconds(table.calls, [call.predicted_seconds for call in calls])
    return Estimate(plan, "end_to_end", Seconds(), path + ITERATION_SECONDS, table.measured_end_to_end_seconds)


def critical_path_seconds(calls: Sequence[CallTable], seconds: Sequence[float]) -> float:
    """Makespan of one iteration: generation, then inference, then training; calls on overlapping meshes exclude.

    A call starts once the phase before it has ended and its mesh is free, in the file's order (ReaL, algorithm 1).
    """
    order = sorted(range(len(calls)), key=lambda index: _PHASES[calls[index].kind])
    placed: list[tuple[CallTable, float]] = []
    for index in order:
        call, mesh = calls[index], calls[index].mesh.mesh()
        earlier = [
            end for other, end in placed if _PHASES[other.kind] < _PHASES[call.kind] or other.mesh.mesh().overlaps(mesh)
        ]
        placed.append((call, max(earlier, default=0.0) + seconds[index]))
    return max(end for _, end in placed)


def _cost(published: Published, call: CallTable, hardware: Hardware, cuda_graphs: bool | None) -> Seconds:
    table = published.workload
    graphs = table.cuda_graphs if cuda_graphs is None else cuda_graphs
    workload = Workload.fixed(table.prompt_tokens, table.generated_tokens, graphs)
    work = CallWork(call.kind, table.global_batch_size, workload, table.ppo_mini_batches)
    sizes = ModelSizes.of_shape(published.models[call.model].shape(), call.head, _DTYPES[table.dtype])
    execution = RealExecution(
        Strategy(call.dp, call.tp, call.pp),
        call.mesh.num_nodes,
        call.mesh.gpus_per_node,
        call.micro_batches,
        recompute="all",
    )
    return call_cost(work, execution, DatasheetTimes.of(sizes, hardware))


def _check_call(published: Published, call: CallTable, field: str) -> None:
    if call.model not in published.models:
        raise InvalidInput(f"{field}.model", call.model, f"one of {', '.join(published.models)}")
    mesh, cluster = call.mesh.mesh(), published.cluster
    shape = ClusterShape("file", cluster.nodes, cluster.gpus_per_node, 1)
    shape.check_mesh(mesh, f"{field}.mesh")
    if call.dp * call.tp * call.pp != mesh.num_devices:
        seen = f"dp {call.dp} x tp {call.tp} x pp {call.pp}"
        raise InvalidInput(field, seen, f"a product of {mesh.num_devices}, the devices of its mesh")
