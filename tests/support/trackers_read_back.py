"""What trackers wrote for a run, read back: numbers as (name, step, value), and tables by name and step."""

import json
import struct
import time
from pathlib import Path

import numpy as np


def of_tensorboard(run_dir):
    """Every scalar of the event files as (name, step, value), as scripts read them, and the tables."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    scalars = [(name, one.step, one.value) for name in events.Tags()["scalars"] for one in events.Scalars(name)]
    assert served_by_tensorboard(run_dir / "tensorboard", len(scalars)) == sorted(scalars)
    tables = {
        (name, one.step): make_ndarray(one.tensor_proto)
        for name in events.Tags()["tensors"]
        for one in events.Tensors(name)
    }
    return scalars, {key: [[cell.decode() for cell in row] for row in table] for key, table in tables.items()}


def served_by_tensorboard(folder, number):
    """That many scalars by TensorBoard's data server, which its pages ask; it leaves out what it does not know."""
    from tensorboard.data import server_ingester
    from tensorboard.util.grpc_util import ChannelCredsType

    ingester = server_ingester.SubprocessServerDataIngester(
        server_ingester.get_server_binary(),
        str(folder),
        reload_interval=0,
        channel_creds_type=ChannelCredsType.LOCAL,
        samples_per_plugin={"scalars": 0},
    )
    ingester.start()
    words = {"experiment_id": "", "plugin_name": "scalars"}
    for _ in range(200):  # it reads files after it has answered
        runs = ingester.data_provider.read_scalars(None, **words, downsample=1000)
        found = [(name, one.step, one.value) for tags in runs.values() for name, ones in tags.items() for one in ones]
        if len(found) == number:
            break
        time.sleep(0.05)
    return sorted(found)


def of_mlflow(run_dir, status="FINISHED"):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "prefect-rlhf"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == status and run.info.run_name == run_dir.name and run.data.params
    histories = [client.get_metric_history(run.info.run_id, name) for name in run.data.metrics]
    scalars = [(one.key, one.step, one.value) for history in histories for one in history]
    tables = {}
    for listed in json.loads(run.data.tags.get("mlflow.loggedArtifacts", "[]")):
        table = json.loads((Path(run.info.artifact_uri.removeprefix("file://")) / listed["path"]).read_text())
        name, step = listed["path"].removesuffix(".json").rsplit("/step-", 1)
        tables[name, int(step)] = [table["columns"], *table["data"]]
    return scalars, tables


def of_wandb(run_dir):
    """Numbers and tables of an offline run's records; W&B writes the last just after it says that it is done."""
    (file,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    for _ in range(200):
        records = read_records(file)
        if any(record.HasField("exit") for record in records):
            break
        time.sleep(0.05)
    scalars, tables = [], {}
    for record in records:
        values = {tuple(item.nested_key or [item.key]): json.loads(item.value_json) for item in record.history.item}
        step = values.get(("_step",), 0)
        for (name, *inner), value in values.items():
            if inner == ["path"]:
                table = json.loads((file.parent / "files" / value).read_text())
                tables[name, step] = [table["columns"], *table["data"]]
            elif not inner and not name.startswith("_"):
                scalars.append((name, step, value))
    return scalars, tables


def read_records(file):
    """By the format of LevelDB's logs: blocks of 32 KiB, records of a checksum, a length and a kind."""
    from wandb.proto import wandb_internal_pb2

    data, place, joined, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        joined += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4) and place <= len(data):
            records.append(wandb_internal_pb2.Record.FromString(joined))
            joined = b""
    return records


def kept(tracker, value):
    """What a tracker keeps of a number: TensorBoard 32 bits."""
    return float(np.float32(value)) if tracker == "tensorboard" else value


READ_BACK = {"tensorboard": of_tensorboard, "mlflow": of_mlflow, "wandb": of_wandb}
