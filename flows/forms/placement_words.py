"""The words of a call's placement that a run may state beside its plan: `placement.actor_train.micro_batches=16`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PlainValidator,
    SerializerFunctionWrapHandler,
    WithJsonSchema,
    model_serializer,
)

from prefect_rlhf.tasks.settings import Settings

MOST = 1 << 20  # of any number, as in a plan file
MOST_GIB = 1e6
_RECOMPUTE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "enum": ["all"]}, {"type": "null"}]
}


def _all_or_layers(recompute: object) -> object:
    """Accept a number of layers, `all`, or nothing; a single mistake names both."""
    is_number = isinstance(recompute, int) and not isinstance(recompute, bool) and 0 <= recompute <= MOST
    if recompute is None or is_number or recompute == "all":
        return recompute
    raise ValueError("all, or the number of layers of each pipeline stage")


Layers = Annotated[int, Field(ge=0, le=MOST)]
Recomputed = Annotated[
    Layers | Literal["all"] | None, PlainValidator(_all_or_layers), WithJsonSchema(_RECOMPUTE_SCHEMA)
]
Degree = Annotated[int, Field(ge=1, le=MOST)]


class PlacementWords(Settings):
    """Words of a call's placement; a word that is empty is chosen by the plan. They mean what a plan file's mean."""

    mesh: str | None = Field(None, min_length=1, max_length=256, description="Devices, such as n0:0-3.")
    engine: str | None = Field(None, min_length=1, max_length=256, description="Engine: megatron or vllm.")
    dp: Degree | None = Field(None, description="Data-parallel replicas.")
    tp: Degree | None = Field(None, description="Devices that share each layer.")
    pp: Degree | None = Field(None, description="Stages of a pipeline of layers.")
    ep: Degree | None = Field(None, description="Replicas that divide the experts of a mixture.")
    micro_batches: Degree | None = Field(None, description="Parts of a replica's mini-batch that run one by one.")
    sequence_parallel: bool | None = Field(None, description="Divide a train_step's tokens over tp between products.")
    recompute: Recomputed = Field(None, description="Layers of a stage that run forward again: a number, or all.")
    offload: Literal["none", "optimizer", "all"] | None = Field(
        None, description="What is in host memory while no call uses it."
    )
    prefetch: bool | None = Field(None, description="Reload during the call before, or only when devices are idle.")
    cache_gib: float | None = Field(None, gt=0, le=MOST_GIB, description="GiB of vLLM's key-value cache on a device.")
    parts: Degree | None = Field(None, description="Equal parts of the rows of a generate or an inference.")
    rows_first: bool | None = Field(None, description="Move the rows to their readers before other calls begin.")
    order: tuple[Annotated[int, Field(ge=0, lt=MOST)], ...] | None = Field(
        None, strict=False, description="The mesh's devices, by position, in the order of coordinates."
    )

    @model_serializer(mode="wrap")
    def _stated_alone(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave empty words out, so that a run's file of parameters has what a person stated."""
        return {word: value for word, value in serialize(self).items() if value is not None}

    @property
    def stated(self) -> dict[str, Any]:
        """The words that are stated, by name."""
        return self.model_dump()
