"""Runs a beam search on an engine, whoever waits for it: a thread or a coroutine."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence

from jaxcb.beam import Beam, BeamParams, BeamSearch
from jaxcb.engine.serving import ServingEngine
from jaxcb.engine.stream import OutputStream
from jaxcb.errors import EngineStoppedError, RequestError
from jaxcb.logprobs import Logprobs
from jaxcb.request import FinishReason, Request, RequestOutput
from jaxcb.text.detokenizer import Detokenizer

Searching = Generator[Sequence[OutputStream], Sequence[RequestOutput], list[RequestOutput]]


def check_beams(engine: ServingEngine, request: Request, params: BeamParams) -> None:
    """Raise RequestError if the search can never run. ``request`` brings the prompt."""
    if params.width > engine.max_choices:
        raise RequestError(
            f"{params.width} beams are asked for, and at most {engine.max_choices} sequences run at once", param="width"
        )
    limit = engine.config.max_model_len
    assert limit is not None  # the config is resolved
    if (length := len(request.prompt_token_ids) + params.max_tokens) > limit:
        raise RequestError(
            f"the prompt and max_tokens ({params.max_tokens}) come to {length} tokens; the limit is {limit}",
            param="max_tokens",
        )
    engine.check_request(dataclasses.replace(request, sampling=BeamSearch(params, ()).sampling(engine.spec.vocab_size)))


def search(engine: ServingEngine, request: Request, params: BeamParams, *, blocking: bool) -> Searching:
    """Yields the streams whose first outputs it is to be sent; returns the answers, the best first.

    ``request`` brings the prompt. Closing it before the end ends what still runs. Errors as for ``submit``.

    Raises:
        EngineStoppedError: the engine dropped a beam.
    """
    beams = BeamSearch(params, engine.spec.eos_token_ids)
    sampling = beams.sampling(engine.spec.vocab_size)
    prompt, number = list(request.prompt_token_ids), 0

    def request_of(beam: Beam) -> Request:
        nonlocal number
        number += 1
        ids = [*prompt, *beam.token_ids]
        name = f"{request.request_id}-beam-{number}"
        return dataclasses.replace(request, request_id=name, prompt_token_ids=ids, sampling=sampling)

    streams = engine.submit_choices(request_of(beams.running[0]), blocking=blocking)
    try:
        while not beams.done:
            outputs = yield streams
            steps = beams.advance([_logprobs(output) for output in outputs])
            if steps:
                children = [(request_of(step.beam), step.parent) for step in steps]
                streams = engine.fork(streams, children, blocking=blocking)
    finally:
        for stream in streams:
            stream.abort()
    return [_output(engine, request, beam, index) for index, beam in enumerate(beams.finished)]


def _logprobs(output: RequestOutput) -> Logprobs:
    """Of the first token after a beam."""
    if output.logprobs is None or not len(output.logprobs):
        raise EngineStoppedError(output.error or "the engine dropped a beam")
    return output.logprobs.take(0)


def _output(engine: ServingEngine, request: Request, beam: Beam, index: int) -> RequestOutput:
    """A beam as an answer. Its end token has no text."""
    shown = beam.token_ids[:-1] if beam.finish_reason is FinishReason.STOP else beam.token_ids
    detokenizer = Detokenizer(engine.tokenizer, request.prompt_token_ids)
    ended_by = beam.token_ids[-1]
    is_eos = beam.finish_reason is not FinishReason.STOP or ended_by in engine.spec.eos_token_ids
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=beam.token_ids,
        text=detokenizer.add(shown) + detokenizer.flush(),
        finish_reason=beam.finish_reason,
        stop_reason=None if is_eos else ended_by,
        arrival_s=request.arrival_s,
        index=index,
        score=beam.score,
    )
