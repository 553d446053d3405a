"""The options of TRL's and verl's trainers with their defaults, read from the packages.

`python -m tests.known_options FOLDER` reads them in a folder with both packages, as `pip install --no-deps --target
FOLDER` makes it, and writes flows/forms/dictionary/known_options.json anew; OpenRLHF's part of that file stays.
"""

import ast
import dataclasses
import json
import sys
from pathlib import Path

import yaml

FILE = Path(__file__).parents[1] / "flows" / "forms" / "dictionary" / "known_options.json"
TRAINERS = ("grpo", "rloo", "dpo", "kto", "sft", "reward")
SCRIPTS = ("ScriptArguments", "DatasetMixtureConfig")
PREFIX = "actor_rollout_ref."


def fields_of(file, *classes):
    """The fields of dataclasses in a file with their defaults, without importing it."""
    found = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and (node.name in classes or not classes):
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    found[field.target.id] = default_in(field.value)
    return found


def default_in(node):
    words = {word.arg: word.value for word in getattr(node, "keywords", ())}
    made = words.get("default_factory")
    if isinstance(made, ast.Lambda):
        return ast.literal_eval(made.body)
    return ast.literal_eval(words["default"]) if "default" in words else None


def of_transformers():
    """The options of `TrainingArguments`, which TRL's configurations extend."""
    from transformers import TrainingArguments

    missing = dataclasses.MISSING
    found = {}
    for field in dataclasses.fields(TrainingArguments):
        made = field.default_factory() if field.default_factory is not missing else None
        value = field.default if field.default is not missing else made
        found[field.name] = getattr(value, "value", value)
    return found


def of_trl(folder):
    """The options of each trainer, and those of all of them."""
    trainer, scripts = folder / "trl" / "trainer", folder / "trl" / "scripts"
    common = of_transformers() | fields_of(trainer / "base_config.py") | fields_of(trainer / "model_config.py")
    common |= fields_of(scripts / "utils.py", *SCRIPTS)
    of_trainers = {name: fields_of(trainer / f"{name}_config.py") for name in TRAINERS}
    for name in ("grpo", "rloo"):
        of_trainers[name] |= fields_of(scripts / f"{name}.py", f"{name.upper()}ScriptArguments")
    return {"common": common, **of_trainers}


def flat(value, path=""):
    """The leaves of nested options by their dotted names, without verl's prefix; an empty group is a leaf."""
    if not isinstance(value, dict) or not value:
        return {path.removeprefix(PREFIX): value}
    leaves = {}
    for key, one in value.items():
        if key != "_target_":
            leaves |= flat(one, f"{path}.{key}".lstrip("."))
    return leaves


def of_verl(folder):
    """The options of `ppo_trainer.yaml`, which Hydra composes of many files, as verl ships them composed.

    Its other files, for Megatron and others, add options of their own.
    """
    config, options = folder / "verl" / "trainer" / "config", {}
    for engine in ("torchtitan_", "veomni_", "megatron_", ""):
        options |= flat(yaml.safe_load((config / f"_generated_ppo_{engine}trainer.yaml").read_text()))
    return {"ppo": options}


def read(folder):
    """All options of both packages, as the file has them."""
    return json.loads(json.dumps({"trl": of_trl(folder), "verl": of_verl(folder)}))


if __name__ == "__main__":
    options = json.loads(FILE.read_text()) | read(Path(sys.argv[1])) if FILE.exists() else read(Path(sys.argv[1]))
    FILE.write_text(json.dumps(options, indent=1, sort_keys=True) + "\n")
