"""The textbook model of continuous batching, a token-budget scheduler over a pool of KV tokens, and static batching.

It is small on purpose and knows no pages, no run-ahead and no first token: what the real Scheduler is measured against.
The rules of one step:

1. While the pool can't give every decoding sequence one token, preempt the newest: free its KV, make its generated
   tokens part of its prompt, put it back at the front of the queue.
2. Every decoding sequence generates one token.
3. Started prompts go on with what is left of the budget and the pool.
4. Admit from the head of the queue while sequences and budget last and prompt + 1 fits the free pool. The last chunk of
   a prompt yields no token.
5. Finished sequences free their KV.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence as Seq

from jaxcb.scheduler import SchedulerLimits, StepLoad
from jaxcb.sim.result import Result
from jaxcb.sim.step_time import LinearStepTime, StepTime
from jaxcb.sim.trace import TraceRequest, uniform_lengths

NUM_REQUESTS = 2000
NUM_KV_TOKENS = 450_000
MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
MAX_MODEL_LEN = 2000
"""No prompt and answer of the trace are longer; static batching reserves this much for each sequence."""
PAGE_SIZE = 16
"""Of the real Scheduler; the pool is a whole number of such pages."""
STEP_TIME = LinearStepTime()


def reference_trace() -> list[TraceRequest]:
    """2,000 requests, all there at the start: prompts of 50 to 999 tokens, answers of 10 to 999."""
    return [TraceRequest(0.0, prompt, output) for prompt, output in uniform_lengths(NUM_REQUESTS)]


def scheduler_limits() -> SchedulerLimits:
    """The same limits for the real Scheduler."""
    return SchedulerLimits(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        num_kv_pages=NUM_KV_TOKENS // PAGE_SIZE,
        page_size=PAGE_SIZE,
        num_slots=2 * MAX_NUM_SEQS,
        enable_prefix_caching=False,
    )


@dataclasses.dataclass(kw_only=True)
class Totals:
    """What a run took."""

    num_output_tokens: int
    seconds: float = 0.0
    num_steps: int = 0
    num_step_tokens: int = 0
    num_preemptions: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    def add(self, num_tokens: int, step_time: StepTime, num_steps: int = 1) -> None:
        """Add ``num_steps`` equal steps."""
        self.seconds += num_steps * step_time.step_s(StepLoad(num_tokens, 0, 0))
        self.num_steps += num_steps
        self.num_step_tokens += num_steps * num_tokens


def continuous(
    trace: Seq[TraceRequest], step_time: StepTime = STEP_TIME, *, num_kv_tokens: int = NUM_KV_TOKENS
) -> Totals:
    """Run the rules above until nothing is left. A single sequence must fit ``num_kv_tokens``."""
    scheduler = _Scheduler(trace, num_kv_tokens)
    totals = _totals_of(trace)
    while scheduler.waiting or scheduler.running:
        totals.add(scheduler.step(), step_time)
    totals.num_preemptions = scheduler.num_preemptions
    return totals


def static(trace: Seq[TraceRequest], step_time: StepTime = STEP_TIME) -> Totals:
    """Batches of as many requests as fit at full length, one after the other.

    One step computes all prompts of a batch; then come as many steps as its longest output has tokens, and sequences
    that have ended ride along as padding.
    """
    size = NUM_KV_TOKENS // MAX_MODEL_LEN
    totals = _totals_of(trace)
    for first in range(0, len(trace), size):
        batch = trace[first : first + size]
        totals.add(sum(request.num_prompt_tokens for request in batch), step_time)
        totals.add(len(batch), step_time, max(request.num_output_tokens for request in batch))
    return totals


def totals_of(result: Result) -> Totals:
    """The totals of a simulated run."""
    return Totals(
        num_output_tokens=result.num_output_tokens,
        seconds=result.duration_s,
        num_steps=result.num_steps,
        num_step_tokens=result.num_step_tokens,
        num_preemptions=result.num_preemptions,
    )


def explanation(textbook: Totals, in_step: Totals, ahead: Totals) -> str:
    """Why the real Scheduler differs from the textbook, without (``in_step``) and with run-ahead, in one line."""
    fewer_tokens = textbook.num_step_tokens - in_step.num_step_tokens
    return (
        f"The difference: here a prompt's last chunk yields the first token ({fewer_tokens:,} tokens fewer, "
        f"{in_step.num_steps - textbook.num_steps:+} steps); running ahead, an end is known and its place filled "
        f"a step later ({ahead.num_steps - in_step.num_steps:+} steps)."
    )


def _totals_of(trace: Seq[TraceRequest]) -> Totals:
    return Totals(num_output_tokens=sum(request.num_output_tokens for request in trace))


@dataclasses.dataclass(slots=True, eq=False)
class _Sequence:
    prompt: int
    output: int
    prefilled: int = 0
    generated: int = 0

    @property
    def num_kv(self) -> int:
        return self.prefilled + self.generated

    @property
    def decoding(self) -> bool:
        return self.prefilled == self.prompt


class _Scheduler:
    def __init__(self, trace: Seq[TraceRequest], num_kv_tokens: int):
        self.waiting = deque(_Sequence(request.num_prompt_tokens, request.num_output_tokens) for request in trace)
        self.running: list[_Sequence] = []  # oldest admission first
        self.num_free = num_kv_tokens
        self.num_preemptions = 0

    def step(self) -> int:
        """One step; returns its number of tokens."""
        self._reserve()
        num_tokens = self._decode()
        num_tokens = self._continue_prompts(num_tokens)
        num_tokens = self._admit(num_tokens)
        self._retire()
        return num_tokens

    def _reserve(self) -> None:
        while self.num_free < sum(sequence.decoding for sequence in self.running):
            sequence = self.running.pop()
            self.num_free += sequence.num_kv
            self.num_preemptions += 1
            again = _Sequence(sequence.prompt + sequence.generated, sequence.output - sequence.generated)
            self.waiting.appendleft(again)

    def _decode(self) -> int:
        num_tokens = 0
        for sequence in self.running:
            if sequence.decoding:
                sequence.generated += 1
                num_tokens += 1
        self.num_free -= num_tokens
        return num_tokens

    def _continue_prompts(self, num_tokens: int) -> int:
        for sequence in self.running:
            if not sequence.decoding:
                budget = max(MAX_NUM_BATCHED_TOKENS - num_tokens, 0)
                num_tokens += self._prefill(sequence, min(budget, self.num_free))
        return num_tokens

    def _admit(self, num_tokens: int) -> int:
        while self.waiting and len(self.running) < MAX_NUM_SEQS and num_tokens < MAX_NUM_BATCHED_TOKENS:
            if self.waiting[0].prompt + 1 > self.num_free:
                break
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            num_tokens += self._prefill(sequence, MAX_NUM_BATCHED_TOKENS - num_tokens)
        return num_tokens

    def _prefill(self, sequence: _Sequence, most: int) -> int:
        chunk = min(sequence.prompt - sequence.prefilled, most)
        sequence.prefilled += chunk
        self.num_free -= chunk
        return chunk

    def _retire(self) -> None:
        self.num_free += sum(sequence.num_kv for sequence in self.running if sequence.generated >= sequence.output)
        self.running = [sequence for sequence in self.running if sequence.generated < sequence.output]
