"""Orders: what a runner has its devices do next, in plain numbers. Plans and sequences stay behind: an order can be
sent to other hosts, whose runners carry it out on the devices that they have of the same engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jaxcb.paging import PageMoves
from jaxcb.sampling import Tier
from jaxcb.step.buckets import Bucket


class ControlRow(NamedTuple):
    """Of the newcomer in a slot."""

    slot: int
    values: Int[np.ndarray, "size"]
    """As of :meth:`ControlLayout.pack`."""


class ProcessorStates(NamedTuple):
    """What the user's logits processors know of the newcomer in a slot."""

    slot: int
    states: list[np.ndarray]
    """Leaves of :func:`jaxcb.step.processors.row_of`."""
    answer: Int[np.ndarray, "L"]
    num_tokens: int
    """Of ``answer``, which it brings along after a preemption."""


class ForwardOrder(NamedTuple):
    """Upload a step, and run its forward."""

    bucket: Bucket
    upload: Int[np.ndarray, "size"]
    changes: list[tuple[int, int]]
    """Of block tables, as of :class:`jaxcb.step.batch.Packed`; they found no room in the upload."""
    moves: PageMoves | None
    """Carried out before it."""
    controls: Sequence[ControlRow] = ()
    processors: Sequence[ProcessorStates] = ()


class RowMasks(NamedTuple):
    """What grammars allow in some rows of a step; the other rows may sample anything."""

    rows: list[int]
    words: Int[np.ndarray, "C W"]
    """Bit i of word w is 0 where id 32 w + i is forbidden."""


class PromptRows(NamedTuple):
    """Tokens of a prompt whose log-probabilities are wanted; R is PROMPT_ROWS, and ``num_tokens`` of them are meant."""

    rows: Int[np.ndarray, "R"]
    """Of the step's hidden states."""
    token_ids: Int[np.ndarray, "R"]
    num_tokens: int
    every: bool
    """Those of every id, not of the likeliest."""


class PooledRows(NamedTuple):
    """Chunks that add to the embeddings of their prompts."""

    token_rows: Int[np.ndarray, "T"]
    """The chunk of each of the step's tokens; S where it belongs to none."""
    last: Int[np.ndarray, "S"]
    """The last token of each chunk."""


class SampleOrder(NamedTuple):
    """Sample the forward that was run last."""

    bucket: Bucket
    tier: Tier
    num_rows: int
    logprobs: list[bool]
    """Which log-probabilities are wanted: False the likeliest ids', True all."""
    masks: RowMasks | None = None
    prompts: Sequence[PromptRows] = ()
    pooled: PooledRows | None = None


class MoveOrder(NamedTuple):
    """Move pages between two steps."""

    moves: PageMoves


class PagesOrder(NamedTuple):
    """Between two steps: of all pages."""

    what: Literal["drop", "take", "measure"]
    """As of :meth:`Runner.drop_pages`, :meth:`Runner.take_pages`, :meth:`Runner.measure_host_page_s`."""


Order = ForwardOrder | SampleOrder | MoveOrder | PagesOrder


@runtime_checkable
class Followers(Protocol):
    """Runners on other hosts."""

    def tell(self, order: Order) -> None:
        """Have each carry out an order; it waits for none."""

    def close(self) -> None:
        """There are no more orders."""


class Nobody:
    """Every device is this process's."""

    def tell(self, order: Order) -> None:
        """Nobody needs to know."""

    def close(self) -> None:
        """Nothing to end."""


NOBODY = Nobody()
