"""A trained model's README.md: what the Hub shows about it, and the model that it was trained from."""

from importlib.metadata import version
from pathlib import PurePath

import yaml

from prefect_rlhf.files.hub.hub_path import repository_of
from prefect_rlhf.placement.models.model import ModelSpec

CARD = "README.md"
_GENERATES = """\
from transformers import pipeline

model = pipeline("text-generation", model="FOLDER OR NAME")
"""
_SCORES = """\
from transformers import AutoModelForSequenceClassification

model = AutoModelForSequenceClassification.from_pretrained("FOLDER OR NAME")  # one label: the score of a text
"""
_ADAPTS = """\
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("FOLDER OR NAME")  # loads the base model too
"""


def model_card(spec: ModelSpec, algorithm: str, steps: int, run: str) -> str:
    """Return the card of the model that `steps` steps of an algorithm trained; `spec` is its role.

    It names the base model on the Hub, or else its folder without parent folders, which may contain a person's name.
    You fill in the licence and, for a folder, the Hub's name, because no file of a run has them.
    """
    generates, base = spec.head != "scalar", repository_of(spec.path)
    what, example = ("model", _GENERATES if generates else _SCORES) if spec.adapter is None else ("adapter", _ADAPTS)
    if not generates:
        example = example.replace("PeftModelForCausalLM", "PeftModelForSequenceClassification")
    header = {
        **({"base_model": base} if base else {}),
        "library_name": "transformers" if spec.adapter is None else "peft",
        "pipeline_tag": "text-generation" if generates else "text-classification",
        "tags": ["prefect-rlhf", algorithm],
    }
    return (
        f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n"
        f"# {spec.role} of {run}\n\n"
        f"The algorithm `{algorithm}` of prefect-rlhf {version('prefect-rlhf')} trained this {what} from "
        f"`{base or PurePath(spec.path).name}` in {steps} steps.\n\n"
        f"```python\n{example}```\n\n"
        f"Before you upload it, add `license`{'' if base else ' and `base_model`'} to the lines at the top: the "
        "licence of the base model applies.\n"
    )
