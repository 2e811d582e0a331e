"""GrammarCompiler: compiled grammars of one tokenizer, kept for the next request that has the same.

A grammar comes from outside, so compiling it is bounded: by its size and nesting (``StructuredOutputs``), by
llguidance's own limits, in time, and in how many are compiled at once, on threads of its own. Python's lock is free
meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import llguidance

from jaxcb.errors import RequestError
from jaxcb.grammar.constraint import Constraint
from jaxcb.grammar.marker import Marker
from jaxcb.grammar.source import source_of
from jaxcb.structured_outputs import StructuredOutputs
from jaxcb.text import Tokenizer

TIMEOUT_S = 10.0
"""Longest that a request waits for its grammar."""
WORKERS = 2
"""Grammars compiled at once."""
MAX_QUEUED = 64
"""Grammars that wait for that; one more is refused."""
KEPT = 256
"""Compiled grammars that are remembered."""
MARKERS = 16
"""Ends of free text that are remembered: a model has one."""
LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 250_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
"""llguidance's, most of them tighter than its own: at the worst a second to compile, some milliseconds a mask, and
100 MB a grammar."""


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A compiled one, of which each answer takes a copy."""

    wanted: StructuredOutputs
    matcher: llguidance.LLMatcher
    marker: Marker | None
    mask_size: int
    """Ids in a mask: those of the model, or of the tokenizer if they are more."""
    eos_ids: Sequence[int]
    """The model's, and that which llguidance ends an answer with."""

    def constraint(self, end_ids: Iterable[int], *, takes_forced: bool) -> Constraint:
        """The state of one answer, at its beginning; see :class:`Constraint`."""
        return Constraint(
            self.matcher.deep_copy(),
            end_ids=end_ids,
            eos_ids=self.eos_ids,
            marker=self.marker,
            takes_forced=takes_forced,
        )


class GrammarCompiler:
    """Any thread may call it.

    Arguments:
        tokenizer: the model's.
        vocab_size: the model's, which may be more than the tokenizer knows.
        eos_token_ids: the model's end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self._eos_ids = tokenizer, list(eos_token_ids)
        self._mask_size = max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Future[Grammar]] = OrderedDict()
        self._num_queued = 0
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="jaxcb-grammar")
        self._ours: llguidance.LLTokenizer | None = None
        self._building = threading.Lock()
        self._marker = functools.lru_cache(MARKERS)(self._new_marker)

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """The compiled grammar. Blocks while it is compiled for the first time, the first one of all for a second.

        Raises:
            RequestError: it is wrong, too large, can't be held to exactly, or takes too long; ``.param`` names the
                field.
        """
        key = wanted.key
        with self._lock:
            future = self._known.get(key)
            if future is None:
                if self._num_queued >= MAX_QUEUED:
                    raise RequestError(
                        f"{self._num_queued} grammars are being compiled already: try again later",
                        param="structured_outputs",
                    )
                self._num_queued += 1
                future = self._known[key] = self._workers.submit(self._compile, wanted)
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
        try:
            return future.result(TIMEOUT_S)
        except TimeoutError:
            raise RequestError(
                f"structured_outputs.{wanted.kind} takes more than {TIMEOUT_S:g} s to compile: make it simpler",
                param=f"structured_outputs.{wanted.kind}",
            ) from None

    def close(self) -> None:
        """Compile no more."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _compile(self, wanted: StructuredOutputs) -> Grammar:
        try:
            tokenizer = self._llguidance_tokenizer()
            added = self._tokenizer.backend.get_added_tokens_decoder()
            special = {token.content: number for number, token in added.items() if token.special}
            source, limits = source_of(wanted, special), llguidance.LLParserLimits(**LIMITS)  # type: ignore[arg-type]  # a bool among them
            wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, tokenizer, limits=limits)
            if wrong or messages:  # what is only warned of would not be held to
                raise _refusal(wanted, "; ".join(messages))
            matcher = llguidance.LLMatcher(tokenizer, source, limits=limits, log_level=0)
            if error := _try_out(matcher):
                raise _refusal(wanted, error)
            marker = None if wanted.reasoning_end is None else self._marker(wanted.reasoning_end)
            eos_ids = sorted({*self._eos_ids, *tokenizer.eos_tokens})
            return Grammar(wanted, matcher, marker, self._mask_size, eos_ids)
        except RequestError:
            raise
        except Exception as error:  # of a library: whatever it raises refuses this request
            raise _refusal(wanted, str(error)) from error
        finally:
            with self._lock:
                self._num_queued -= 1

    def _llguidance_tokenizer(self) -> llguidance.LLTokenizer:
        """Built when the first grammar comes: it takes a second, and most engines never need it."""
        with self._building:
            if self._ours is None:
                self._ours = llguidance.LLTokenizer(
                    self._tokenizer.backend.to_str(),
                    n_vocab=self._mask_size,
                    eos_token=self._eos_ids[0] if self._eos_ids else None,
                )
            return self._ours

    def _new_marker(self, text: str) -> Marker:
        return Marker(text, self._token_bytes)

    @functools.cached_property
    def _token_bytes(self) -> list[bytes]:
        """Of all ids; a fraction of a second for a large vocabulary, so once."""
        return [self._tokenizer.token_bytes(token) for token in range(self._tokenizer.vocab_size)]


def _try_out(matcher: llguidance.LLMatcher) -> str:
    """Why no answer can begin, or nothing. What the first masks need is built here, and all copies share it."""
    trial = matcher if matcher.is_error() else matcher.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()
        trial.consume_tokens(trial.compute_ff_tokens())
        trial.compute_bitmask()
    return trial.get_error()


def _refusal(wanted: StructuredOutputs, reason: str) -> RequestError:
    name = f"structured_outputs.{wanted.kind}"
    return RequestError(f"{name} can't be used: {reason.strip()[:2000]}", param=name)
