"""The command `prefect-rlhf init`: a project folder for users of the installed package."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE

HOME = "{{ $RLHF_HOME }}"  # the folder of models, data and runs in the package's prefect.yaml
HEADER = """\
# Deployments of every algorithm, including yours: prefect deploy --all, from this folder.
# The work pool is two CPU devices of this machine; kind: cuda, devices_per_node and mesh are for GPUs.
"""
OWN_DEPLOYMENT = """
  - name: my-reinforce
    description: Your own algorithm, with the parameters of parameters.yaml.
    entrypoint: my_reinforce.py:reinforce
    work_pool: *two_devices
    enforce_parameter_schema: true
    parameters:
"""
NEXT = """
Fetch a model and train it on two CPU devices in a few minutes. The first command works in a clone of the
repository; elsewhere, put a Hugging Face folder at {folder}/models/smollm2. --dry-run only checks and plans the run:

  python -m benchmarks.demo fetch --home {folder}
  cd {folder}
  prefect-rlhf run my_reinforce.py:reinforce --parameters parameters.yaml --devices 2

To run it through a Prefect server with a UI at http://127.0.0.1:4200, start the server in a second terminal:

  prefect server start

Deploy, then start the worker, in a third terminal:

  cd {folder}
  export PREFECT_API_URL=http://127.0.0.1:4200/api
  prefect work-pool create two-device-mesh --type gpu-mesh
  prefect deploy --all
  prefect worker start --pool two-device-mesh

Start a run, in the first terminal:

  export PREFECT_API_URL=http://127.0.0.1:4200/api
  prefect deployment run rlhf/my-reinforce --watch
"""


@dataclass(frozen=True, slots=True)
class InitFlags:
    """The flags of `init`."""

    folder: Annotated[Path, Parameter(help="Folder for the files; created if it does not exist.")]


def init(flags: Annotated[InitFlags, ALL_AT_ONCE]) -> int:
    """Create a project folder and print the next steps. No file is overwritten.

    The folder has a prefect.yaml with every algorithm as a deployment, and a small
    starter algorithm with its parameters and data.
    """
    folder = flags.folder.expanduser().absolute()
    texts = project(folder)
    write_new(folder, texts)
    print(f"wrote {', '.join(texts)}", NEXT.format(folder=folder), sep="\n", end="")
    return 0


def project(folder: Path) -> dict[str, str]:
    """Return the text of each file by its name. Raises InvalidInput for a path that YAML would misread."""
    texts = {path.name: path.read_text() for path in (files("prefect_rlhf") / "template").iterdir() if path.is_file()}
    if any(character in str(folder) for character in '{}"\\') or not str(folder).isprintable():
        raise InvalidInput("FOLDER", str(folder), 'a path without {, }, ", \\ or line breaks')
    texts["prefect.yaml"] = deployments(texts["prefect.yaml"], folder, texts["parameters.yaml"])
    return dict(sorted(texts.items()))


def deployments(shipped: str, folder: Path, own_parameters: str) -> str:
    """Return the shipped prefect.yaml with all paths in `folder`, and with the deployment of the author's flow."""
    text = HEADER + shipped[shipped.index("name: prefect-rlhf") :].replace(HOME, str(folder))
    parameters = [f"      {line}" for line in own_parameters.splitlines() if not line.startswith("#")]
    return "\n".join([text.rstrip() + "\n" + OWN_DEPLOYMENT.rstrip(), *parameters, ""])


def write_new(folder: Path, texts: Mapping[str, str]) -> None:
    """Write every file. If any of them exists already, raises InvalidInput and writes no file."""
    there = [name for name in texts if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise InvalidInput("FOLDER", str(folder), f"a folder without {', '.join(there)}: no file is overwritten")
    for name, text in texts.items():
        write_atomically(folder / name, partial(Path.write_text, data=text))
