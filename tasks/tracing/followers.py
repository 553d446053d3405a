"""Checks followers: each has a trained leader of its own shape, and no other call writes it."""

from dataclasses import asdict

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.model import ModelSpec


def check_follows(graph: DataflowGraph) -> DataflowGraph:
    """Return the graph. Raises GraphError for a follower that cannot follow its leader."""
    for model in graph.models:
        if model.follows is None:
            continue
        leader = graph.model(model.follows.leader)
        where = f"flow {graph.name}: follow({model.role}, {leader.role})"
        if wrong := _wrong_roles(graph, model, leader) or _wrong_models(model, leader):
            raise GraphError(f"{where}: {wrong}")
    return graph


def _wrong_roles(graph: DataflowGraph, model: ModelSpec, leader: ModelSpec) -> str:
    """Return what the body does wrong with a follower or its leader, and what would be right."""
    assert model.follows is not None  # only asked of followers
    if trainer := graph.trained_by(model.role):
        return f"{trainer.name} trains {model.role}, expected one of the two: what follows is written by nothing else"
    trainer = graph.trained_by(leader.role)
    if trainer is None:
        also = " it follows another model itself:" if leader.follows else ""
        return f"no train_step trains {leader.role}, expected one:{also} its weights would be {leader.role}'s first"
    names = [call.name for call in graph]
    if model.follows.after not in names or names.index(model.follows.after) < names.index(trainer.name):
        return f"it stands before {trainer.name}, expected after it: it reads the weights that {trainer.name} makes"
    if all(call.role != model.role for call in graph):
        return f"no call uses {model.role}, expected one: remove {model.role}"
    return ""


def _wrong_models(model: ModelSpec, leader: ModelSpec) -> str:
    """Return the difference between the models of a follower and its leader, and what would be right."""
    mine, theirs = asdict(model.shape), asdict(leader.shape)
    if differing := [name for name in mine if mine[name] != theirs[name]]:
        name = differing[0]
        return f"{model.role} has {name} {mine[name]}, expected {theirs[name]}, as {leader.role} has"
    if missing := sorted(set(model.head.split("+")) - set(leader.head.split("+"))):
        return f"{model.role} has head {model.head}, expected a head of {leader.role}'s, which has no {missing[0]}"
    if model.adapter is None:
        return ""
    if leader.adapter is None:
        return f"{model.role} has an adapter, expected none, as {leader.role} has"
    mine, theirs = asdict(model.adapter), asdict(leader.adapter)
    if differing := [name for name in mine if mine[name] != theirs[name] and name != "path"]:
        name = differing[0]
        return f"{model.role}.adapter has {name} {mine[name]}, expected {theirs[name]}, as {leader.role} has"
    if (model.content or model.path) != (leader.content or leader.path):
        return f"{model.role} has the base {model.path}, expected {leader.path}: only adapters are averaged"
    return ""
