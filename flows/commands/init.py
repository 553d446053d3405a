"""The command `prefect-rlhf init`: a project folder for users of the installed package."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.engine_builds import check_kind, chosen_kind
from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, ChosenKind
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.devices.mesh import ClusterShape

HOME = "{{ $RLHF_HOME }}"  # the folder of models, data and runs in the package's prefect.yaml
HEADER = """\
# Deployments of every algorithm, including yours: prefect deploy --all, from this folder.
# The work pool is {devices} of this machine; `definitions` states them for all deployments.
"""
OWN_DEPLOYMENT = """
  - name: my-reinforce
    description: Your own algorithm, with the parameters of parameters.yaml.
    entrypoint: my_reinforce.py:reinforce
    work_pool: *devices
    enforce_parameter_schema: true
    parameters:
"""
NEXT = """
Fetch a model and train it on {devices} in a few minutes. The first command works in a clone of the
repository; elsewhere, put a Hugging Face folder at {folder}/models/smollm2. --dry-run only checks and plans the run:

  python -m benchmarks.demo fetch --home {folder}
  cd {folder}
  prefect-rlhf run my_reinforce.py:reinforce --parameters parameters.yaml --devices {number}

To run it through a Prefect server with a UI at http://127.0.0.1:4200, start the server in a second terminal:

  prefect server start

Deploy, then start the worker, in a third terminal:

  cd {folder}
  export PREFECT_API_URL=http://127.0.0.1:4200/api
  prefect work-pool create {pool} --type gpu-mesh
  prefect deploy --all
  prefect worker start --pool {pool}

Start a run, in the first terminal:

  export PREFECT_API_URL=http://127.0.0.1:4200/api
  prefect deployment run rlhf/my-reinforce --watch
"""


@dataclass(frozen=True, slots=True)
class InitFlags:
    """The flags of `init`."""

    folder: Annotated[Path, Parameter(help="Folder for the files; created if it does not exist.")]
    kind: ChosenKind = None


@dataclass(frozen=True, slots=True)
class Pool:
    """The work pool of all deployments: all GPUs of a machine, or two CPU devices without `gpus`."""

    gpus: ClusterShape | None = None

    @property
    def names(self) -> dict[str, object]:
        """The pool's name and devices in words."""
        if self.gpus is None:
            return {"pool": "two-device-mesh", "devices": "two CPU devices", "number": 2}
        number = self.gpus.devices_per_node
        return {"pool": "gpus", "devices": f"{number} GPU{'s' if number > 1 else ''}", "number": number}

    def of(self, shipped: str) -> str:
        """Return the shipped prefect.yaml with this pool's definitions."""
        if self.gpus is None:
            return shipped
        lines = {
            "old_logprobs: &old_logprobs rollout": "old_logprobs: &old_logprobs recompute",
            "name: two-device-mesh": "name: gpus",
            "devices_per_node: 2": f"devices_per_node: {self.gpus.devices_per_node}",
            "device_memory_gib: 8": f"device_memory_gib: {self.gpus.device_memory_bytes * 10 // GIB / 10}",
            "kind: cpu": "kind: cuda",
            "mesh: n0:0-1": f"mesh: {self.gpus.whole.name}",
        }
        for before, after in lines.items():
            assert shipped.count(before) == 1
            shipped = shipped.replace(before, after)
        return shipped


def init(flags: Annotated[InitFlags, ALL_AT_ONCE]) -> int:
    """Create a project folder and print the next steps. No file is overwritten.

    The folder has a prefect.yaml with every algorithm as a deployment, and a small
    starter algorithm with its parameters and data. The deployments are for all
    GPUs of this machine, or for two CPU devices.
    """
    folder = flags.folder.expanduser().absolute()
    if flags.kind is not None:
        check_kind(flags.kind)
    pool = Pool(_gpus() if chosen_kind(flags.kind) == "cuda" else None)
    texts = project(folder, pool)
    write_new(folder, texts)
    print(f"wrote {', '.join(texts)}", NEXT.format(folder=folder, **pool.names), sep="\n", end="")
    return 0


def _gpus() -> ClusterShape:
    from prefect_rlhf.flows.hardware.device_kind import all_gpus  # imported here: two CPU devices need no Prefect

    return all_gpus()


def project(folder: Path, pool: Pool = Pool()) -> dict[str, str]:
    """Return the text of each file by its name. Raises InvalidInput for a path that YAML would misread."""
    texts = {path.name: path.read_text() for path in (files("prefect_rlhf") / "template").iterdir() if path.is_file()}
    if any(character in str(folder) for character in '{}"\\') or not str(folder).isprintable():
        raise InvalidInput("FOLDER", str(folder), 'a path without {, }, ", \\ or line breaks')
    texts["prefect.yaml"] = deployments(texts["prefect.yaml"], folder, texts["parameters.yaml"], pool)
    return dict(sorted(texts.items()))


def deployments(shipped: str, folder: Path, own_parameters: str, pool: Pool) -> str:
    """Return the shipped prefect.yaml for `pool`, with paths in `folder` and the deployment of the author's flow."""
    text = pool.of(shipped[shipped.index("name: prefect-rlhf") :]).replace(HOME, str(folder))
    text = HEADER.format(**pool.names) + re.sub(r"^# `prefect-rlhf init.*\n", "", text, flags=re.MULTILINE)
    parameters = [f"      {line}" for line in own_parameters.splitlines() if not line.startswith("#")]
    return "\n".join([text.rstrip() + "\n" + OWN_DEPLOYMENT.rstrip(), *parameters, ""])


def write_new(folder: Path, texts: Mapping[str, str]) -> None:
    """Write every file. If any of them exists already, raises InvalidInput and writes no file."""
    if folder.exists() and not folder.is_dir():
        raise InvalidInput("FOLDER", str(folder), "a folder; it is a file")
    there = [name for name in texts if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise InvalidInput("FOLDER", str(folder), f"a folder without {', '.join(there)}: no file is overwritten")
    for name, text in texts.items():
        write_atomically(folder / name, partial(Path.write_text, data=text))
