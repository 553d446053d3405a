"""LoRA adapters: settings for the thin matrices that a run trains, while the weights stay frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, field_validator, model_validator

from prefect_rlhf.errors.by_hand import ByHand
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.wrong_setting import wrong
from prefect_rlhf.files.path_text import PathText
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.families.family import axis_length
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.model import TransformerShape
from prefect_rlhf.placement.models.weights import adapted_weights, matrix_name

ALL_LINEAR = "all-linear"
NOT_OFFERED: Mapping[str, str] = {
    "modules_to_save": "no value: a scalar head is always trained, and no other module can be",
    "use_dora": "no value: DoRA is not offered",
    "bias": "no value: biases are frozen",
    "lora_dropout": "no value: there is no dropout",
    "dropout": "no value: there is no dropout",
    "trainable_token_indices": "no value: the embedding is frozen",
    "layers_to_transform": "no value: every layer has the adapter",
    "rank_pattern": "no value: all matrices have the same rank",
    "alpha_pattern": "no value: all matrices have the same alpha",
    "init_lora_weights": "no value: A begins random, as PEFT draws it, and B at zero",
}
"""Settings of PEFT that we do not offer, with the right value."""
OUTSIDE = ("embed_tokens", "lm_head")

Matrix = Annotated[str, Field(min_length=1, max_length=256)]


class Adapter(ByHand):
    """LoRA, a low-rank adapter (Hu et al. 2021, arXiv:2106.09685): x W^T becomes x W^T + alpha / rank (x A^T) B^T."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    rank: int = Field(32, ge=1, le=512, description="Rows of A, and columns of B.")
    alpha: float = Field(
        32.0, gt=0, le=4096, description="Scales the product of A and B: it counts alpha / rank times."
    )
    target_modules: tuple[Matrix, ...] = Field(
        (ALL_LINEAR,), description="Which matrices of each layer, such as q_proj; all-linear: all of them."
    )
    rslora: bool = Field(False, description="For high ranks: scale by alpha / sqrt(rank) instead (Kalajdzievski 2023).")
    path: PathText = Field(
        "", description="Folder that peft wrote, to start from; if empty, A starts random and B at zero."
    )

    @model_validator(mode="before")
    @classmethod
    def _says_what_is_not_offered(cls, value: Any) -> Any:
        """Refuse settings of PEFT by their names."""
        for name, expected in NOT_OFFERED.items() if isinstance(value, Mapping) else ():
            if name in value:
                raise wrong(value, name, expected)
        return value

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        """Accept a list or a single name, as PEFT does."""
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _in_a_layer(self) -> Adapter:
        """Refuse an empty list, and matrices outside of the layers."""
        if not self.target_modules:
            raise wrong(self, "target_modules", f"{ALL_LINEAR}, or names such as q_proj and v_proj")
        if any(name.rpartition(".")[2] in OUTSIDE for name in self.target_modules):
            raise wrong(self, "target_modules", "matrices of a layer: with an adapter, embedding and head stay frozen")
        return self

    def to_spec(self, role: str, shape: TransformerShape) -> AdapterSpec:
        """Return the adapter of a model with this shape, its matrices in the order of a layer.

        Raises InvalidInput for a mixture of experts, for matrices that the family lacks, and for a rank above a
        matrix's.
        """
        field = f"{role}.adapter"
        if shape.experts is not None:
            raise InvalidInput(
                field, f"rank {self.rank}", "no adapter: a mixture of experts cannot train with an adapter yet"
            )
        weights = {matrix_name(weight): weight for weight in adapted_weights(shape)}
        names = tuple(weights)
        if ALL_LINEAR not in self.target_modules:
            asked = {name.rpartition(".")[2]: name for name in self.target_modules}
            for last, name in asked.items():
                own = f".{weights[last].name}" if last in weights else ""
                if not own.endswith(f".{name}"):
                    known = FAMILIES[shape.family].name
                    right = f"{ALL_LINEAR}, or some of {', '.join(weights)}, the matrices of {known}"
                    raise InvalidInput(f"{field}.target_modules", name, right)
            names = tuple(name for name in weights if name in asked)
        lengths = {name: [axis_length(axis, shape) for axis in weights[name].axes] for name in names}
        least = min(names, key=lambda name: min(lengths[name]))
        if self.rank > (most := min(lengths[least])):
            right = f"at most {most}: {least} is {' x '.join(map(str, lengths[least]))}"
            raise InvalidInput(f"{field}.rank", self.rank, right)
        return AdapterSpec(self.rank, self.alpha, names, self.rslora, self.path)

    def stated(self, role: str, shape: TransformerShape) -> Mapping[str, Any]:
        """Return the fields of `to_spec` that were stated next to a folder, which has to agree with them."""
        matrices = self.model_copy(update={"rank": 1}).to_spec(role, shape).matrices  # the rank may be the folder's
        spec = AdapterSpec(self.rank, self.alpha, matrices, self.rslora)
        names = {"rank": "rank", "alpha": "alpha", "rslora": "rslora", "target_modules": "matrices"}
        return {ours: getattr(spec, ours) for name, ours in names.items() if name in self.model_fields_set}
