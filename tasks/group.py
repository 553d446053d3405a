"""A group of steps: the nodes that are shown together as one subflow run."""

from __future__ import annotations

import threading

from prefect_rlhf.placement.node import Node


class Group:
    """Nodes that are shown as one subflow run, and how far they are."""

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        steps = [node.step for node in nodes]
        self.name = f"step {steps[0]}" if min(steps) == max(steps) else f"steps {min(steps)}-{max(steps)}"
        self.submitted = threading.Event()  # its nodes can be waited for
        self.at_last_step = threading.Event()  # only about a step's worth of its nodes has not begun
        self._not_begun = len(nodes)
        self._last_step = steps.count(max(steps))
        self._lock = threading.Lock()

    def node_began(self) -> None:
        """Count a node that began."""
        with self._lock:
            self._not_begun -= 1
            if self._not_begun < self._last_step:
                self.at_last_step.set()

    def give_up(self) -> None:
        """Let go of whoever waits for this group."""
        self.submitted.set()
        self.at_last_step.set()
