"""A random life of an engine: everything that a caller may do to it, in any order, drawn from one seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxcb.engine import Engine, OutputStream
from jaxcb.errors import RequestError
from jaxcb.models.params import Params
from jaxcb.request import FinishReason, Request, RequestOutput, SamplingParams
from jaxcb.sampling_params import StructuredOutputs

NO_TOKEN = "no token could be sampled"
"""What a request is rightly told whose parameters leave nothing to choose from."""
Draw = Callable[[random.Random, int], Any]
"""(random numbers, vocabulary size) -> a value."""
WORDS = ("the", " the", "a", "t", "he", " ", "\n", "zebra", "é")
GRAMMARS: tuple[Mapping[str, Any], ...] = (
    {"regex": "[a-c]{1,9}(the|he)?"},
    {"choice": ("yes", "no", "the answer")},
    {"json_object": True},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": {"enum": [1, "two"]}, "disable_any_whitespace": True},
    {"grammar": 'start: "a" start | "b"'},
    {"regex": "so: [a-z ]{3,30}", "reasoning_end": "e"},
    {
        "structural_tag": {
            "structures": [{"begin": "<t>", "schema": {"type": "boolean"}, "end": "</t>"}],
            "triggers": ["<t"],
        }
    },
)


def _ids(most: int) -> Draw:
    return lambda rng, vocab_size: tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, most)))


def _words(rng: random.Random, vocab_size: int) -> tuple[str, ...]:
    return tuple(rng.sample(WORDS, rng.randint(1, 3)))


def _one_of(*values: Any) -> Draw:
    return lambda rng, vocab_size: rng.choice(values)


def _between(low: float, high: float) -> Draw:
    return lambda rng, vocab_size: rng.uniform(low, high)


def _may_leave_none(sampling: SamplingParams) -> bool:
    """Whether the parameters can forbid every token. ``min_tokens`` forbids stop ids, which a grammar may need."""
    return sampling.controlled or (sampling.structured_outputs is not None and sampling.min_tokens > 0)


FIELDS: Mapping[str, Draw] = {
    "n": _one_of(2, 3, 4),
    "best_of": _one_of(2, 4),
    "temperature": _one_of(0.0, 0.3, 1.0, 2.5, 100.0),
    "top_k": _one_of(-1, 1, 5, 50, 10_000),
    "top_p": _one_of(0.0, 0.3, 0.95),
    "min_p": _one_of(0.02, 1.0),
    "typical_p": _one_of(0.2, 0.9),
    "top_n_sigma": _one_of(-1.0, 1.0, 3.0),
    "repetition_penalty": _between(0.5, 2.0),
    "presence_penalty": _between(-2.0, 2.0),
    "frequency_penalty": _between(-2.0, 2.0),
    "no_repeat_ngram_size": _one_of(1, 2, 3, 32),
    "dry_multiplier": _one_of(0.8, 50.0),
    "dry_base": _between(1.0, 3.0),
    "dry_allowed_length": _one_of(1, 2, 32),
    "dry_sequence_breakers": _words,
    "xtc_probability": _one_of(0.5, 1.0),
    "xtc_threshold": _one_of(0.0, 0.1, 0.6),
    "logit_bias": lambda rng, vocab_size: {rng.randrange(vocab_size): rng.uniform(-100, 100) for _ in range(20)},
    "allowed_token_ids": _ids(60),
    "bad_words": _words,
    "seed": lambda rng, vocab_size: rng.randint(-(2**63), 2**63 - 1),
    "max_tokens": _one_of(1, 2, 9, 20, 40, None),
    "min_tokens": _one_of(1, 5),
    "stop": _words,
    "stop_token_ids": _ids(8),
    "ignore_eos": _one_of(True),
    "include_stop_str_in_output": _one_of(True),
    "skip_special_tokens": _one_of(False),
    "logprobs": _one_of(0, 1, 20, -1),
    "prompt_logprobs": _one_of(0, 3, 20, -1),
    "structured_outputs": lambda rng, vocab_size: StructuredOutputs(**rng.choice(GRAMMARS)),
    "extra_args": _one_of({}),
}
"""A draw for every field of SamplingParams."""


def draw_sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    """From none of the fields to most of them; mixes that are refused are drawn again."""
    while True:
        chance = rng.choice((0.0, 0.05, 0.15, 0.6))
        fields = {name: draw(rng, vocab_size) for name, draw in FIELDS.items() if rng.random() < chance}
        try:
            return SamplingParams(**{"max_tokens": rng.randint(1, 40)} | fields)
        except RequestError:
            continue


@dataclasses.dataclass
class RandomLife:
    """One after the other, :attr:`num_acts` random acts on an engine; then everything must come to its end.

    ``params`` are weights of the engine's model that it may be given instead of its own.
    """

    engine: Engine
    params: tuple[Params, ...]
    rng: random.Random
    num_requests: int = 0
    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    _open: list[OutputStream] = dataclasses.field(default_factory=list)
    _latest: dict[int, RequestOutput] = dataclasses.field(default_factory=dict)
    """Last output read of a stream, by its id()."""

    def live(self, num_acts: int) -> None:
        """Whatever happens, no compile, no failed request, and no page that stays in use."""
        acts: dict[Callable[[], None], int] = {
            self.submit: 40,
            self.read: 30,
            self.finish_one: 6,
            self.abort: 6,
            self.fork: 6,
            self.embed_or_score: 4,
            self.pause: 3,
            self.sleep: 1,
            self.update_params: 2,
            self.forget: 1,
            self.be_refused: 2,
        }
        for act in self.rng.choices(list(acts), list(acts.values()), k=num_acts):
            act()
        while self._open:
            self.finish_one()

    def submit(self) -> None:
        """A burst of one request or a few."""
        for _ in range(self.rng.choice((1, 1, 2, 6))):
            sampling = draw_sampling(self.rng, self.engine.spec.vocab_size)
            request = self.request(self.prompt(), sampling, pooling=self.rng.choice((None,) * 8 + ("last", "mean")))
            self._try(lambda request=request: self.engine.submit_choices(request, blocking=True))

    def read(self) -> None:
        """Wait for what comes next in some stream: steps pass meanwhile."""
        if self._open:
            stream = self.rng.choice(self._open)
            self._note(stream, next(stream))

    def finish_one(self) -> None:
        if self._open:
            stream = self.rng.choice(self._open)
            for output in stream:
                self._note(stream, output)

    def abort(self) -> None:
        if self._open:
            self.rng.choice(self._open).abort()

    def fork(self) -> None:
        """Replace a running request by continuations of what it has said so far, as a beam search does."""
        parents = [s for s in self._open if id(s) in self._latest and s.request.sampling.num_choices == 1]
        if not parents:
            return
        parent = self.rng.choice(parents)
        so_far = [*parent.request.prompt_token_ids, *self._latest[id(parent)].token_ids]
        children = []
        for _ in range(self.rng.randint(1, 3)):
            sampling = draw_sampling(self.rng, self.engine.spec.vocab_size)
            changes: dict[str, Any] = {"n": 1, "best_of": None, "structured_outputs": None}
            token = self.rng.randrange(self.engine.spec.vocab_size)
            children.append((self.request([*so_far, token], dataclasses.replace(sampling, **changes)), 0))
        self._try(lambda: self.engine.fork([parent], children, blocking=True))

    def embed_or_score(self) -> None:
        texts = [self.prompt() for _ in range(self.rng.randint(1, 5))]
        if self.rng.random() < 0.5:
            values = self.engine.embed(texts, pooling=self.rng.choice(("last", "mean")))
            assert np.isfinite(values).all()
        else:
            pairs = [(text[: len(text) // 2 + 1], text[len(text) // 2 + 1 :]) for text in texts]
            assert all(np.isfinite(score.logprob) for score in self.engine.score(pairs))

    def pause(self) -> None:
        """Requests come and go while no step is made."""
        self.engine.pause()
        self.submit()
        self.abort()
        self.engine.resume()

    def sleep(self) -> None:
        self.engine.sleep()
        self.submit()
        self.abort()
        self.engine.wake()

    def update_params(self) -> None:
        self.engine.update_params(self.rng.choice(self.params), running=self.rng.choice(("keep", "restart")))

    def forget(self) -> None:
        self.engine.reset_prefix_cache()

    def be_refused(self) -> None:
        """What can't be honoured leaves nothing behind."""
        vocab_size, longest = self.engine.spec.vocab_size, self.engine.config.max_model_len
        for prompt, sampling in (
            ([vocab_size], {}),
            ([1] * (longest + 1), {}),
            ([1], {"stop_token_ids": (vocab_size,)}),
            ([1], {"structured_outputs": StructuredOutputs(regex="(")}),
            ([1], {"extra_args": {"unknown": 1}}),
        ):
            try:
                self.engine.submit_blocking(self.request(prompt, SamplingParams(**sampling)))
            except RequestError:
                continue
            raise AssertionError(f"{prompt[:3]} with {sampling} was not refused")

    def prompt(self) -> list[int]:
        """Short or long; half of them begin alike."""
        longest = self.engine.config.max_model_len
        length = self.rng.choice((1, 2, 15, 16, 17, self.rng.randint(1, 60), self.rng.randint(1, longest - 60)))
        if self.rng.random() < 0.5:
            start = self.rng.choice((3, 5))
            return [start + i % 7 for i in range(length)]
        return [self.rng.randrange(self.engine.spec.vocab_size) for _ in range(length)]

    def request(self, prompt: list[int], sampling: SamplingParams, **fields: Any) -> Request:
        self.num_requests += 1
        return Request(
            request_id=f"life-{self.num_requests}",
            prompt_token_ids=prompt,
            sampling=sampling,
            priority=self.rng.randint(-2, 2),
            cache_salt=self.rng.choice(("", "", "salt")),
            score_from=self.rng.choice((1, 1, len(prompt) // 2 + 1)),
            **fields,
        )

    def _try(self, call: Callable[[], list[OutputStream]]) -> None:
        """Some mixes are rightly refused (a prompt without room for ``min_tokens``, say)."""
        try:
            self._open += call()
        except RequestError:
            return

    def _note(self, stream: OutputStream, output: RequestOutput) -> None:
        self._latest[id(stream)] = output
        if output.finished:
            if output.finish_reason is FinishReason.ERROR:
                sampling = stream.request.sampling
                assert _may_leave_none(sampling) and (output.error or "").startswith(NO_TOKEN), (output.error, sampling)
            self._open.remove(stream)
            del self._latest[id(stream)]
            self.outputs.append(output)
