"""SequenceMemory: which pages and which slot a sequence has. It alone takes them and gives them back.

Pages and slots that a planned step names stay owned until that step has committed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from jaxcb.paging import TRASH_PAGE, Match, PrefixCache, pack_tokens
from jaxcb.paging.prefix import TOKEN_BYTES
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.sequence import Sequence

NEVER = 2**62
"""As ``num_registered_pages``: no page of this sequence becomes known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """What a waiting sequence would start from if it were admitted now."""

    shared: list[int]
    """Pages to refer to, as :class:`Match` has them."""
    match: Match
    """The part of ``shared`` that the prefix cache knows."""
    copy_of: int
    """Device page whose first positions are copied into the next page; 0 if none."""
    num_behind_window: int
    """Pages after ``shared`` that are left out, since nothing looks at them any more."""
    host_pages: Seq[int]
    """The sequence's swapped pages that follow."""
    num_computed: int
    """Positions whose KV that gives."""
    num_new: int
    """Pages to allocate for all its tokens and one more, or for ``max_model_len`` with reservation "full"."""
    num_free_needed: int
    """Free pages that all of it uses up."""


class SequenceMemory:
    """Pages and slots of an engine's sequences."""

    def __init__(self, limits: SchedulerLimits):
        self.limits = limits
        self.cache = PrefixCache(
            limits.num_kv_pages,
            limits.page_size,
            enabled=limits.enable_prefix_caching,
            num_host_pages=limits.num_host_pages,
        )
        self.pool, self.host = self.cache.pool, self.cache.host
        self.free_slots = list(reversed(range(limits.num_slots)))
        self.last_planned = self.last_committed = -1
        self.last_given_back = -1
        """Step that was planned last when a sequence gave its pages back: rows up to that one may be late."""
        self.num_swapped = 0
        """Waiting sequences whose KV lies in host memory."""
        self.num_deferred_pages = 0
        """Pages that come back when a step in flight commits."""
        self.reserved: dict[Sequence, None] = {}
        """Sequences that have pages and a slot for KV that comes from another engine, in the order of their asking."""
        self.lent: dict[str, list[int]] = {}
        """Pages that another engine is taking the content of, by request; each has a reference of its own."""
        self._deferred: dict[int, list[tuple[list[int], int]]] = {}  # step -> pages and slots (-1: none) to free then

    # ------------------------------------------------------------------ at admission

    def start_of(self, sequence: Sequence) -> Start:
        """Where the sequence can start from: its parent's pages, its own in host memory, or the prefix cache."""
        size = self.limits.page_size
        num_tokens = len(sequence.token_ids)
        root = self.cache.root(sequence.salt)
        reusable = num_tokens - 1
        if sequence.request.num_reusable < sequence.num_prompt_tokens:  # what is asked of the rest has to be computed
            reusable = min(reusable, sequence.request.num_reusable)
        match = self.cache.match(root, sequence.packed, reusable)
        shared, copy_of, behind = match.pages, 0, 0
        host_pages: Seq[int] = ()
        num_computed = len(shared) * size
        parent = sequence.parent
        if sequence.num_swapped:
            behind = sequence.host_pages.count(TRASH_PAGE)
            on_device = 0 if behind else sequence.num_swapped
            match = self.cache.match(root, sequence.packed, on_device, on_device=True)
            shared, host_pages = match.pages, sequence.host_pages[len(match.pages) + behind :]
            num_computed = sequence.num_swapped
        elif parent is not None and parent.root == root and not parent.num_behind_window:
            common = min(_common_length(sequence.packed, parent.packed), parent.num_computed, reusable)
            if common > num_computed:
                full = common // size
                shared = [*match.pages, *parent.pages[len(match.pages) : full]]
                copy_of = parent.pages[full] if common % size else 0
                num_computed = common
        num_new = self.pages_at_start(num_tokens) - len(shared) - behind
        num_free_needed = num_new + self.cache.num_to_take(shared)
        return Start(shared, match, copy_of, behind, host_pages, num_computed, num_new, num_free_needed)

    def admit(self, sequence: Sequence, start: Start) -> None:
        """Give the sequence its pages and a slot. The caller has checked that they are free."""
        pages = self.cache.take(start.shared)
        new = self.pool.allocate(start.num_new)
        moves = self.cache.moves
        if start.copy_of:
            sources = {copy: source for source, copy in moves.copies}  # a parent admitted in this very plan has a copy
            moves.copies.append((sources.get(start.copy_of, start.copy_of), new[0]))
        moves.into += zip(start.host_pages, new, strict=False)
        self.forget_swapped(sequence)
        sequence.pages = pages + [TRASH_PAGE] * start.num_behind_window + new
        sequence.slot = self.free_slots.pop()
        sequence.num_behind_window = start.num_behind_window
        self._know_beginning(sequence, start.match)
        self._start(sequence, start.num_computed)

    def pages_at_start(self, num_tokens: int) -> int:
        """Pages of a sequence that starts with so many tokens, one more included."""
        limits = self.limits
        if limits.reservation == "full":
            return limits.num_pages(limits.max_model_len)
        return num_tokens // limits.page_size + 1

    def pages_to_come(self, sequence: Sequence) -> int:
        """Pages that a sequence which has some may still take."""
        return self.limits.num_pages(sequence.max_total_tokens) - len(sequence.pages)

    def _know_beginning(self, sequence: Sequence, match: Match) -> None:
        sequence.root = self.cache.root(sequence.salt)
        sequence.num_registered_pages, sequence.prefix_node = len(match.pages), match.node
        if sequence.num_behind_window or not self.cache.enabled:
            sequence.num_registered_pages = NEVER  # the beginning is gone, so nobody could find what follows

    def _start(self, sequence: Sequence, num_computed: int) -> None:
        """Its pages are there, with the KV of so many positions."""
        sequence.capacity = len(sequence.pages) * self.limits.page_size
        sequence.pause_at = min(sequence.capacity, sequence.max_total_tokens - 1)
        sequence.num_prefilled = sequence.num_scheduled = num_computed
        sequence.num_at_admission = len(sequence.token_ids)

    # ------------------------------------------------------------------ KV that comes from, or goes to, another engine

    def reserve(self, sequence: Sequence, match: Match, num_new: int) -> None:
        """Pages and a slot for a sequence that isn't admitted yet. The caller has checked that they are free."""
        sequence.pages = self.cache.take(match.pages) + self.pool.allocate(num_new)
        sequence.slot = self.free_slots.pop()
        self._know_beginning(sequence, match)
        self.reserved[sequence] = None

    def seat(self, sequence: Sequence) -> None:
        """The KV of its whole prompt is in the reserved pages, and its first token is known: it runs with them."""
        del self.reserved[sequence]
        sequence.is_new = True
        self._start(sequence, sequence.num_prompt_tokens)

    def release_reserved(self, sequence: Sequence) -> None:
        """A reservation comes to nothing."""
        del self.reserved[sequence]
        self.give_back(sequence)

    def lend(self, request_id: str, pages: Iterable[int]) -> None:
        """Hold on to pages, also when their sequence has left, until :meth:`returned`."""
        held = self.lent.setdefault(request_id, [])
        for page in pages:
            self.pool.retain(page)
            held.append(page)

    def returned(self, request_id: str) -> None:
        """Another engine has, or never wants, what was lent to it for this request. Harmless if that was nothing."""
        self.pool.release(reversed(self.lent.pop(request_id, [])))

    # ------------------------------------------------------------------ while it runs

    def grow(self, sequence: Sequence) -> int:
        """One more page, which the caller has checked is free."""
        page = self.pool.allocate_one()
        sequence.pages.append(page)
        capacity, last = sequence.capacity + self.limits.page_size, sequence.max_total_tokens - 1
        sequence.capacity = capacity
        sequence.pause_at = capacity if capacity < last else last
        return page

    def settle(self, sequence: Sequence) -> None:
        """Share the pages that are full and computed, give back what nobody looks at any more, and say when to look
        again."""
        limits = self.limits
        num_full = sequence.num_computed // limits.page_size
        if sequence.num_registered_pages < num_full:
            self._register_pages(sequence, num_full)
        if limits.sliding_window is not None:
            self._return_behind_window(sequence, limits.sliding_window)
        last = sequence.max_total_tokens
        if sequence.num_registered_pages is NEVER and limits.sliding_window is None:
            sequence.look_at = last
        else:
            next_full = (num_full + 1) * limits.page_size + 1
            sequence.look_at = next_full if next_full < last else last

    def _register_pages(self, sequence: Sequence, end: int) -> None:
        """Make the pages before index ``end``, which are full and computed, known to the prefix cache."""
        size, first, node = self.limits.page_size, sequence.num_registered_pages, sequence.prefix_node
        for index in range(first, end):
            page, tokens = sequence.pages[index], pack_tokens(sequence.token_ids[index * size : (index + 1) * size])
            node, known = self.cache.register(node, tokens, page)
            if known != page:
                sequence.twins[index] = known
        sequence.prefix_node, sequence.num_registered_pages = node, end

    def _return_behind_window(self, sequence: Sequence, window: int) -> None:
        """Later positions look at ``window`` positions, their own included. Steps in flight are later too."""
        first, end = sequence.num_behind_window, (sequence.num_computed - window + 1) // self.limits.page_size
        if end > first:
            behind = range(first, end)
            self.pool.release(_leaves_first(sequence, behind))
            for index in behind:
                sequence.pages[index] = TRASH_PAGE
                sequence.twins.pop(index, None)
            sequence.num_behind_window = end

    # ------------------------------------------------------------------ when it leaves

    def swap_out(self, sequence: Sequence) -> None:
        """Plan the move of a running sequence's KV to host memory, and give its pages and slot back."""
        used = sequence.pages[: self.limits.num_pages(sequence.num_scheduled)]
        taken = iter(self.host.allocate(len(used) - sequence.num_behind_window))
        sequence.host_pages = [next(taken) if page != TRASH_PAGE else 0 for page in used]
        self.cache.moves.out += [pair for pair in zip(used, sequence.host_pages, strict=True) if pair[1]]
        sequence.num_swapped = sequence.num_scheduled
        self.num_swapped += 1
        self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Free pages and slot, or leave it to the commit of the newest step, which may name them."""
        pages, slot = _leaves_first(sequence, range(len(sequence.pages))), sequence.slot
        sequence.pages, sequence.slot, sequence.capacity = [], -1, 0
        sequence.num_scheduled = sequence.num_prefilled = sequence.num_registered_pages = 0
        sequence.num_behind_window, sequence.root = 0, None
        sequence.twins = {}
        sequence.decoding = sequence.is_new = False
        sequence.look_at = 0
        sequence.last_step, sequence.valid_from = self.last_planned, self.last_planned + 1
        self.last_given_back = self.last_planned
        if self.last_planned > self.last_committed:
            self._deferred.setdefault(self.last_planned, []).append((pages, slot))
            self.num_deferred_pages += len(pages)
        else:
            self._free(pages, slot)

    def forget_swapped(self, sequence: Sequence) -> None:
        """What a sequence has in host memory, if anything, is needed no more."""
        if sequence.num_swapped:
            self.host.free(page for page in sequence.host_pages if page)
            sequence.host_pages, sequence.num_swapped = (), 0
            self.num_swapped -= 1

    def committed(self, step: int) -> None:
        """A step has committed: what only it held back is free."""
        self.last_committed = step
        for pages, slot in self._deferred.pop(step, ()):
            self.num_deferred_pages -= len(pages)
            self._free(pages, slot)

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every reference to a page, every host page and every slot is accounted for.
        ``running``: those with pages and slots, reserved ones included."""
        running = list(running)
        self.cache.check()
        references = [0] * (self.pool.num_pages + 1)
        deferred = [entry for entries in self._deferred.values() for entry in entries]
        tables = [_leaves_first(sequence, range(len(sequence.pages))) for sequence in running]
        tables += [pages for pages, _ in deferred]
        for pages in [*tables, self.cache.pinned_pages, *self.lent.values()]:
            for page in pages:
                references[page] += 1
        for page in range(1, self.pool.num_pages + 1):
            assert references[page] == self.pool.refcount(page), f"page {page}: {references[page]} tables name it"
        assert self.num_deferred_pages == sum(len(pages) for pages, _ in deferred)
        slots = [sequence.slot for sequence in running] + [slot for _, slot in deferred]
        assert sorted(slots + self.free_slots) == list(range(self.limits.num_slots)), "a slot is lost or shared"
        waiting = list(waiting)
        assert self.num_swapped == sum(sequence.num_swapped > 0 for sequence in waiting)
        swapped = [page for sequence in waiting for page in sequence.host_pages if page]
        assert len(set(swapped)) == len(swapped), "a host page holds two things"
        assert len(swapped) + self.host.num_freed == self.host.num_used, "a host page is lost"

    def _free(self, pages: list[int], slot: int) -> None:
        self.pool.release(pages)
        self.free_slots.append(slot)


def _leaves_first(sequence: Sequence, indices: range) -> list[int]:
    """What the sequence refers to at these indices, in the order in which the prefix cache wants it back."""
    if not sequence.twins:
        pages = sequence.pages[indices.start : indices.stop]
        pages.reverse()
        return pages[: -sequence.num_behind_window or None] if indices.start == 0 else pages
    pages = []
    for index in reversed(indices):
        page = sequence.pages[index]
        if page != TRASH_PAGE:
            pages.append(page)
        if index in sequence.twins:
            pages.append(sequence.twins[index])
    return pages


def _common_length(a: bytes, b: bytes) -> int:
    """Tokens with which two packed lists both begin."""
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
