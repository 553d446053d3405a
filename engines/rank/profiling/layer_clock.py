"""Times the passes through a model's layers, with hooks that it adds while a real engine runs a call."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def now() -> float:
    """Return the time in seconds, after the device has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def worked() -> float:
    """Return each thread's processor seconds, which exclude other programs; on a GPU, `now`."""
    return now() if torch.cuda.is_available() else time.process_time() / torch.get_num_threads()


@dataclass(slots=True)
class LayerClock:
    """Times of passes: `forwards` and `backwards` are (start, end) of each pass through all layers, by `clock`."""

    clock: Callable[[], float]
    forwards: list[tuple[float, float]] = field(default_factory=list)
    backwards: list[tuple[float, float]] = field(default_factory=list)
    _entered: float = 0.0

    def enter(self, _: Any, positional: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Record when a pass enters the first layer."""
        for hidden in _tensors([*positional, *named.values()]):
            if hidden.requires_grad:  # its gradient is the last thing that a backward through the layers makes
                hidden.register_hook(self._leave_backward)  # type: ignore[no-untyped-call]  # torch's
        self._entered = self.clock()

    def leave(self, _: Any, __: Any, output: Any) -> None:
        """Record when a pass leaves the last layer."""
        self.forwards.append((self._entered, self.clock()))
        for hidden in _tensors(output if isinstance(output, tuple) else [output]):
            if hidden.requires_grad:
                hidden.register_hook(self._enter_backward)  # type: ignore[no-untyped-call]  # torch's

    def _enter_backward(self, _: Tensor) -> None:
        self._entered = self.clock()

    def _leave_backward(self, _: Tensor) -> None:
        self.backwards.append((self._entered, self.clock()))


@contextmanager
def clocked(layers: Sequence[torch.nn.Module], clock_seconds: Callable[[], float] = now) -> Iterator[LayerClock]:
    """Record all passes through `layers` by the clock `clock_seconds` while the body runs."""
    clock = LayerClock(clock_seconds)
    hooks = (
        layers[0].register_forward_pre_hook(clock.enter, with_kwargs=True),
        layers[-1].register_forward_hook(clock.leave),
    )
    try:
        yield clock
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def clocked_method(owner: Any, name: str, clock_seconds: Callable[[], float] = now) -> Iterator[LayerClock]:
    """Record all calls of a method that runs all layers while the body runs, because replayed CUDA graphs call no
    layer.
    """
    clock, method = LayerClock(clock_seconds), getattr(owner, name)

    def stamped(*positional: Any, **named: Any) -> Any:
        entered = clock_seconds()
        output = method(*positional, **named)
        clock.forwards.append((entered, clock_seconds()))
        return output

    setattr(owner, name, stamped)
    try:
        yield clock
    finally:
        delattr(owner, name)  # the class has the method


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]
