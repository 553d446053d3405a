"""The outputs of a model's forward pass: the columns that an inference makes and a loss reads.

Tracing, costs, rows and engines read this table, so another output is another entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A column of a forward pass: numbers for each response token, or for each row."""

    head: Literal["lm", "scalar"]
    """The head that it is made from."""
    made_by: str
    """`module:function`, which a rank imports. It returns the numbers of a `HeadInput`, [N], or [N, width] for a vector
    of each; `engines/megatron/vocabulary/outputs.py` has examples."""
    per: Literal["token", "row"] = "token"
    """Whether it has numbers for each response token, or for each row (at its last token)."""
    width: int | None = None
    """The length of its vectors, such as the k of the k likeliest tokens; None for plain numbers."""
    reads_tokens: bool = False
    """Whether it depends on the token at its place, not only on the tokens before."""

    @property
    def numbers(self) -> int:
        """How many numbers a token or a row has."""
        return self.width or 1

    @property
    def vector(self) -> tuple[int, ...]:
        """The shape of a token's or a row's numbers."""
        return () if self.width is None else (self.width,)


_MODULE = "prefect_rlhf.engines.megatron.vocabulary.outputs"
_OUTPUTS: dict[str, Output] = {
    "logprobs": Output(head="lm", made_by=f"{_MODULE}:logprobs", reads_tokens=True),
    "values": Output(head="scalar", made_by=f"{_MODULE}:values"),
    "scores": Output(head="scalar", made_by=f"{_MODULE}:values", per="row"),
    "entropy": Output(head="lm", made_by=f"{_MODULE}:entropy"),
}
OUTPUTS: Mapping[str, Output] = MappingProxyType(_OUTPUTS)
"""Every output, by its name, which is also the key of its column."""


def register(name: str, output: Output) -> None:
    """Add an output that is not part of this package. Ranks receive it when they start.

    Raises InvalidInput for the name of another output, and for a name that is not an identifier.
    """
    if not name.isidentifier() or OUTPUTS.get(name, output) != output:
        raise InvalidInput("output", name, f"an identifier other than {', '.join(OUTPUTS)}")
    _OUTPUTS[name] = output


def head_of(output: str) -> Literal["lm", "scalar"]:
    """Return the head that makes an output.

    >>> head_of("entropy"), head_of("values")
    ('lm', 'scalar')
    """
    return OUTPUTS[output].head
