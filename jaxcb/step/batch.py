"""StepBatch: a step as the device sees it, and the one int32 array that it is uploaded in.

Worked example, bucket (T 8, S 4), page_size 2, the plan of ``jaxcb.scheduler.plan``; slot 9 is the trash slot:

    token_ids     -1 11 12 13 | 0 0 0 0      -1: what slot 5 sampled last step
    positions      7  4  5  6 | 0 0 0 0
    token_rows     0  1  1  1 | 3 3 3 3      row of each token; padding belongs to the last row, and is masked
    query_starts   0  1  4  4  4             [S + 1]
    context_lens   8  7  0  0                0 marks a padding row
    slots          5  2  9  9
    sample_slots   5  2  9  9                where the sampled token goes; the trash slot if none is
    table_changes  (2*P+2, 8) (2*P+3, 2)     flat index into block_tables [slots, P], page; padding: trash slot

Floats and the two halves of a 64-bit seed travel as their bits.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Int

from jaxcb.devices import on_device
from jaxcb.logits_processor import LogitsProcessor
from jaxcb.sampling import Controls, Draws
from jaxcb.sampling_params import MAX_FORBIDDEN_IDS
from jaxcb.scheduler import StepPlan
from jaxcb.scheduler.plan import IN_FLIGHT
from jaxcb.step.buckets import Bucket
from jaxcb.step.controls import ControlLayout
from jaxcb.step.owners import DRAW_COLUMNS, SlotOwners
from jaxcb.step.processors import ProcessorRows, at_rest

CHANGES_PER_UPLOAD = 512
"""Block-table changes that a large upload carries; more of them (long prefix hits) take uploads of their own."""


_COLUMNS = 2 + DRAW_COLUMNS
"""Of the sampler's part of an upload, before the forbidden ids."""
_ONE = int(np.float32(1).view(np.int32))


class StepBatch(NamedTuple):
    """The parts that the forward reads. T tokens, S rows, C block-table changes."""

    token_ids: Int[Array, "T"]
    positions: Int[Array, "T"]
    token_rows: Int[Array, "T"]
    query_starts: Int[Array, "S_plus_1"]
    context_lens: Int[Array, "S"]
    slots: Int[Array, "S"]
    change_index: Int[Array, "C"]
    change_page: Int[Array, "C"]


class Packed(NamedTuple):
    """A step, ready to be uploaded."""

    upload: Int[np.ndarray, "size"]
    """Fresh: never reused, since the device may read it in place."""
    overflow: list[tuple[int, int]]
    """Block-table changes (flat index, page) that found no room in it, to be uploaded before it."""
    sampling_slots: Int[np.ndarray, "n"]
    """Of the rows that sample."""
    tokens_until_free: int
    """After so many more tokens of every row, one that lacks ``min_tokens`` now may end."""
    num_changes: int
    """Block-table changes in the upload."""


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """Where each part of a bucket's upload lies. ``table_width`` is P, ``num_slots`` the number of the trash slot."""

    bucket: Bucket
    table_width: int
    num_slots: int

    @functools.cached_property
    def num_changes(self) -> int:
        return min(CHANGES_PER_UPLOAD, 2 * self.bucket.num_tokens + 8)

    @property
    def _forward_sizes(self) -> tuple[int, ...]:
        T, S, C = self.bucket.num_tokens, self.bucket.num_seqs, self.num_changes
        return (T, T, T, S + 1, S, S, C, C)

    @functools.cached_property
    def _forward_parts(self) -> list[slice]:
        ends = list(itertools.accumulate(self._forward_sizes))
        return [slice(end - size, end) for end, size in zip(ends, self._forward_sizes, strict=True)]

    @functools.cached_property
    def sample_start(self) -> int:
        return sum(self._forward_sizes)

    @functools.cached_property
    def size(self) -> int:
        """int32 values in the upload."""
        return self.sample_start + sample_size(self.bucket.num_seqs)

    def pack(self, plan: StepPlan, owners: SlotOwners) -> Packed:
        """Build the upload of a plan. ``owners`` knows those who entered with it."""
        upload = self._blank.copy()
        parts = [upload[part] for part in self._forward_parts]
        token_ids, positions, token_rows, starts, contexts, slots, _, _ = parts
        count, used = plan.num_rows, plan.num_tokens
        starts[count + 1 :] = used
        token_ids[:used] = IN_FLIGHT
        sampling: slice | np.ndarray
        if goes_on(plan):
            sampling = slice(count)
            starts[1 : count + 1] = self._ordinals[1 : count + 1]
            token_rows[:count] = self._ordinals[:count]
            positions[:count] = plan.starts
            contexts[:count] = positions[:count] + 1
            slots[:count] = plan.slots
        else:
            sampling = np.flatnonzero(_pack_rows(plan, parts))
        num_changes, overflow = self._pack_changes(plan, upload)
        table = self._sampling_table(upload)
        sampling_slots, sampling_contexts = slots[sampling], contexts[sampling]
        table[sampling, 0], table[sampling, 1] = sampling_slots, sampling_contexts
        table[sampling, 2:_COLUMNS] = owners.draws[sampling_slots]
        held_back, tokens_until_free = owners.held_back(sampling_slots, sampling_contexts)
        for index in held_back:
            ids = owners.end_ids[sampling_slots[index]]
            table[index if isinstance(sampling, slice) else sampling[index], _COLUMNS : _COLUMNS + len(ids)] = ids
        return Packed(upload, overflow, sampling_slots, tokens_until_free, num_changes)

    def pack_next(self, last: Packed, plan: StepPlan, one_further: Int[np.ndarray, "size"]) -> Packed:
        """:meth:`pack` of the step after ``last``, where both have the same rows and go on (:func:`goes_on`), and no
        row gets free to end. ``one_further``: :meth:`one_further` of so many rows."""
        upload = last.upload + one_further
        if last.num_changes:
            *_, index_part, page_part = self._forward_parts
            upload[index_part][: last.num_changes] = self.num_slots * self.table_width
            upload[page_part][: last.num_changes] = 0
        num_changes, overflow = self._pack_changes(plan, upload)
        return Packed(upload, overflow, last.sampling_slots, last.tokens_until_free - 1, num_changes)

    def one_further(self, num_rows: int) -> Int[np.ndarray, "size"]:
        """What a token more of each row adds to an upload."""
        more = np.zeros(self.size, np.int32)
        _, positions, _, _, contexts, *_ = self._forward_parts
        more[positions][:num_rows] = more[contexts][:num_rows] = self._sampling_table(more)[:num_rows, 1] = 1
        return more

    def _pack_changes(self, plan: StepPlan, upload: Int[np.ndarray, "size"]) -> tuple[int, list[tuple[int, int]]]:
        """Block-table changes into an upload that has none: how many, and those that found no room."""
        if not plan.others and not plan.chunks:
            return 0, []
        changes = [
            (row.slot * self.table_width + row.first_new_page + i, page)
            for row in (*plan.others.values(), *plan.chunks)
            for i, page in enumerate(row.new_pages)
        ]
        kept, overflow = changes[: self.num_changes], changes[self.num_changes :]
        if kept:
            *_, index_part, page_part = self._forward_parts
            upload[index_part][: len(kept)], upload[page_part][: len(kept)] = np.asarray(kept, np.int32).T
        return len(kept), overflow

    def _sampling_table(self, upload: Int[np.ndarray, "size"]) -> Int[np.ndarray, "S columns"]:
        return upload[self.sample_start :].reshape(self.bucket.num_seqs, _COLUMNS + MAX_FORBIDDEN_IDS)

    @functools.cached_property
    def _ordinals(self) -> np.ndarray:
        return np.arange(self.bucket.num_seqs + 1, dtype=np.int32)

    @functools.cached_property
    def _blank(self) -> np.ndarray:
        """An upload of padding."""
        upload = np.zeros(self.size, np.int32)
        _, _, token_rows, _, _, slots, change_index, _ = [upload[part] for part in self._forward_parts]
        token_rows[:] = self.bucket.num_seqs - 1
        slots[:] = self.num_slots
        change_index[:] = self.num_slots * self.table_width
        table = self._sampling_table(upload)
        table[:, 0] = self.num_slots
        table[:, 3] = _ONE  # top_p
        table[:, _COLUMNS:] = -1
        return upload

    def unpack(self, upload: Int[Array, "size"]) -> StepBatch:
        return StepBatch(*[upload[part] for part in self._forward_parts])

    def sample_part(self, upload: Int[Array, "size"]) -> Int[Array, "sample_size"]:
        return upload[self.sample_start :]


def sample_size(num_seqs: int) -> int:
    """int32 values of the sampler's part of an upload: rows of [sample_slot, position, temperature, top_p, min_p,
    top_k, seed low, seed high, forbidden ids...]."""
    return num_seqs * (_COLUMNS + MAX_FORBIDDEN_IDS)


def goes_on(plan: StepPlan) -> bool:
    """Whether every row has one token, which the device has sampled, and samples the next: none is a newcomer's."""
    return plan.decode_only and all(
        row.samples and len(row.token_ids) == 1 and row.token_ids[0] == IN_FLIGHT for row in plan.others.values()
    )


def _pack_rows(plan: StepPlan, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of any kind into the forward's parts of an upload, all but their pages; which of them sample."""
    token_ids, positions, token_rows, starts, contexts, slots, _, _ = parts
    others, chunks, num_decodes, count = plan.others, plan.chunks, plan.num_decodes, plan.num_rows
    used = plan.num_tokens
    lengths, samples = np.ones(count, np.int32), np.ones(count, bool)
    for index, row in others.items():
        lengths[index], samples[index] = row.num_tokens, row.samples
    lengths[num_decodes:] = [row.num_tokens for row in chunks]
    samples[num_decodes:] = [row.samples for row in chunks]
    first = np.array([*plan.starts, *[row.start for row in chunks]], np.int32)
    starts[1 : count + 1] = np.cumsum(lengths)
    for index, row in (*others.items(), *enumerate(chunks, num_decodes)):
        token_ids[starts[index] : starts[index + 1]] = row.token_ids
    token_rows[:used] = np.repeat(np.arange(count, dtype=np.int32), lengths)
    contexts[:count] = first + lengths
    positions[:used] = np.arange(used, dtype=np.int32) + np.repeat(first - starts[:count], lengths)
    slots[:count] = [*plan.slots, *[row.slot for row in chunks]]
    return samples


def unpack_sampling(part: Int[Array, "sample_size"], num_seqs: int) -> tuple[Int[Array, "S"], Draws]:
    """Slots that the sampled tokens go to (the trash slot where none is sampled), and how each row draws."""
    table = part.reshape(num_seqs, _COLUMNS + MAX_FORBIDDEN_IDS)
    floats = lax.bitcast_convert_type(table[:, 2:5], jnp.float32)
    draws = Draws(
        positions=table[:, 1],
        temperature=floats[:, 0],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        top_k=table[:, 5],
        seeds=lax.bitcast_convert_type(table[:, 6:8], jnp.uint32),
        forbidden=table[:, _COLUMNS:],
    )
    return table[:, 0], draws


class SlotState(NamedTuple):
    """Device-side rows of the running sequences; the last slot is the trash slot. Donated into every step."""

    last_token: Int[Array, "slot_rows"]
    block_tables: Int[Array, "slot_rows P"]
    controls: Controls
    """Of meaning only where the slot's owner asks for them."""
    processors: tuple[ProcessorRows, ...] = ()
    """Of each logits processor."""

    @property
    def bare(self) -> SlotState:
        """What most programs take: handing over an array costs the host some microseconds, and controls are many."""
        return SlotState(self.last_token, self.block_tables, ())  # type: ignore[arg-type]  # they don't look at them

    def after(self, result: SlotState) -> SlotState:
        """This state once a program has returned ``result`` for it, or for its bare part."""
        controls, processors = result.controls or self.controls, result.processors or self.processors
        return SlotState(result.last_token, result.block_tables, controls, processors)

    @staticmethod
    def at_rest(
        num_slots: int,
        table_width: int,
        controls: ControlLayout,
        processors: Sequence[LogitsProcessor] = (),
        sharding: Sharding | None = None,
    ) -> SlotState:
        """Of slots that nobody owns."""
        return SlotState(
            last_token=on_device(np.zeros(num_slots + 1, np.int32), sharding),
            block_tables=on_device(np.zeros((num_slots + 1, table_width), np.int32), sharding),
            controls=controls.at_rest(num_slots + 1, sharding),
            processors=tuple(at_rest(processor, num_slots + 1, sharding) for processor in processors),
        )


def apply_changes(state: SlotState, index: Int[Array, "C"], page: Int[Array, "C"]) -> SlotState:
    """Write pages into the block tables at flat indices."""
    flat = state.block_tables.reshape(-1).at[index].set(page, mode="promise_in_bounds")
    return state._replace(block_tables=flat.reshape(state.block_tables.shape))


def set_controls(
    state: SlotState, slot: Int[Array, ""], row: Int[Array, "size"], *, layout: ControlLayout
) -> SlotState:
    """Give a slot the controls of its new owner."""
    values = layout.unpack(row)
    controls = jax.tree.map(lambda all_slots, value: all_slots.at[slot].set(value), state.controls, values)
    return state._replace(controls=controls)
