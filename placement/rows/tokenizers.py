"""The tokenizers of a run's roles, and which of them each call's input ids belong to.

Every command carries them, so they have no slots: dataclasses with slots are pickled by slow Python code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.rows.token_writers import TOKEN_KEYS


@dataclass(frozen=True)
class Tokenizers:
    """Tokenizer folders by role, and the roles that may have written the token ids of each dataset and call."""

    speaks: str
    """The role that reads datasets."""
    folders: Mapping[str, str] = field(hash=False)
    writers: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    alike: Mapping[str, str] = field(default_factory=dict, hash=False)
    """For a role that writes, the first role with a tokenizer that gives every id the same text."""
    templates: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Chat templates that replace the folders'."""

    def of_rows(self, source: str) -> str | InvalidInput | None:
        """Return the folder of the tokenizer that wrote a dataset's or a call's token ids; None if it has no such ids.

        Returns an error instead if roles with different tokenizers may have written them.
        """
        roles = self._distinct(self.writers.get(source, ()))
        if len(roles) < 2:
            return self.folders[roles[0]] if roles else None
        right = f"rows that a model reads, so that their tokenizer is known; or decode them with {self._named(roles)}"
        return InvalidInput(f"tokenizer of the rows of {source}", f"the tokenizer of {' or '.join(roles)}", right)

    def of_call(self, call: Call, generated_by: str | None = None) -> str | InvalidInput:
        """Return the folder of the tokenizer for all token ids that a call reads and makes.

        Returns an error instead if there are several. A call without token ids has the tokenizer of the role that
        generated its rows.
        """
        if call.role is not None:
            return self.folders[call.role]
        reads = [port.source for port in call.inputs if not TOKEN_KEYS.isdisjoint(port.keys)]
        makes = [call.name] if call.name in self.writers else []
        roles = self._distinct(role for source in (*reads, *makes) for role in self.writers.get(source, ()))
        if len(roles) < 2:
            return self.folders[roles[0] if roles else generated_by or self.speaks]
        seen = [f"{self._whose(source)} (rows of {source})" for source in dict.fromkeys(reads)]
        seen += [f"{self._whose(source)} (tokens that it makes)" for source in makes]
        right = f"{self._named(roles)}; text_columns(rows) decodes each input with its own tokenizer"
        return InvalidInput("context.tokenizer", f"the tokenizers of {' and '.join(seen)}", right)

    def _whose(self, source: str) -> str:
        return " or ".join(self._distinct(self.writers.get(source, ())))

    def _distinct(self, roles: Iterable[str]) -> list[str]:
        """Return the roles whose tokenizers differ, the first of each tokenizer."""
        first: dict[str, str] = {}
        for role in roles:
            first.setdefault(self.alike.get(role, role), role)
        return list(first.values())

    @staticmethod
    def _named(roles: Iterable[str]) -> str:
        return " or ".join(f"context.tokenizers[{role!r}]" for role in roles)
