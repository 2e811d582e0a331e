"""Sequence: the scheduler's view of one request. Three counters that are never mixed:

    committed  len(token_ids)   tokens that the host knows: the prompt and what was sampled and committed
    computed   num_computed     positions whose KV is in the pages for certain (their step was committed)
    scheduled  num_scheduled    positions whose KV is in the pages or is being written by a step in flight

A step takes a sequence from ``num_scheduled`` towards its last token. While more than one position is left, or the
tokens were not computed in the slot that it has now, steps take chunks. The chunk that reaches the last token samples
the next one, and from then on the sequence is ``decoding``: one position a step, from the token that the device has in
the slot, known to the host or not.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import Any

from jaxcb.paging import Node, pack_tokens
from jaxcb.paging.prefix import TOKEN_BYTES
from jaxcb.request import FinishReason, Request


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    token_ids: list[int]
    max_total_tokens: int
    """Prompt and answer together end here (``max_tokens`` or the context limit)."""
    end_ids: frozenset[int]
    """Ids that end the sequence once ``min_tokens`` were generated."""
    salt: Hashable = ""
    """What the KV depends on besides the tokens."""
    num_prompt_tokens: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None

    foreseen: Seq[int] = ()
    """Tokens that come after ``token_ids`` for certain: a grammar forces them. The first may be in flight."""

    num_scheduled: int = 0
    num_prefilled: int = 0
    """``num_computed`` before the first token since its admission is committed."""
    num_at_admission: int = 0
    """Committed tokens when it was admitted."""
    decoding: bool = False
    pause_at: int = 0
    """Position at which a decode can't just go on: it needs a page, or its last token is in flight."""
    look_at: int = 0
    """Committed tokens at which a decode's commit has more to do: a page is full, or the sequence is at its end."""
    valid_from: int = 0
    """First step whose results are its own: it gave its pages back after earlier ones were planned."""
    last_step: int = -1
    """When it last gave its pages back, the newest step then: the last that can name it."""

    is_new: bool = False
    """It was adopted, and the device has none of its pages in its block table."""
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    """The block table: page of positions [i * page_size, (i + 1) * page_size) at index i. The trash page stands for
    pages behind the sliding window that were given back."""
    capacity: int = 0
    """Positions that ``pages`` hold: len(pages) * page_size."""
    num_behind_window: int = 0
    """Pages given back."""
    num_registered_pages: int = 0
    root: Node = None
    """The prefix cache's root from which it started when it was admitted."""
    prefix_node: Node = None
    twins: dict[int, int] = dataclasses.field(default_factory=dict)
    """Index -> another page with the same tokens that the prefix cache knows instead of ours, and that we refer to."""
    host_pages: Seq[int] = ()
    """Where its pages lie while it is swapped out, 0 for those behind the window."""
    num_swapped: int = 0
    """Positions whose KV lies there."""

    parent: Sequence | None = None
    """A fork starts from this sequence's pages if it still runs when the fork is admitted."""
    followers: Seq[Sequence] = ()
    """Forks that join the queue when this sequence's prompt is computed."""

    ticket: int = 0
    """Order of arrival."""
    rank: tuple[Any, ...] = ()
    """What the waiting queue is sorted by; set while in the queue and kept afterwards."""
    not_fitting: tuple[int, int] = (-1, 0)
    """Free pages, and the number of the plan, when its admission was last tried in vain."""
    known_beginning: tuple[int, int] = (-1, 0)
    """A version of the prefix cache, and the tokens that it would have given then."""
    num_overtaken: int = 0
    """Later requests admitted while this one was the oldest, or stood at the head and didn't fit."""
    start_of_turn: float | None = None
    """Its tenant's virtual time, under the fair policy."""

    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave at the first admission."""
    num_preemptions: int = 0
    admitted_once: bool = False
    _packed: bytes = b""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_computed(self) -> int:
        num_tokens = len(self.token_ids)
        return num_tokens - 1 if num_tokens > self.num_at_admission else self.num_prefilled

    @property
    def num_remaining(self) -> int:
        """Positions that wait for a chunk."""
        return 0 if self.decoding else len(self.token_ids) - self.num_scheduled

    @property
    def num_generated(self) -> int:
        """Committed tokens of the answer."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def packed(self) -> bytes:
        """``token_ids`` as the prefix cache wants them; packed once as long as nothing is committed."""
        if len(self._packed) != TOKEN_BYTES * len(self.token_ids):
            self._packed = pack_tokens(self.token_ids)
        return self._packed
