"""Clusters with separate prefill and decode pools: DistServe, Splitwise, Mooncake, around real Schedulers.

A request is computed on a prefill card up to its first token. Its KV then waits there until a decode card has room and
pulls it over the network (DistServe, section 4.3); full pages arrive as pages of the decode card's prefix cache, and
the last, partial page is computed again there, with the second token. Transfers to a card go one after the other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict, deque
from collections.abc import Sequence as Seq

from jaxcb.request import Request
from jaxcb.scheduler import Sequence, StepLoad
from jaxcb.scheduler.handover import has_room
from jaxcb.sim.arrivals import answer_token, exactly, prompt_tokens
from jaxcb.sim.replica import Replica
from jaxcb.sim.result import RequestRecord
from jaxcb.sim.simulator import Simulation
from jaxcb.sim.trace import TraceRequest

STORE_BLOCK_TOKENS = 512
"""Granularity of Mooncake's store (its trace's hash ids stand for as many tokens)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What sending KV costs."""

    bytes_per_token: int
    bandwidth: float
    """Bytes/s into a card."""
    latency_s: float = 1e-3

    def transfer_s(self, num_tokens: int) -> float:
        """Time on the wire of so many positions."""
        return self.latency_s + num_tokens * self.bytes_per_token / self.bandwidth


class Store:
    """KV of prompts in the host memory of the cluster: blocks by the whole prefix up to their end, least recently used
    out first (Mooncake, section 4.1)."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, blocks: Seq[int]) -> int:
        """Tokens of the longest known beginning; what is found counts as used."""
        count = 0
        for block in blocks:
            if block not in self._blocks:
                break
            self._blocks.move_to_end(block)
            count += 1
        return count * STORE_BLOCK_TOKENS

    def put(self, blocks: Seq[int]) -> None:
        """Remember the blocks of a prompt."""
        for block in reversed(blocks):  # the beginning is used last, so that leaves go first
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self.num_blocks:
            self._blocks.popitem(last=False)


class Disaggregated:
    """The placement of such a cluster.

    Arguments:
        num_prefill: the first so many replicas prefill, the others decode.
        network: between the machines.
        store: KV of prompts that any prefill card may fetch; None: each has its own prefix cache only.
        ttft_limit_s: turn a request away if its first token is predicted to come later; None: never.
    """

    def __init__(
        self, num_prefill: int, network: Network, *, store: Store | None = None, ttft_limit_s: float | None = None
    ):
        self._num_prefill, self._network, self._store = num_prefill, network, store
        self._ttft_limit_s = ttft_limit_s
        self._ready: deque[int] = deque()  # prefilled, their KV not yet pulled
        self._link_free_s: dict[int, float] = {}  # decode replica -> end of its last transfer
        self._coming: dict[int, int] = {}  # decode replica -> requests on the wire
        self._coming_pages: dict[int, int] = {}
        self._backlog_s: dict[int, float] = {}  # prefill replica -> work that it was given and has not done
        self._work_s: dict[int, float] = {}  # request -> its part of that

    def arrived(self, simulation: Simulation, number: int, now_s: float) -> None:
        """To the prefill card whose first token is predicted to come first."""
        request, record = simulation.trace[number], simulation.records[number]
        tokens = prompt_tokens(number, request)
        found = self._store.match(store_blocks(number, request)) if self._store is not None else 0
        found = min(found, (len(tokens) - 1) // STORE_BLOCK_TOKENS * STORE_BLOCK_TOKENS)
        fetch_s = self._network.transfer_s(found) if found else 0.0
        prefills = range(self._num_prefill)
        chosen = min(prefills, key=lambda index: self._backlog_s.get(index, 0.0))
        replica = simulation.replicas[chosen]
        work_s = prefill_s(replica, len(tokens), found)
        predicted_s = max(self._backlog_s.get(chosen, 0.0), fetch_s) + work_s + max(replica.now_s - now_s, 0.0)
        if self._ttft_limit_s is not None and predicted_s > self._ttft_limit_s:
            simulation.reject(record, now_s)
            return
        self._backlog_s[chosen] = self._backlog_s.get(chosen, 0.0) + work_s
        self._work_s[number] = work_s
        first = Request(
            request_id=str(number), prompt_token_ids=tokens, sampling=exactly(1), arrival_s=record.arrival_s
        )
        if found:
            simulation.at(
                now_s + fetch_s, functools.partial(self._fetched, simulation, chosen, number, first, tokens[:found])
            )
        else:
            self._prefill(simulation, chosen, number, first, now_s)

    def ended(self, simulation: Simulation, replica: Replica, sequence: Sequence, record: RequestRecord) -> None:
        """A prefill has ended: its KV is ready to be pulled. Or a decode has, and leaves room."""
        index, number = simulation.replicas.index(replica), record.number
        if index < self._num_prefill:
            self._backlog_s[index] -= self._work_s.pop(number)
            if self._store is not None:
                self._store.put(store_blocks(number, simulation.trace[number]))
            if simulation.trace[number].num_output_tokens == 1:
                simulation.finished(record, replica.now_s)
            else:
                self._ready.append(number)
        else:
            simulation.finished(record, replica.now_s)
        # Not at once: the scheduler is in the middle of its commit, and other replicas may be behind this time.
        simulation.at(replica.now_s, functools.partial(self._pull, simulation))

    def _fetched(
        self, simulation: Simulation, index: int, number: int, request: Request, found: list[int], now_s: float
    ) -> None:
        simulation.replicas[index].scheduler.prefixes.place(found)
        self._prefill(simulation, index, number, request, now_s)

    def _prefill(self, simulation: Simulation, index: int, number: int, request: Request, now_s: float) -> None:
        replica = simulation.replicas[index]
        simulation.submit(replica, number, now_s, request)
        if simulation.records[number].refused:
            self._backlog_s[index] -= self._work_s.pop(number)

    def _pull(self, simulation: Simulation, now_s: float) -> None:
        """Start transfers, first come first served, while a decode card has room."""
        while self._ready:
            number = self._ready[0]
            request = simulation.trace[number]
            total = request.num_prompt_tokens + 1
            index = self._with_room(simulation, total)
            if index is None:
                return
            self._ready.popleft()
            start_s = max(now_s, self._link_free_s.get(index, 0.0))
            end_s = self._link_free_s[index] = start_s + self._network.transfer_s(request.num_prompt_tokens)
            self._coming[index] = self._coming.get(index, 0) + 1
            pages = simulation.replicas[index].scheduler.limits.num_pages(total)
            self._coming_pages[index] = self._coming_pages.get(index, 0) + pages
            simulation.at(end_s, functools.partial(self._landed, simulation, index, number, pages))

    def _with_room(self, simulation: Simulation, num_tokens: int) -> int | None:
        """The decode card with the fewest requests among those that can take a sequence of ``num_tokens`` now."""
        best, fewest = None, 0
        for index in range(self._num_prefill, len(simulation.replicas)):
            replica, coming = simulation.replicas[index], self._coming.get(index, 0)
            scheduler = replica.scheduler
            limits, num_open = scheduler.limits, replica.num_open + coming
            needed = limits.num_pages(num_tokens) + self._coming_pages.get(index, 0)
            room = has_room(limits, num_open=num_open, num_free_pages=scheduler.pool.num_free, num_pages=needed)
            if room and not scheduler.num_waiting and (best is None or num_open < fewest):
                best, fewest = index, num_open
        return best

    def _landed(self, simulation: Simulation, index: int, number: int, pages: int, now_s: float) -> None:
        """The KV is there: the rest of the answer begins."""
        self._coming[index] -= 1
        self._coming_pages[index] -= pages
        request, record = simulation.trace[number], simulation.records[number]
        replica = simulation.replicas[index]
        tokens = prompt_tokens(number, request)
        replica.scheduler.prefixes.place(tokens)
        rest = Request(
            request_id=str(number),
            prompt_token_ids=[*tokens, answer_token(request)],
            sampling=exactly(request.num_output_tokens - 1),
            arrival_s=record.arrival_s,
        )
        simulation.submit(replica, number, now_s, rest)


def prefill_s(replica: Replica, num_tokens: int, num_found: int) -> float:
    """Time of a prompt on a prefill card, all its chunks together."""
    budget = replica.scheduler.limits.max_num_batched_tokens
    total, start = 0.0, num_found
    while start < num_tokens:
        chunk = min(budget, num_tokens - start)
        total += replica.step_time.step_s(StepLoad(chunk, start + chunk, chunk * (2 * start + chunk + 1) // 2))
        start += chunk
    return total


def store_blocks(number: int, request: TraceRequest) -> list[int]:
    """Keys of a prompt's full blocks: each stands for everything up to its end."""
    keys, key = [], 0
    tokens = prompt_tokens(number, request)
    for start in range(0, len(tokens) - STORE_BLOCK_TOKENS + 1, STORE_BLOCK_TOKENS):
        key = hash((key, *tokens[start : start + STORE_BLOCK_TOKENS]))
        keys.append(key)
    return keys
