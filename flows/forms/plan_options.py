"""The options of a what-if plan: the form of `rlhf/plan`, and the flags of the command."""

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from prefect_rlhf.files.path_text import MOST_CHARACTERS, PathText
from prefect_rlhf.flows.forms.check import checked_parameters
from prefect_rlhf.flows.forms.options import Form
from prefect_rlhf.flows.forms.share import Share
from prefect_rlhf.placement.models.engine_constants import EXPERT_IMBALANCE
from prefect_rlhf.placement.search.method import Method
from prefect_rlhf.tasks.settings import MOST_ROWS

MOST_NODES = 100_000
MOST_DOLLARS = 1e6  # for a device and an hour
MOST_EVALUATIONS = 10**12
MOST_TOKENS = 1e15  # in a second
MOST_IMBALANCE = 1e4  # no model has as many experts


class PlanOptions(Form):
    """A planning question: the best plan for an algorithm with these models on that cluster."""

    algorithm: str = Field(
        "ppo", max_length=MOST_CHARACTERS, description="ppo, dpo, grpo, remax, reward, or module:function of your own."
    )
    models: dict[str, PathText] = Field(
        {},
        description="Model by role: a known model such as llama-70b, a Hugging Face folder, or any model on the Hub.",
    )
    parameters: dict[str, Any] = Field({}, description="The algorithm's own parameters, as in its deployment.")
    cluster: str = Field(
        "",
        max_length=MOST_CHARACTERS,
        description="Such as 16x8:h100; empty means the mesh that the work pool would lease. A list, such as "
        "1x8:h100,2x8:a100-80, or h100,h200 with sweep, is answered with a table.",
    )
    device: PathText = Field(
        "",
        description="A custom device: name=mine, tflops=..., memory_gib=..., memory_gb_per_s=..., "
        "link_gb_per_s=..., or a YAML file of these; refer to it in the cluster, as in 1x8:mine.",
    )
    network: str = Field(
        "",
        max_length=MOST_CHARACTERS,
        description="The network between nodes: Gbit/s per node, or a name such as roce-3200.",
    )
    device_memory_gib: float | None = Field(
        None, gt=0, le=1e5, description="Memory per device; empty means what its datasheet says."
    )
    host_memory_gib: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="Host memory per node for offloading and checkpoints; empty means what hosts of such GPUs have.",
    )
    headroom: Share | None = Field(
        None,
        description="Share of each device that plans leave free, such as 10%; empty leaves 4% of a GPU, and on CPU "
        "what its process takes besides tensors.",
    )
    expert_imbalance: float | None = Field(
        None,
        ge=1,
        le=MOST_IMBALANCE,
        description="If devices divide experts: the fullest device's tokens, as a multiple of the mean; empty means "
        f"{EXPERT_IMBALANCE:g}. The memory certificate counts it.",
    )
    call_seconds: float | None = Field(
        None, ge=0, le=1e3, description="Fixed overhead per call, in seconds; empty means our estimate."
    )
    runtime: Literal["prefect-rlhf", "public"] = Field(
        "prefect-rlhf",
        description="Whose step time to predict: our engines', as measured on an H100, or the engines' of public runs.",
    )
    profiles: list[PathText] = Field(
        [], max_length=100, description="Files with measured times, to use instead of datasheets."
    )
    prompt_length: str = Field(
        "",
        max_length=MOST_CHARACTERS,
        description="Tokens: 1024, shares such as 512:3,1024:1 (3 to 1), or a run's rollouts (Parquet).",
    )
    response_length: str = Field(
        "",
        max_length=MOST_CHARACTERS,
        description="Tokens of a response, in the same forms; a single number is the limit of varying lengths.",
    )
    batch_size: int | None = Field(None, ge=1, le=MOST_ROWS, description="Short for the algorithm's batch_size.")
    plan: PathText = Field("", description="Your own plan file to price, certify and compare.")
    pins: dict[str, Annotated[str, Field(max_length=MOST_CHARACTERS)]] = Field(
        {}, description="The mesh that a call must run on, such as ref_inference=n0:0-3."
    )
    prices: dict[Annotated[str, Field(max_length=MOST_CHARACTERS)], Annotated[float, Field(gt=0, le=MOST_DOLLARS)]] = (
        Field({}, description="Dollars per device and hour, by kind of device, such as h100=2.5.")
    )
    method: Method = Field("exact", description="Search method.")
    evaluations: int | None = Field(
        None,
        ge=1,
        le=MOST_EVALUATIONS,
        description="Length of the search, in evaluated plans; empty means enough for most questions. "
        "The same number gives the same plan on any machine.",
    )
    budget_seconds: float | None = Field(
        None,
        gt=0,
        le=86400,
        description="Processor time of the search in seconds, in place of evaluations: the plan then depends on the "
        "machine and its load.",
    )
    simplicity: Share | None = Field(
        None,
        description="How much slower a simpler plan may be than the fastest, such as 1%; 0 asks for the fastest; "
        "empty means 3%.",
    )
    explain: bool = Field(
        False, description="Explain why each call is placed as it is, and what the second best would cost."
    )
    sweep: list[Annotated[int, Field(ge=1, le=MOST_NODES)]] = Field(
        [], max_length=100, description="Also plan for these numbers of nodes, of each kind in the cluster."
    )
    at_least: float | None = Field(
        None,
        gt=0,
        le=MOST_TOKENS,
        description="Tokens per second, of prompts and responses, that the answer must reach: it is the smallest "
        "cluster of the table that does, by dollars an hour with prices, else by devices.",
    )
    output_dir: PathText = Field(
        "plans", min_length=1, description="Folder for the plan file, report, certificate and pictures."
    )


def plan_options(values: Mapping[str, Any]) -> PlanOptions:
    """Return `values` as options. Raises InvalidInput for the first mistake."""
    return PlanOptions(**checked_parameters(inspect.Signature(PlanOptions.signature()), values))
