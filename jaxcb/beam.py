"""Beam search: the likeliest answers, found by keeping the ``width`` best beginnings of a given length.

The rules are those of transformers' ``generate(num_beams=...)`` (Wu et al. 2016, section 7, gave the length penalty).
Each beam runs as a request of its own that asks the engine for the log-probabilities of its next token; the beams
that go on are forks of the ones they came from: they share their pages and compute one token. No jax and no engine
here: what runs the requests is :func:`jaxcb.generate.beam_search`, or the server.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxcb import validation
from jaxcb.errors import RequestError
from jaxcb.logprobs import Logprobs
from jaxcb.request import FinishReason
from jaxcb.sampling_params import MAX_CHOICES, MAX_LOGPROBS, SamplingParams

EarlyStopping = bool | Literal["never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamParams:
    """How to search.

    Arguments:
        width: beams that are kept; also the answers that are given back, the best first.
        max_tokens: most tokens of an answer.
        length_penalty: an answer's score is its log-probability divided by ``length ** length_penalty``, its end token
            counted: above 0 favours long answers, below 0 short ones.
        early_stopping: True: stop as soon as ``width`` answers have ended. False: when the best beam, if it ended now,
            would score below the worst of these. "never": when no beam can score above it any more.
        ignore_eos: go on after the model's end tokens.
        stop_token_ids: further ids that end an answer.

    Raises:
        RequestError: a value is outside its range; ``.param`` names the field.
    """

    width: int = 4
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        validation.integer("width", self.width, low=1, high=MAX_CHOICES)
        validation.integer("max_tokens", self.max_tokens, low=1)
        validation.number("length_penalty", self.length_penalty, low=-10.0, high=10.0)
        validation.boolean("ignore_eos", self.ignore_eos)
        if self.early_stopping not in (True, False, "never"):
            given = validation.shown(self.early_stopping)
            raise RequestError(f'early_stopping must be true, false or "never", got {given}', param="early_stopping")
        object.__setattr__(
            self, "stop_token_ids", tuple(validation.token_ids("stop_token_ids", list(self.stop_token_ids)))
        )

    def score(self, logprob: float, length: int) -> float:
        """What beams are ranked by in the end."""
        return logprob / length**self.length_penalty


class Beam(NamedTuple):
    """A beginning of an answer, or a whole one. ``score`` is of meaning once it has ended."""

    token_ids: tuple[int, ...]
    logprob: float
    """Sum over the tokens."""
    score: float = -math.inf
    finish_reason: FinishReason | None = None


class Step(NamedTuple):
    """A beam that goes on, and which of the running ones before it was its beginning."""

    beam: Beam
    parent: int


class BeamSearch:
    """The state of one search. ``running`` are the beams whose next tokens are wanted.

    Arguments:
        params: how to search.
        eos_token_ids: the model's end tokens.
    """

    def __init__(self, params: BeamParams, eos_token_ids: Sequence[int]):
        self.params = params
        self.end_ids = frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_token_ids)
        self.running = [Beam((), 0.0)]
        self.finished: list[Beam] = []
        self.done = False

    def sampling(self, vocab_size: int) -> SamplingParams:
        """Of the requests that bring what :meth:`advance` takes. They end when they are told to."""
        count = min(self.params.width + len(self.end_ids), vocab_size)
        logprobs = count if count <= MAX_LOGPROBS else -1
        return SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, logprobs=logprobs)

    def advance(self, logprobs: Sequence[Logprobs]) -> list[Step]:
        """Take the log-probabilities of the token after each running beam; the beams that go on, the likeliest first.

        An answer counts as finished only if it is among the ``width`` likeliest candidates of its length: others are
        there so that ``width`` beams can go on.
        """
        params, length = self.params, len(self.running[0].token_ids) + 1
        candidates = self._candidates(logprobs)
        at_end = length == params.max_tokens
        for step in candidates[: params.width]:
            beam = step.beam
            if beam.token_ids[-1] in self.end_ids or at_end:
                reason = FinishReason.STOP if beam.token_ids[-1] in self.end_ids else FinishReason.LENGTH
                score = params.score(beam.logprob, length)
                self.finished.append(beam._replace(score=score, finish_reason=reason))
        self.finished.sort(key=lambda beam: -beam.score)  # stable: of two that tie the earlier stays
        del self.finished[params.width :]
        steps = [step for step in candidates if step.beam.token_ids[-1] not in self.end_ids][: params.width]
        self.running = [step.beam for step in steps]
        self.done = at_end or not steps or self._nothing_better_can_come(length)
        return [] if self.done else steps

    def _candidates(self, logprobs: Sequence[Logprobs]) -> list[Step]:
        """Enough continuations of the running beams for ``width`` of them to go on, the likeliest first."""
        count = self.params.width + len(self.end_ids)
        steps = []
        for parent, (beam, row) in enumerate(zip(self.running, logprobs, strict=True)):
            pairs = list(zip(row.top_ids[0].tolist(), row.top_logprobs[0].tolist(), strict=True))
            if len(pairs) > count:  # of the whole vocabulary, in the order of the ids
                pairs = sorted(pairs, key=lambda pair: -pair[1])[:count]
            steps += [Step(Beam((*beam.token_ids, token), beam.logprob + value), parent) for token, value in pairs]
        return sorted(steps, key=lambda step: -step.beam.logprob)

    def _nothing_better_can_come(self, length: int) -> bool:
        params = self.params
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is True:
            return True
        longest = params.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        return params.score(self.running[0].logprob, longest) <= self.finished[-1].score
