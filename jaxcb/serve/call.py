"""A checked HTTP request on its way to the engine, and what an endpoint has to bring to serve one."""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from jaxcb.beam import BeamParams
from jaxcb.errors import RequestError
from jaxcb.parsing import Reading
from jaxcb.request import RequestOutput, SamplingParams
from jaxcb.serve.requests import StreamOptions
from jaxcb.serve.responses import Usage
from jaxcb.serve.sse import Writer

if TYPE_CHECKING:
    from jaxcb.text import Tokenizer


class Prompt(NamedTuple):
    token_ids: Sequence[int]
    sampling: SamplingParams
    echo: str | None = None
    """Its text, where every answer is to begin with that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One HTTP request: one or more prompts. Each becomes a request of the engine, with one or more answers.

    ``field_names`` tells where the body calls something by another name than the engine does.
    """

    id: str
    model: str
    prompts: Sequence[Prompt]
    stream: bool
    include_usage: bool
    tokenizer: Tokenizer
    scheduling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of :class:`jaxcb.request.Request` that the body brought."""
    field_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    return_token_ids: bool = False
    """The ids of prompt and answer come back beside the text."""
    echo_only: bool = False
    """The prompt comes back without an answer: the one token that the engine makes is left out."""
    num_prompt_logprobs: int | None = None
    """Likeliest tokens beside each of the prompt, where the body asked for the prompt's log-probabilities."""
    beams: Sequence[BeamParams] = ()
    """How each prompt is searched, where the body asked for beam search."""
    reading: Reading = dataclasses.field(default_factory=Reading)
    """How the answers are taken apart."""
    include_reasoning: bool = True
    new_call_id: Callable[[], str] = lambda: ""
    """Names a call of a tool."""
    asked: Any = None
    """The body's own fields, where the answer repeats them."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    arrival_s: float = dataclasses.field(default_factory=time.monotonic)

    def prompt_of(self, choice: int) -> Prompt:
        """Whose answer a choice is."""
        return self.prompts[choice // self.prompts[0].sampling.n]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Face:
    """An endpoint in two functions: what stands between the engine's words and its clients'."""

    answer: Callable[[Call, Sequence[RequestOutput], Usage], msgspec.Struct]
    """The body for the finished outputs, the ``n`` of a prompt after those of the one before."""
    writer: Callable[[Call], Writer]
    """Writes a stream instead."""


def new_id(prefix: str) -> str:
    """An id that no client can choose or guess, so that two requests never share one. ``prefix``: what OpenAI and
    Anthropic begin ids of the kind with, which some clients look at ("chatcmpl-", "resp_")."""
    return f"{prefix}{uuid.uuid4().hex}"


def wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether a stream ends with a usage chunk.

    Raises:
        RequestError: ``stream_options`` without ``stream``.
    """
    if options is not None and not stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    return options is not None and bool(options.include_usage)


def refuse_streamed_prompt_logprobs(stream: bool | None, prompt_logprobs: int | None) -> None:
    """Raise RequestError where both are asked for: the chunks of a stream have no place for them (as in vLLM)."""
    if stream and prompt_logprobs is not None:
        raise RequestError("prompt_logprobs can't be streamed: leave out stream, or use echo", param="prompt_logprobs")
