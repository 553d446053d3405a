"""The work of `one_gpu.py`: steps of GRPO on one device, one model, fixed lengths; and where its files are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["cuda", "cpu"]


class Size(NamedTuple):
    """The sizes of a Qwen2."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    is_tied: bool = True


SIZES: Mapping[str, Size] = {
    "0.5b": Size(896, 4864, 24, 14, 2, 151936),
    "1.5b": Size(1536, 8960, 28, 12, 2, 151936),
    "3b": Size(2048, 11008, 36, 16, 2, 151936),
    "7b": Size(3584, 18944, 28, 28, 4, 152064, is_tied=False),
    "tiny": Size(128, 256, 2, 4, 2, 1000),
}
"""Those of Qwen2.5, and one for a processor."""
TRL_ROWS: Mapping[str, int] = {"0.5b": 16, "1.5b": 8, "3b": 4, "7b": 2, "tiny": 4}
"""Rows that TRL trains on at once, by an estimate of what fits on 80 GB beside its vLLM; fewer if memory is short."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A step: `samples` responses of `response_tokens` tokens to each of `batch_size` prompts, then an optimizer step.

    `out` is the folder of results, `models` that of models and prompts. TRL trains on `trl_rows` rows at once, and its
    vLLM takes `trl_share` of the memory. A `given_model` with its `given_prompts` is used instead of a random one. With
    an `adapter_rank` an adapter on all linear layers is trained in place of the weights.
    """

    size: str
    out: str
    models: str
    kind: Kind = "cuda"
    batch_size: int = 32
    samples: int = 8
    prompt_tokens: int = 128
    response_tokens: int = 512
    steps: int = 4
    trl_rows: int = 8
    trl_share: float = 0.3
    given_model: str = ""
    given_prompts: str = ""
    adapter_rank: int = 0

    @classmethod
    def read(cls, text: str) -> Work:
        """Return what `text` wrote."""
        return cls(**json.loads(text))

    @property
    def text(self) -> str:
        """The work, for another process."""
        return json.dumps(asdict(self))

    def smallest(self) -> Work:
        """Return the work for a processor: a tiny model, few rows, short responses."""
        return replace(
            self, size="tiny", kind="cpu", batch_size=4, samples=2, prompt_tokens=16, response_tokens=8, trl_rows=4
        )

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.batch_size * self.samples

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt_tokens + self.response_tokens

    @property
    def model(self) -> Path:
        """The folder of the model."""
        return Path(self.given_model or Path(self.models) / f"qwen-{self.size}")

    @property
    def prompts(self) -> Path:
        """The file of prompts."""
        return Path(self.given_prompts or Path(self.models) / f"prompts-{self.prompt_tokens}.jsonl")

    @property
    def shared(self) -> dict[str, object]:
        """What two halves must have in common to be compared."""
        names = ("size", "kind", "batch_size", "samples", "prompt_tokens", "response_tokens", "adapter_rank")
        return {name: getattr(self, name) for name in names}
