"""PrefillDecodePair: one engine computes prompts, another generates, and the KV goes from the first to the second.

The hand-off goes through the prefix cache (DistServe's idea, Zhong et al. 2024; Mooncake's way to move it): the decode
engine is given the prompt's full pages as if it had computed them before, then the request. It computes the rest of the
prompt, less than a page, and samples the first token itself. A page that finds no place, or is evicted again before the
request starts, is computed there: a lost hand-off costs time and never changes an answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxcb.engine import Engine, OutputStream
from jaxcb.errors import ConfigError, EngineStoppedError
from jaxcb.request import Request, RequestOutput


class PrefillDecodePair:
    """Two running engines over the same weights, both with ``kv_transfer`` and prefix caching on.

    Raises:
        ConfigError: they differ in what a page holds, or can't hand pages over.
    """

    def __init__(self, prefill: Engine, decode: Engine):
        for engine in (prefill, decode):
            for name in ("kv_transfer", "enable_prefix_caching"):
                if not getattr(engine.config, name):
                    raise ConfigError(f"both engines of a pair need {name}", param=name)
        for name in ("page_size", "dtype"):
            ours, theirs = getattr(prefill.config, name), getattr(decode.config, name)
            if ours != theirs:
                raise ConfigError(f"the engines of a pair differ in {name}: {ours} and {theirs}", param=name)
        if prefill.spec != decode.spec:
            raise ConfigError("the engines of a pair serve different models", param="model")
        self.prefill, self.decode = prefill, decode
        self.num_tokens_handed_over = 0

    def complete(self, requests: Sequence[Request]) -> list[RequestOutput]:
        """Final outputs, in order. While one prompt's answer is generated the next prompt is computed.

        Raises:
            RequestError: one of the requests is impossible; those before it are dropped.
            EngineStoppedError: an engine stopped.
        """
        for request in requests:
            self.decode.check_request(request)
        answers: list[OutputStream] = []
        prompts = [self.prefill.submit_blocking(_prompt_only(request)) for request in requests]
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                _last(prompt)
                self._hand_over(request)
                answers.append(self.decode.submit_blocking(request))
            return [_last(answer) for answer in answers]
        finally:
            for stream in (*prompts, *answers):
                stream.abort()

    def _hand_over(self, request: Request) -> None:
        beginning = self.prefill.export_prefix(request.prompt_token_ids, request.cache_salt)
        self.num_tokens_handed_over += self.decode.import_prefix(beginning, request.cache_salt)


def _prompt_only(request: Request) -> Request:
    """The request that computes the prompt: it ends with the first token, which nobody reads."""
    sampling = dataclasses.replace(
        request.sampling,
        n=1,
        best_of=None,
        max_tokens=1,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        stop=(),
        structured_outputs=None,
    )
    return dataclasses.replace(request, sampling=sampling)


def _last(stream: OutputStream) -> RequestOutput:
    for output in stream:
        if output.error is not None:
            raise EngineStoppedError(output.error)
    return output
