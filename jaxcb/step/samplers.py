"""Samplers: the programs that turn a step's logits into tokens and log-probabilities, and when each is needed."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array, Float, Int

from jaxcb.devices import WHOLE, Placement, placement_of
from jaxcb.logits_processor import LogitsProcessor
from jaxcb.models import ModelSpec
from jaxcb.models.parallel import ALONE, TensorParallel, partitions
from jaxcb.models.params import Params
from jaxcb.sampling import Tier
from jaxcb.sampling.logprobs import RowLogprobs
from jaxcb.scheduler import PlanRow
from jaxcb.sizing import PROMPT_ROWS
from jaxcb.step.batch import SlotState, sample_size, set_controls
from jaxcb.step.buckets import Bucket
from jaxcb.step.controls import ControlLayout
from jaxcb.step.jobs import Job
from jaxcb.step.orders import ControlRow, ForwardOrder, ProcessorStates, PromptRows, RowMasks, SampleOrder
from jaxcb.step.processors import ProcessorRows, enter, row_of
from jaxcb.step.program import (
    ForwardResult,
    compiler_options,
    mask_logits,
    mask_some_logits,
    pool,
    prompt_logprobs,
    sample_step,
    token_logprobs,
)
from jaxcb.step.sampled import Values
from pallas_kernels.metadata import Backend

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
                    parallel=self._parallel,
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

    def controls_of(self, newcomers: Iterable[PlanRow]) -> list[ControlRow]:
        """The controls of newcomers; those that ask for nothing have some only where the slot's last owner left any."""
        rows = []
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
            rows.append(ControlRow(row.slot, values))
        return rows

    def processors_of(self, newcomers: Iterable[PlanRow]) -> list[ProcessorStates]:
        """The same of the states of logits processors."""
        entering = []
        for row in newcomers if self._processors else ():
            sequence, states = row.sequence, row.sequence.request.processor_states
            asks = any(own is not None for own in states)
            if asks or row.slot in self._processed_slots:
                answer = np.zeros(self._controls.max_model_len, np.int32)
                answer[: sequence.num_generated] = sequence.token_ids[sequence.num_prompt_tokens :]
                leaves = jax.tree.leaves(row_of(self._processors, states))
                entering.append(ProcessorStates(row.slot, leaves, answer, sequence.num_generated))
                (self._processed_slots.add if asks else self._processed_slots.discard)(row.slot)
        return entering

    def enter(self, state: SlotState, order: ForwardOrder) -> SlotState:
        """Give the slots of newcomers what belongs to them."""
        for slot, leaves, answer, num_tokens in order.processors:
            assert self._set_processors is not None, "the programs are compiled first"
            states = jax.tree.unflatten(jax.tree.structure(row_of(self._processors, ())), leaves)
            state = self._set_processors(state, np.int32(slot), states, answer, np.int32(num_tokens))
        for slot, values in order.controls:
            assert self._set_controls is not None, "the programs are compiled first"
            state = self._set_controls(state, np.int32(slot), values)
        return state

    def sample(
        self, params: Params, state: SlotState, forward: ForwardResult, order: SampleOrder
    ) -> tuple[SlotState, Values]:
        """Sample a step's rows, and start the copies to the host."""
        logits, hidden = forward.logits, forward.hidden
        S, tier = order.bucket.num_seqs, order.tier
        sample = self._sample[S, tier]
        masked = logits if order.masks is None else self._masked(logits, order.masks)
        result, token_ids, drawn_from = sample(self._needed(state, tier), masked, forward.sample_part)
        state = state.after(result)
        source = logits if drawn_from is None else drawn_from
        logprobs = {
            every: self._logprobs[S, every](source, token_ids, np.int32(order.num_rows)) for every in order.logprobs
        }
        prompts = [self._prompt_logprobs(params, hidden, order.bucket, rows) for rows in order.prompts]
        pooled = None
        if order.pooled is not None:
            pooled = self._pool[order.bucket.num_tokens](params["final_norm"]["scale"], hidden, *order.pooled)
        values = Values(token_ids, logprobs, prompts, pooled)
        if self._copies:
            for array in jax.tree.leaves(values):
                if isinstance(array, jax.Array):
                    array.copy_to_host_async()
        return state, values

    def _prompt_logprobs(
        self, params: Params, hidden: Float[Array, "T E"] | None, bucket: Bucket, asked: PromptRows
    ) -> RowLogprobs:
        program = self._prompt[bucket.num_tokens, asked.every]
        values = program(params, hidden, asked.rows, asked.token_ids, np.int32(asked.num_tokens))
        # Those of every id of a whole chunk would fill the device: see sizing.logprobs_bytes.
        return jax.tree.map(np.asarray, values) if asked.every else values

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


def _enter(
    processors: Seq[LogitsProcessor],
    state: SlotState,
    slot: Int[Array, ""],
    row: tuple[ProcessorRows, ...],
    answer: Int[Array, "L"],
    num_tokens: Int[Array, ""],
) -> SlotState:
    return state._replace(processors=enter(processors, state.processors, slot, row, answer, num_tokens))


def _mask_sizes(num_rows: int) -> list[int]:
    """Numbers of masks that programs over that many rows are compiled for."""
    return [*(size for size in MASKED_ROWS if size < num_rows), num_rows]


def _job(name: str, program: Any, arguments: tuple[Any, ...], kept: dict[Any, Compiled], key: Any) -> Job:
    return Job(name, functools.partial(program.lower, *arguments), functools.partial(kept.__setitem__, key))


def _logprobs_name(kind: str, every: bool, size: int) -> str:
    return f"{kind} {'all' if every else 'top'} {size}"
