"""Samplers: the programs that turn a step's logits into tokens and log-probabilities, and when each is needed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array, Float, Int

from jaxcb.devices import WHOLE, Placement, placement_of
from jaxcb.logits_processor import LogitsProcessor
from jaxcb.logprobs import Logprobs
from jaxcb.models import ModelSpec
from jaxcb.models.decoder import Params
from jaxcb.models.parallel import ALONE, TensorParallel, partitions
from jaxcb.sampling import Tier
from jaxcb.sampling.logprobs import RowLogprobs
from jaxcb.sampling_params import SamplingParams
from jaxcb.scheduler import PlanRow, StepPlan
from jaxcb.scheduler.sequence import Sequence
from jaxcb.sizing import PROMPT_ROWS
from jaxcb.step.batch import SlotState, sample_size, set_controls
from jaxcb.step.controls import ControlLayout
from jaxcb.step.jobs import Job
from jaxcb.step.processors import ProcessorRows, enter, row_of
from jaxcb.step.program import (
    ForwardResult,
    Pooled,
    compiler_options,
    mask_logits,
    mask_some_logits,
    pool,
    prompt_logprobs,
    sample_step,
    token_logprobs,
)
from pallas_kernels.metadata import Backend


@dataclasses.dataclass(frozen=True)
class PromptPiece:
    """Log-probabilities of the tokens after prompt position ``first`` and on, on their way to the host."""

    sequence: Sequence
    first: int
    token_ids: list[int]
    values: RowLogprobs

    def wait(self) -> Logprobs:
        count = len(self.token_ids)
        sampling = self.sequence.request.sampling
        return _on_host(self.values, self.token_ids, slice(0, count), sampling.prompt_logprobs)


@dataclasses.dataclass(frozen=True)
class PooledPiece:
    """What a chunk adds to its prompt's embedding, on its way to the host."""

    sequence: Sequence
    first: int
    num_tokens: int
    row: int
    values: Pooled

    def sum(self) -> Float[np.ndarray, "E"]:
        return np.asarray(self.values.sums)[self.row]

    def last(self) -> Float[np.ndarray, "E"]:
        return np.asarray(self.values.last)[self.row].copy()


@dataclasses.dataclass(frozen=True)
class Sampled:
    """A step's results on their way to the host. ``logprobs`` by whether every id was asked for."""

    token_ids: Int[Array, "S"]
    logprobs: Mapping[bool, RowLogprobs]
    prompt: list[PromptPiece]
    pooled: list[PooledPiece]

    def logprobs_of(self, index: int, sampling: SamplingParams, token_id: int) -> Logprobs | None:
        """Those of the token of row ``index``, if its request asks for them."""
        if sampling.logprobs is None:
            return None
        values = self.logprobs[sampling.logprobs < 0]
        return _on_host(values, [token_id], slice(index, index + 1), sampling.logprobs)


class Wanted(NamedTuple):
    """What the rows of a step want of the sampler."""

    tier: Tier
    logprobs: list[bool]
    """As in :class:`Sampled`."""


class RowMasks(NamedTuple):
    """What grammars allow in some rows of a step; the other rows may sample anything."""

    rows: list[int]
    words: Int[np.ndarray, "C W"]
    """Bit i of word w is 0 where id 32 w + i is forbidden."""


MASKED_ROWS = (4, 16, 64)
"""Masks of the rows that have one are uploaded, padded to the next of these, or to all rows."""


class Samplers:
    """One set for each number of rows.

    Arguments:
        spec: of what one device computes.
        logits_dtype: of logits and hidden states.
        processed: log-probabilities are those after every change of the logits, in place of the model's own.
        deterministic: a row's bits don't depend on the other rows.
        processors: the user's, compiled into every tier.
        placement: where logits and state lie: whole on every device.
        parallel: how the head is cut over them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: Backend,
        controls: ControlLayout,
        logits_dtype: Any,
        *,
        processed: bool,
        deterministic: bool,
        processors: Seq[LogitsProcessor] = (),
        placement: Placement | None = None,
        parallel: TensorParallel = ALONE,
    ):
        self._placement = placement_of(None, 1) if placement is None else placement
        self._parallel = parallel
        self._processors = tuple(processors)
        self._processed_slots: set[int] = set()
        self._set_processors: Compiled | None = None
        self._spec, self._backend, self._controls = spec, backend, controls
        self._dtype, self._processed, self._deterministic = logits_dtype, processed, deterministic
        self._mask: dict[tuple[int, int], Compiled] = {}
        self._sample: dict[tuple[int, Tier], Compiled] = {}
        self._logprobs: dict[tuple[int, bool], Compiled] = {}
        self._prompt: dict[tuple[int, bool], Compiled] = {}
        self._pool: dict[int, Compiled] = {}
        self._set_controls: Compiled | None = None
        self._copies = jax.default_backend() != "cpu"  # there the host reads where the device has written
        self._at_rest = controls.pack(None)
        self._controlled_slots: set[int] = set()

    def jobs(
        self, params: Params, state: SlotState, row_counts: Iterable[int], mixed_tokens: Iterable[int]
    ) -> Iterable[Job]:
        """Every program. The arguments are abstract."""
        V, fixed, spread = self._spec.vocab_size, self._deterministic, self._placement.spread
        array = functools.partial(jax.ShapeDtypeStruct, sharding=state.last_token.sharding)
        count, options = array((), jnp.int32), compiler_options(deterministic=fixed, num_devices=self._parallel.size)
        for S in row_counts:
            logits, ids = array((S, V), self._dtype), array((S,), jnp.int32)
            part = array((sample_size(S),), jnp.int32)
            for tier in Tier:
                step = functools.partial(
                    sample_step,
                    tier=tier,
                    keep_logits=self._processed,
                    deterministic=fixed,
                    processors=self._processors,
                )
                program = jax.jit(spread(step), donate_argnums=0, compiler_options=options)
                needed = self._needed(state, tier)
                job = _job(f"sample {tier.name.lower()} {S}", program, (needed, logits, part), self._sample, (S, tier))
                yield job._replace(stored=not self._processors)
            for C in _mask_sizes(S):
                mask = array((C, -(-V // 32)), jnp.int32)
                program = jax.jit(spread(mask_logits if C == S else mask_some_logits), compiler_options=options)
                masked = [] if C == S else [array((C,), jnp.int32)]
                yield _job(f"mask {C} of {S}", program, (logits, *masked, mask), self._mask, (S, C))
            kept = array((S, V), jnp.float32 if self._processed else self._dtype)
            for every in (False, True):
                logprobs = functools.partial(token_logprobs, every=every, deterministic=fixed)
                program = jax.jit(spread(logprobs), compiler_options=options)
                name = _logprobs_name("logprobs", every, S)
                yield _job(name, program, (kept, ids, count), self._logprobs, (S, every))
        for T in mixed_tokens:
            hidden = array((T, self._spec.hidden_size), self._dtype)
            rows = array((PROMPT_ROWS,), jnp.int32)
            program = jax.jit(spread(functools.partial(pool, self._spec)), compiler_options=options)
            pooled = (params["final_norm"]["scale"], hidden, array((T,), jnp.int32), array((S,), jnp.int32))
            yield _job(f"pool {T}", program, pooled, self._pool, T)
            for every in (False, True):
                logprobs = functools.partial(
                    prompt_logprobs,
                    self._spec,
                    self._backend,
                    every=every,
                    deterministic=fixed,
                    parallel=self._parallel,
                )
                program = jax.jit(spread(logprobs, (partitions(params), *[WHOLE] * 4)), compiler_options=options)
                name = _logprobs_name("prompt logprobs", every, T)
                yield _job(name, program, (params, hidden, rows, rows, count), self._prompt, (T, every))
        setter = jax.jit(spread(functools.partial(set_controls, layout=self._controls)), donate_argnums=0)
        slot, row = array((), jnp.int32), array((self._controls.size,), jnp.int32)
        keep = functools.partial(setattr, self, "_set_controls")
        yield Job("set controls", functools.partial(setter.lower, state, slot, row), keep)
        if self._processors:
            enter = jax.jit(spread(functools.partial(_enter, self._processors)), donate_argnums=0)
            one = jax.tree.map(lambda x: array(x.shape[1:], x.dtype), state.processors)
            arguments = (state, slot, one, array((self._controls.max_model_len,), jnp.int32), count)
            keep = functools.partial(setattr, self, "_set_processors")
            yield Job("set processors", functools.partial(enter.lower, *arguments), keep, stored=False)

    def enter(self, state: SlotState, newcomers: Iterable[PlanRow]) -> SlotState:
        """Give the slots of newcomers their controls and the states of logits processors; those of others at rest stay
        as they are."""
        if self._processors:
            newcomers = list(newcomers)
            state = self._enter_processors(state, newcomers)
        for row in newcomers:
            sequence = row.sequence
            if sequence.request.sampling.controlled:
                values = self._controls.pack(sequence.request, sequence.token_ids)
                self._controlled_slots.add(row.slot)
            elif row.slot in self._controlled_slots:
                values = self._at_rest
                self._controlled_slots.remove(row.slot)
            else:
                continue
            assert self._set_controls is not None, "the programs are compiled first"
            state = self._set_controls(state, np.int32(row.slot), values)
        return state

    def _enter_processors(self, state: SlotState, newcomers: Iterable[PlanRow]) -> SlotState:
        for row in newcomers:
            sequence, states = row.sequence, row.sequence.request.processor_states
            asks = any(own is not None for own in states)
            if asks or row.slot in self._processed_slots:
                assert self._set_processors is not None, "the programs are compiled first"
                answer = np.zeros(self._controls.max_model_len, np.int32)
                answer[: sequence.num_generated] = sequence.token_ids[sequence.num_prompt_tokens :]
                entering = row_of(self._processors, states)
                state = self._set_processors(
                    state, np.int32(row.slot), entering, answer, np.int32(sequence.num_generated)
                )
                (self._processed_slots.add if asks else self._processed_slots.discard)(row.slot)
        return state

    def sample(
        self,
        params: Params,
        state: SlotState,
        forward: ForwardResult,
        plan: StepPlan,
        wanted: Wanted,
        masks: RowMasks | None = None,
    ) -> tuple[SlotState, Sampled]:
        """Sample a step's rows, under masks if some are given, and start the copies to the host."""
        logits, hidden = forward.logits, forward.hidden
        S = logits.shape[0]
        sample = self._sample[S, wanted.tier]
        masked = logits if masks is None or not masks.rows else self._masked(logits, masks)
        result, token_ids, drawn_from = sample(self._needed(state, wanted.tier), masked, forward.sample_part)
        state = state.after(result)
        source = logits if drawn_from is None else drawn_from
        num_rows = np.int32(plan.num_rows)
        logprobs = {every: self._logprobs[S, every](source, token_ids, num_rows) for every in wanted.logprobs}
        prompt = [] if hidden is None else list(self._prompt_pieces(params, hidden, plan))
        pooled = [] if hidden is None else self._pooled(params, hidden, plan, S)
        if self._copies:
            values = (token_ids, logprobs, [piece.values for piece in prompt], [piece.values for piece in pooled])
            for array in jax.tree.leaves(values):
                if isinstance(array, jax.Array):
                    array.copy_to_host_async()
        return state, Sampled(token_ids, logprobs, prompt, pooled)

    def _needed(self, state: SlotState, tier: Tier) -> SlotState:
        return state if tier is Tier.FULL or self._processors else state.bare

    def _masked(self, logits: Float[Array, "S V"], masks: RowMasks) -> Float[Array, "S V"]:
        S, count = logits.shape[0], len(masks.rows)
        C = next(size for size in _mask_sizes(S) if size >= count)
        words = np.full((C, masks.words.shape[1]), -1, np.int32)
        if C == S:
            words[masks.rows] = masks.words
            return self._mask[S, C](logits, words)
        rows = np.full(C, S, np.int32)
        words[:count], rows[:count] = masks.words, masks.rows
        return self._mask[S, C](logits, rows, words)

    def _pooled(self, params: Params, hidden: Float[Array, "T E"], plan: StepPlan, S: int) -> list[PooledPiece]:
        """One program for all chunks of a step whose prompts are to be embedded."""
        wanted: list[tuple[PlanRow, int]] = []
        T, offset = hidden.shape[0], plan.num_tokens - sum(row.num_tokens for row in plan.chunks)
        token_rows, last = np.full(T, S, np.int32), np.zeros(S, np.int32)
        for row in plan.chunks:
            count = min(row.num_tokens, row.sequence.num_prompt_tokens - row.start)
            if row.sequence.request.pooling is not None and count > 0:
                token_rows[offset : offset + count] = len(wanted)
                last[len(wanted)] = offset + count - 1
                wanted.append((row, count))
            offset += row.num_tokens
        if not wanted:
            return []
        values = self._pool[T](params["final_norm"]["scale"], hidden, token_rows, last)
        return [PooledPiece(row.sequence, row.start, count, i, values) for i, (row, count) in enumerate(wanted)]

    def _prompt_pieces(self, params: Params, hidden: Float[Array, "T E"], plan: StepPlan) -> Iterable[PromptPiece]:
        offset = plan.num_tokens - sum(row.num_tokens for row in plan.chunks)
        for row in plan.chunks:
            sequence, wanted = row.sequence, row.sequence.request.sampling.prompt_logprobs
            if wanted is not None:
                prompt = sequence.request.prompt_token_ids
                end = min(row.context_len, len(prompt) - 1)  # the hidden state at i tells of the token at i + 1
                for start in range(max(row.start, sequence.request.score_from - 1), end, PROMPT_ROWS):
                    count = min(PROMPT_ROWS, end - start)
                    rows, targets = np.zeros(PROMPT_ROWS, np.int32), np.zeros(PROMPT_ROWS, np.int32)
                    rows[:count] = np.arange(count) + offset + start - row.start
                    token_ids = list(prompt[start + 1 : start + 1 + count])
                    targets[:count] = token_ids
                    program = self._prompt[hidden.shape[0], wanted < 0]
                    values = program(params, hidden, rows, targets, np.int32(count))
                    if wanted < 0:  # those of a whole chunk would fill the device: see sizing.logprobs_bytes
                        values = jax.tree.map(np.asarray, values)
                    yield PromptPiece(sequence, start, token_ids, values)
            offset += row.num_tokens


def _enter(
    processors: Seq[LogitsProcessor],
    state: SlotState,
    slot: Int[Array, ""],
    row: tuple[ProcessorRows, ...],
    answer: Int[Array, "L"],
    num_tokens: Int[Array, ""],
) -> SlotState:
    return state._replace(processors=enter(processors, state.processors, slot, row, answer, num_tokens))


def _on_host(values: RowLogprobs, token_ids: list[int], rows: slice, k: int | None) -> Logprobs:
    chosen, ranks, top = (np.asarray(array)[rows] for array in (values.chosen, values.ranks, values.top))
    if values.top_ids is None:
        top_ids = np.broadcast_to(np.arange(top.shape[1], dtype=np.int32), top.shape)
    else:
        top_ids = np.asarray(values.top_ids)[rows]
    everything = Logprobs(np.asarray(token_ids, np.int32), chosen, ranks, top_ids, top)
    return everything if k is None or k < 0 else everything.limited(k)


def _mask_sizes(num_rows: int) -> list[int]:
    """Numbers of masks that programs over that many rows are compiled for."""
    return [*(size for size in MASKED_ROWS if size < num_rows), num_rows]


def _job(name: str, program: Any, arguments: tuple[Any, ...], kept: dict[Any, Compiled], key: Any) -> Job:
    return Job(name, functools.partial(program.lower, *arguments), functools.partial(kept.__setitem__, key))


def _logprobs_name(kind: str, every: bool, size: int) -> str:
    return f"{kind} {'all' if every else 'top'} {size}"
