"""The command `prefect-rlhf chat`: talk with a model in a Hugging Face folder, such as one that a run has trained."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from prefect_rlhf.errors.errors import InvalidInput, RlhfError, refusing
from prefect_rlhf.errors.in_short import in_short
from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.model_folder import ADAPTER, CONFIG, MERGED, RESULT, generates, is_adapter
from prefect_rlhf.files.path_text import from_here, resolved
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, whole_number
from prefect_rlhf.flows.hardware.installed_engines import missing_engine

MOST_TOKENS = 1 << 20
FIELD = "MODEL"  # as the help and errors name it

Answer = Callable[[str], None]
"""Print the model's answer to a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """The flags of `chat`."""

    model: Annotated[str, Parameter(help="Hugging Face folder, such as runs/latest/actor.")] = field(kw_only=False)
    message: Annotated[
        str | None, Parameter(help="What you say to the model. Without it, you type lines until Ctrl-D.")
    ] = field(kw_only=False, default=None)
    plain: Annotated[
        bool, Parameter(help="Continue your text without the chat template, for models trained on plain prompts.")
    ] = False
    max_tokens: Annotated[int, whole_number(1, MOST_TOKENS), Parameter(help="Longest answer, in tokens.")] = 256


def chat(flags: Annotated[ChatFlags, ALL_AT_ONCE]) -> int:
    """Talk with a model at the terminal.

    Its generation_config.json decides how answers are drawn; by default the
    likeliest token is taken.

    prefect-rlhf chat runs/latest/actor
    prefect-rlhf chat runs/latest/actor "What is 2 plus 3?"
    """
    folder = generating_folder(flags.model)
    if find_spec("torch") is None:
        raise RlhfError(missing_engine("torch"))
    answer = answering(folder, flags)
    if flags.message is not None:
        answer(flags.message)
        return 0
    print(f"{flags.model} answers each line; Ctrl-D ends")
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return 0
        if said.strip():
            answer(said)


def generating_folder(model: str) -> Path:
    """Return the folder of a model that generates. Raises InvalidInput for any other folder."""
    folder = model_folder(model, FIELD)
    if (folder / RESULT).is_file():
        trained = read_json_object(FIELD, folder / RESULT).get("models")
        roles = ", ".join(f"{model.rstrip('/')}/{role}" for role in (trained if isinstance(trained, dict) else ()))
        raise InvalidInput(FIELD, model, f"the folder of a model in this run: {roles or 'it has trained none'}")
    if is_adapter(folder):
        raise InvalidInput(FIELD, model, _instead_of_an_adapter(model, folder))
    if not folder.is_dir():
        raise InvalidInput(FIELD, model, "a folder that exists; a run that trains an actor leaves RUN/actor")
    if not (folder / CONFIG).is_file():
        raise InvalidInput(FIELD, model, f"a Hugging Face folder, with {CONFIG}, such as runs/latest/actor")
    if not generates(folder):
        raise InvalidInput(FIELD, model, "a model that generates; this one gives a text a score")
    return folder


def _instead_of_an_adapter(model: str, folder: Path) -> str:
    """Say which whole model there is in place of an adapter's folder, or how to make one."""
    here = Path(model) if Path(model).name.strip(".") else resolved(folder)
    whole = here.with_name(f"{here.name}{MERGED}")
    if (whole / CONFIG).is_file():
        return f"a whole model, as in {from_here(str(whole))}: {model} is an adapter alone"
    base = read_json_object(FIELD, folder / ADAPTER).get("base_model_name_or_path")
    makes = "export_merged=true in the run that trains it, or peft's merge_and_unload, makes one"
    return f"a whole model: {model} is an adapter alone, on {in_short(base, str) if base else 'a base'}; {makes}"


def answering(folder: Path, flags: ChatFlags) -> Answer:
    """Load a model, and return a function that answers. Raises InvalidInput if the folder does not load."""
    import transformers  # imported here: --help and a wrong folder need no torch
    from safetensors import SafetensorError

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with refusing((OSError, ValueError, RuntimeError, SafetensorError), FIELD, flags.model, "a model that loads"):
        pipe = transformers.pipeline("text-generation", model=str(folder), dtype="auto")
    streamer = transformers.TextStreamer(pipe.tokenizer, skip_prompt=True, skip_special_tokens=True)
    is_plain = flags.plain or not pipe.tokenizer.chat_template
    chat: list[dict[str, str]] = []

    def answer(said: str) -> None:
        asked = said if is_plain else [*chat, {"role": "user", "content": said}]
        settings = deepcopy(pipe.model.generation_config)  # of the folder; a pipeline has other defaults
        settings.max_new_tokens = min(flags.max_tokens, room_for(pipe, asked))
        made = pipe(asked, generation_config=settings, streamer=streamer)[0]["generated_text"]
        if not is_plain:
            chat[:] = made

    return answer


def room_for(pipe: Any, asked: str | list[dict[str, str]]) -> int:
    """Return how many tokens of the model's context are left for an answer. Raises InvalidInput if it is full."""
    if isinstance(asked, str):
        used = len(pipe.tokenizer(asked)["input_ids"])
    else:
        from jinja2 import TemplateError  # imported here, as transformers

        with refusing((TemplateError, ValueError), "MESSAGE", asked[-1]["content"], "a chat that its template writes"):
            used = len(pipe.tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))
    context: int = getattr(pipe.model.config.get_text_config(), "max_position_embeddings", None) or MOST_TOKENS
    if used >= context:
        raise InvalidInput("MESSAGE", f"{used} tokens with all before it", f"fewer than {context}, the model's context")
    return context - used
