"""Every setting of the scheduler. The published systems are values of these fields (``jaxcb.sim`` names them)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from jaxcb import validation
from jaxcb.errors import ConfigError
from jaxcb.request import Request
from jaxcb.scheduler.policy import POLICIES, Key

Batching = Literal["continuous", "static"]
Reservation = Literal["optimistic", "guaranteed", "full"]
Preemption = Literal["recompute", "swap", "auto"]
Victim = Literal["newest", "least_progress"]
LengthPredictor = Literal["max_tokens", "observed"] | Callable[[Request], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulingKnobs:
    """How requests share an engine. The same fields stand in EngineConfig and in SchedulerLimits.

    Who is next:
        policy: order of the waiting queue: "fcfs"; "sjf" (fewest predicted tokens first); "priority" (lowest
            ``Request.priority`` first; it also preempts); "prefix" (longest cached beginning first); "deadline"
            (earliest ``arrival_s + ttft_deadline_s`` first); "fair" (tenants in turn, by tokens); or a key function
            of your own, see ``jaxcb.scheduler.policy``.
        length_predictor: what "sjf" and "fair" take for the length of an answer: "max_tokens"; "observed", the mean of
            finished requests with a prompt of that length class; or a function of the request.
        priority_ageing_s: waiting so long makes up for one class of priority, so that nothing starves; inf: never.
        max_overtakes: most later requests admitted before the oldest waiting one where the order alone could starve it
            ("sjf", "prefix", a function of your own).
        max_passes: most later requests admitted before a head that doesn't fit the free pages. 0: nobody passes it.

    What a step holds:
        batching: "continuous": sequences join at every step; "static": only when the whole batch has finished.
        prefill_first: a step that computes prompts holds no decode (vLLM before chunked prefill, TGI). Off, decodes
            come first in every step and prompts fill the rest.
        enable_chunked_prefill: a prompt may be computed over several steps. Off, ``max_num_batched_tokens`` must hold
            the longest sequence.
        max_chunk_tokens: most prompt tokens of one sequence in a step. None: the token budget.
        max_num_partial_prefills: most sequences whose prompt is partly computed. None: the budget alone limits them.
        long_prefill_token_threshold: one sequence with more tokens to compute is served at a time, and takes at most so
            many a step while shorter ones want some: these get past it. None: half the token budget; 0: off.
        exact_fill: trim the last chunk so that a step fills a compiled size exactly and computes no padding. None: the
            engine does where padding is computed, which the native CPU kernels skip; the scheduler alone doesn't.
        itl_target_ms: time between tokens to hold. The step-time model fitted to the last steps then limits how many
            prompt tokens share a step with decodes. None: the budget alone limits them.
        waiting_served_ratio: admit only once waiting requests are this part of the running ones (TGI); 0: always.
        max_waiting_steps: after so many steps without an admission ``waiting_served_ratio`` doesn't apply.

    Memory:
        reservation: "optimistic" admits on the pages that the prompt needs, and preempts when that turns out too
            little; "guaranteed" counts the worst case of every running sequence, so that nothing is ever preempted for
            pages (TensorRT-LLM's GUARANTEED_NO_EVICT); "full" takes pages for ``max_model_len`` tokens at
            admission, as engines did before paging.
        admission_watermark: part of the pages that admissions leave free while others run, so that these can grow
            without being preempted. Too little thrashes.
        preemption: what becomes of a victim's KV: "recompute"; "swap" to host memory (recompute once that is full);
            "auto": whichever the fitted step-time model says is cheaper.
        victim: who is preempted when pages are short: "newest", or "least_progress" (fewest computed tokens). The
            oldest running sequence is never chosen, so one always finishes.

    Raises:
        ConfigError: a value can't work; ``.param`` names the field.
    """

    policy: str | Key = "fcfs"
    length_predictor: LengthPredictor = "observed"
    priority_ageing_s: float = 60.0
    max_overtakes: int = 100
    max_passes: int = 0
    batching: Batching = "continuous"
    prefill_first: bool = False
    enable_chunked_prefill: bool = True
    max_chunk_tokens: int | None = None
    max_num_partial_prefills: int | None = None
    long_prefill_token_threshold: int | None = None
    exact_fill: bool | None = None
    itl_target_ms: float | None = None
    waiting_served_ratio: float = 0.0
    max_waiting_steps: int = 20
    reservation: Reservation = "optimistic"
    admission_watermark: float = 0.01
    preemption: Preemption = "auto"
    victim: Victim = "newest"

    def __post_init__(self) -> None:
        _one_of(self, "policy", POLICIES, or_function="a key function")
        _one_of(self, "length_predictor", ("max_tokens", "observed"), or_function="a function of the request")
        _one_of(self, "batching", get_args(Batching))
        _one_of(self, "reservation", get_args(Reservation))
        _one_of(self, "preemption", get_args(Preemption))
        _one_of(self, "victim", get_args(Victim))
        for name in ("prefill_first", "enable_chunked_prefill", "exact_fill"):
            if name != "exact_fill" or self.exact_fill is not None:
                validation.boolean(name, getattr(self, name), error=ConfigError)
        for name in ("max_overtakes", "max_waiting_steps", "max_chunk_tokens", "max_num_partial_prefills"):
            _integer(self, name, low=1)
        for name in ("max_passes", "long_prefill_token_threshold"):
            _integer(self, name, low=0)
        if self.priority_ageing_s != math.inf:
            _number(self, "priority_ageing_s", low=1e-6, high=1e9)
        _number(self, "itl_target_ms", low=1e-3, high=1e6)
        _number(self, "waiting_served_ratio", low=0.0, high=1e6)
        _number(self, "admission_watermark", low=0.0, high=0.99)
        if self.exact_fill and not self.enable_chunked_prefill:
            raise ConfigError("exact_fill trims chunks, so it needs enable_chunked_prefill", param="exact_fill")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerLimits(SchedulingKnobs):
    """What the scheduler may use.

    Arguments:
        max_num_seqs: sequences in a step.
        max_num_batched_tokens: tokens in a step.
        max_model_len: tokens of a sequence.
        num_kv_pages: usable pages of the device's pool.
        page_size: tokens in a page.
        num_slots: rows of device-side state; at least ``max_num_seqs``. More, so that a new sequence need not wait for
            the slot of one whose last step is still in flight.
        enable_prefix_caching: reuse the pages of equal beginnings.
        num_host_pages: pages of host memory, for swapped sequences and for prefixes that the device had no room for.
        host_page_s: seconds to move one page over the host link, for "auto" preemption, as long as nobody has measured
            it (``Scheduler.set_host_page_s``).
        step_sizes: compiled token counts of steps with prompt chunks, for ``exact_fill``; () if nothing is padded.
        sliding_window: positions that the widest layer looks back on, if every layer has a window: pages behind it are
            given back. None: some layer sees everything.
        cache_name: what the KV depends on besides the tokens (model, adapter, dtype): part of every prefix's identity.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_kv_pages: int
    page_size: int
    num_slots: int
    enable_prefix_caching: bool = True
    num_host_pages: int = 0
    host_page_s: float = 0.0
    step_sizes: tuple[int, ...] = ()
    sliding_window: int | None = None
    cache_name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "num_kv_pages",
            "page_size",
            "num_slots",
            "sliding_window",
        ):
            _integer(self, name, low=1)
        _integer(self, "num_host_pages", low=0)
        if self.num_slots < self.max_num_seqs:
            raise ConfigError(
                f"num_slots ({self.num_slots}) must be at least max_num_seqs ({self.max_num_seqs})", param="num_slots"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_model_len ({self.max_model_len}): a step has to hold the longest sequence",
                param="max_num_batched_tokens",
            )
        if self.reservation == "full" and self.num_kv_pages < -(-self.max_model_len // self.page_size):
            raise ConfigError(
                f"reservation 'full' takes pages for max_model_len ({self.max_model_len}) tokens, the pool has "
                f"{self.num_kv_pages} pages of {self.page_size}",
                param="reservation",
            )

    @property
    def long_prompt(self) -> int:
        """``long_prefill_token_threshold`` with None resolved; no sequence is longer than the value that is off."""
        threshold = self.long_prefill_token_threshold
        if threshold is None:
            threshold = self.max_num_batched_tokens // 2
        return threshold or self.max_num_batched_tokens

    @property
    def chunk_limit(self) -> int:
        return min(self.max_chunk_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    def salt(self, cache_salt: str) -> tuple[str, str]:
        """What KV depends on besides the tokens, for a request with such a salt."""
        return self.cache_name, cache_salt

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)


def knob_values(config: SchedulingKnobs) -> dict[str, Any]:
    """The scheduling knobs of a config, by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(SchedulingKnobs)}


def _one_of(knobs: object, name: str, allowed: Any, *, or_function: str = "") -> None:
    value = getattr(knobs, name)
    if or_function and callable(value):
        return
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(allowed) + (f", or {or_function}" if or_function else "")
        raise ConfigError(f"{name} must be one of {names}, got {validation.shown(value)}", param=name)


def _integer(knobs: object, name: str, *, low: int) -> None:
    value = getattr(knobs, name)
    if value is not None:
        object.__setattr__(knobs, name, validation.integer(name, value, low=low, error=ConfigError))


def _number(knobs: object, name: str, *, low: float, high: float) -> None:
    value = getattr(knobs, name)
    if value is not None:
        object.__setattr__(knobs, name, validation.number(name, value, low=low, high=high, error=ConfigError))
