"""Rows as requests to vLLM's core, and their tokens as they come.

vLLM's own front end writes texts and streams for each token of each row. In a rank's process the core has to wait for
it, almost as long as it takes itself.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from prefect_rlhf.engines.sampling.stop_strings import StopStrings
from prefect_rlhf.errors.errors import EngineFailed

AS_ASKED = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass
class Response:
    """A row's tokens so far, and what the sampler showed for each: a number, or two with the kept mass."""

    tokens: list[int] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)


class Requests:
    """The rows that an engine continues now. All ranks of the engine add the same rows in the same order."""

    def __init__(self, vllm: LLMEngine, engine: str) -> None:
        self._core, self._inputs = vllm.engine_core, vllm.input_processor
        self._tasks = vllm.get_supported_tasks()
        self._engine = engine
        self._names = itertools.count()
        self._running: dict[str, Response] = {}

    def __len__(self) -> int:
        """The rows without an end yet."""
        return len(self._running)

    def add(self, context: Sequence[int], parameters: SamplingParams, adapter: Any = None) -> str:
        """Begin a row after its context; return the request's name."""
        name = str(next(self._names))
        tokens = tokens_input(list(context))
        self._core.add_request(self._inputs.process_inputs(name, tokens, parameters, self._tasks, lora_request=adapter))
        self._running[name] = Response()
        return name

    def step(self, stops: StopStrings | None) -> dict[str, Response]:
        """Let vLLM take a step; return the rows that it ended, by name. Rows with a stop string are ended here.

        With batches in flight, a step may have no tokens. Raises EngineFailed if vLLM gave a row up.
        """
        ended: dict[str, Response] = {}
        grown: dict[str, Response] = {}
        for output in self._core.get_output().outputs:
            response = self._running.get(output.request_id)
            if response is None:  # it was ended here, with a batch in flight
                continue
            response.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                response.shown += output.new_logprobs.logprobs.ravel().tolist()
            if output.finish_reason is None:
                grown[output.request_id] = response
            elif output.finish_reason in AS_ASKED:
                ended[output.request_id] = response
            else:
                raise EngineFailed(
                    f"{self._engine}: vLLM ended a row by {output.finish_reason}, expected stop or length"
                )
        if stops is not None and grown:
            stopped = stops.ended([response.tokens for response in grown.values()])
            with_a_string = [name for name, is_stopped in zip(grown, stopped, strict=True) if is_stopped]
            self._core.abort_requests(with_a_string)
            ended |= {name: grown[name] for name in with_a_string}
        for name in ended:
            del self._running[name]
        return ended
