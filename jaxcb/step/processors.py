"""The user's logits processors on the device: a state for every slot, and what a step makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float, Int

from jaxcb.devices import on_device
from jaxcb.logits_processor import LogitsProcessor


class ProcessorRows(NamedTuple):
    """Of one processor. Rows are slots, or those of a step."""

    active: Bool[Array | np.ndarray, "*S"]
    """The owner is not left alone."""
    states: Any
    """As its ``blank``, with a leading axis."""


def at_rest(processor: LogitsProcessor, num_slots: int, sharding: Sharding | None = None) -> ProcessorRows:
    def repeated(value: Any) -> Array:
        value = np.asarray(value)
        return on_device(np.broadcast_to(value, (num_slots, *value.shape)), sharding)

    return ProcessorRows(on_device(np.zeros(num_slots, bool), sharding), jax.tree.map(repeated, processor.blank))


def row_of(processors: Sequence[LogitsProcessor], states: Sequence[Any]) -> tuple[ProcessorRows, ...]:
    """What a request enters its slot with, on the host. No states: it is left alone by all."""
    given = states or [None] * len(processors)
    return tuple(
        ProcessorRows(
            np.asarray(state is not None), jax.tree.map(np.asarray, processor.blank if state is None else state)
        )
        for processor, state in zip(processors, given, strict=True)
    )


def apply(
    processors: Sequence[LogitsProcessor], logits: Float[Array, "S V"], rows: Sequence[ProcessorRows]
) -> Float[Array, "S V"]:
    """The logits after every processor, each where it is active."""
    for processor, (active, states) in zip(processors, rows, strict=True):
        logits = jnp.where(active[:, None], processor.apply(logits, states).astype(jnp.float32), logits)
    return logits


def update(
    processors: Sequence[LogitsProcessor], rows: Sequence[ProcessorRows], token_ids: Int[Array, "S"]
) -> tuple[ProcessorRows, ...]:
    """The states after a token of each row."""
    return tuple(
        rows_of_one if processor.update is None else _updated(processor, rows_of_one, token_ids)
        for processor, rows_of_one in zip(processors, rows, strict=True)
    )


def _updated(processor: LogitsProcessor, rows: ProcessorRows, token_ids: Int[Array, "S"]) -> ProcessorRows:
    assert processor.update is not None
    new = processor.update(rows.states, token_ids)
    return rows._replace(states=jax.tree.map(lambda old, value: value.astype(old.dtype), rows.states, new))


def enter(
    processors: Sequence[LogitsProcessor],
    all_slots: tuple[ProcessorRows, ...],
    slot: Int[Array, ""],
    row: tuple[ProcessorRows, ...],
    answer: Int[Array, "L"],
    num_tokens: Int[Array, ""],
) -> tuple[ProcessorRows, ...]:
    """Give a slot the states of its new owner, who may bring ``num_tokens`` of an answer: it was preempted."""
    one = jax.tree.map(lambda value: jnp.asarray(value)[None], row)
    one = lax.fori_loop(0, num_tokens, lambda i, rows: update(processors, rows, answer[i][None]), one)
    return jax.tree.map(lambda values, value: values.at[slot].set(value[0]), all_slots, one)
