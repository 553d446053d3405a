"""Hooks that see when passes are inside a model's layers."""

import torch

from prefect_rlhf.engines.rank.profiling.layer_clock import clocked, now


def test_each_pass_is_seen_in_its_order():
    """Forward begins after the call and ends before the loss; backward lies between the loss and the end."""
    layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    first = torch.nn.Linear(4, 4)
    with clocked(list(layers)) as clock:
        began = now()
        for _ in range(2):
            layers(first(torch.ones(1, 4))).sum().backward()
        ended = now()
    stamps = [clock.forwards[0], clock.backwards[0], clock.forwards[1], clock.backwards[1]]
    order = [began, *(stamp for pair in stamps for stamp in pair), ended]
    assert order == sorted(order)


def test_a_pass_without_gradients_has_no_backward():
    layers = [torch.nn.Linear(4, 4)]
    with clocked(layers) as clock, torch.no_grad():
        layers[0](torch.ones(1, 4))
    assert len(clock.forwards) == 1
    assert clock.backwards == []


def test_afterwards_the_layers_are_as_before():
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    with clocked(layers) as clock:
        pass
    layers[1](layers[0](torch.ones(1, 4)))
    assert clock.forwards == []
