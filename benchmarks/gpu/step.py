"""A step of the first morning: what it runs, what it should find, and the constants that its findings replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

from benchmarks.gpu.findings import Findings

Need = Literal["hardware", "vllm", "several"]
"""A GPU that exists; an importable vLLM; at least two GPUs."""
Found = Mapping[str, Any]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Machine:
    """The machine of a step: real GPUs, or the pretend GPU with small shapes. `folder` is for the step's files.

    A step writes what it finds into `found` as soon as it knows it. `card` names the GPU and its driver.
    """

    folder: Path
    pretend: bool = False
    num_gpus: int = 1
    found: Findings = field(default_factory=Findings)
    card: Mapping[str, str] = field(default_factory=dict)

    def gpu(self) -> AbstractContextManager[Any]:
        """Return a context in which torch has a GPU; with the pretend GPU it yields its counters."""
        if not self.pretend:
            return nullcontext()
        from tests.support.pretend_gpu import pretend_gpu

        return pretend_gpu()

    def pick(self, real: Value, small: Value) -> Value:
        """Return a size for real GPUs, or the size for the pretend GPU."""
        return small if self.pretend else real


@dataclass(frozen=True)
class Expected:
    """The range that a value should lie in, and where it comes from: SEEN on a card and a date, or by reading.

    A value that somebody noted, and no file has, gives no range.
    """

    low: float = -inf
    high: float = inf
    meaning: str = ""
    source: str = "by reading"

    def holds(self, value: object) -> bool:
        """Return whether a found value lies in the range; a bool counts as 0 or 1."""
        return isinstance(value, (int, float)) and self.low <= value <= self.high

    def __str__(self) -> str:
        ends = {(-inf, False): f"at most {self.high:g}", (inf, True): f"at least {self.low:g}"}
        text = ends.get((self.low, False)) or ends.get((self.high, True))
        text = text or (f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}")
        return f"{text} ({', '.join(filter(None, (self.meaning, self.source)))})"


SEEN = "seen on an H100 80GB HBM3, 2026-11-27"
YES = Expected(1, 1, "yes")
NO = Expected(0, 0, "no")


@dataclass(frozen=True)
class Constant:
    """A constant of the memory model or of the cost model, and the finding that replaces it."""

    name: str
    file: str
    present: float
    found: str  # the key of the finding


@dataclass(frozen=True)
class Step:
    """A step; `command` is its number among the nine of a single GPU, or 0 for a step on all GPUs of a machine."""

    name: str
    command: int
    limit_seconds: int
    run: Callable[[Machine], Found]
    expects: Mapping[str, Expected] = field(default_factory=dict)
    needs: frozenset[Need] = frozenset()
    findings: str = ""  # of docs/internals/gpu_findings.md
    constants: tuple[Constant, ...] = ()
