"""What trackers wrote for a run, read back: numbers as (name, step, value), and tables by name and step."""

import json
import struct
from pathlib import Path


def of_tensorboard(run_dir):
    """Every scalar of the event files as (name, step, value), and the tables."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    found = [
        (name, one.step, make_ndarray(one.tensor_proto))
        for name in events.Tags()["tensors"]
        for one in events.Tensors(name)
    ]
    scalars = [(name, step, float(value)) for name, step, value in found if value.ndim == 0]
    tables = {(name, step): value for name, step, value in found if value.ndim == 2}
    return scalars, {key: [[cell.decode() for cell in row] for row in table] for key, table in tables.items()}


def of_mlflow(run_dir):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "prefect-rlhf"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == run_dir.name and run.data.params
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    scalars = [(one.key, one.step, one.value) for history in histories for one in history]
    tables = {}
    for listed in json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]")):
        table = json.loads((Path(run.info.artifact_uri.removeprefix("file://")) / listed["path"]).read_text())
        name, step = listed["path"].removesuffix(".json").rsplit("/step-", 1)
        tables[name, int(step)] = [table["columns"], *table["data"]]
    return scalars, tables


def of_wandb(run_dir):
    """By the format of LevelDB's logs: blocks of 32 KiB, records of a checksum, a length and a kind."""
    from wandb.proto import wandb_internal_pb2

    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    data, place, joined, scalars, tables = file.read_bytes(), 7, b"", [], {}
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        joined += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            record, joined = wandb_internal_pb2.Record.FromString(joined), b""
            values = {tuple(item.nested_key or [item.key]): json.loads(item.value_json) for item in record.history.item}
            step = values.get(("_step",), 0)
            for (name, *inner), value in values.items():
                if inner == ["path"]:
                    table = json.loads((file.parent / "files" / value).read_text())
                    tables[name, step] = [table["columns"], *table["data"]]
                elif not inner and not name.startswith("_"):
                    scalars.append((name, step, value))
    return scalars, tables


READ_BACK = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
