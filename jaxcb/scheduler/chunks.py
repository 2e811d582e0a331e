"""How a step's prompt tokens are divided among the sequences that want some."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right

from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.sequence import Sequence
from jaxcb.scheduler.step_time import StepTimeFit


@dataclasses.dataclass(slots=True)
class Chunk:
    """The next ``num_tokens`` positions of a sequence."""

    sequence: Sequence
    num_tokens: int
    is_new: bool
    """Admitted in this step: the device has none of its pages in its block table."""


class PromptBudget:
    """The prompt tokens of one step, as they are handed out."""

    def __init__(self, limits: SchedulerLimits, num_tokens: int):
        self._limits = limits
        self.left = num_tokens
        self.chunks: list[Chunk] = []
        self.num_partial = 0
        """Sequences whose prompt isn't complete with this step."""
        self.refused_long = False
        """A long prompt was told to wait until short ones have what they want."""
        self._has_long = False
        self._relaxed = False

    def offer(self, num_remaining: int) -> int:
        """Tokens for a sequence with so many to compute; 0 if it has to wait."""
        limits = self._limits
        most = min(num_remaining, self.left)
        if most < num_remaining and not limits.enable_chunked_prefill:
            return 0
        if limits.enable_chunked_prefill:
            most = min(most, limits.chunk_limit)
            if num_remaining > limits.long_prompt and not self._relaxed:
                self.refused_long |= self._has_long
                most = 0 if self._has_long else min(most, limits.long_prompt)
        allowed = limits.max_num_partial_prefills
        if allowed is not None and most < num_remaining and self.num_partial >= allowed:
            return 0
        return most

    def take(self, sequence: Sequence, num_tokens: int, *, is_new: bool = False) -> None:
        """Hand out what was offered."""
        self.chunks.append(Chunk(sequence, num_tokens, is_new))
        self.left -= num_tokens
        self.num_partial += num_tokens < sequence.num_remaining
        self._has_long |= sequence.num_remaining > self._limits.long_prompt

    def top_up(self) -> None:
        """Short prompts have what they want: give the rest to the long one, and from now on to others."""
        self._relaxed = True
        for chunk in self.chunks:
            if self.left:
                most = min(chunk.sequence.num_remaining, self._limits.chunk_limit)
                more = min(most - chunk.num_tokens, self.left)
                chunk.num_tokens += more
                self.left -= more

    def _may_cut(self, chunk: Chunk) -> bool:
        allowed = self._limits.max_num_partial_prefills
        return allowed is None or self.num_partial < allowed or chunk.num_tokens < chunk.sequence.num_remaining

    def fill_exactly(self, num_decode_tokens: int) -> None:
        """Trim the last chunk so that the step has a compiled size, if it leaves the chunk a token and makes no more
        partial prompts than may be."""
        if self.chunks and self._may_cut(self.chunks[-1]):
            total = num_decode_tokens + sum(chunk.num_tokens for chunk in self.chunks)
            sizes, last = self._limits.step_sizes, self.chunks[-1]
            below = bisect_right(sizes, total)
            if below and (excess := total - sizes[below - 1]) < last.num_tokens:
                last.num_tokens -= excess
                self.left += excess


def prompt_tokens(limits: SchedulerLimits, fit: StepTimeFit, num_decode_tokens: int, num_context: int) -> int:
    """Prompt tokens that a step beside ``num_decode_tokens`` may have: what the budget leaves, and with an ITL target
    no more than the time that it leaves.

    ``num_context`` are the positions that the decodes read. However late the step is, one page of tokens is left, so
    that prompts go on.
    """
    left = limits.max_num_batched_tokens - num_decode_tokens
    if limits.itl_target_ms is None or not num_decode_tokens or not fit.fitted:
        return left
    tokens = fit.tokens_within(limits.itl_target_ms / 1e3, num_context)
    sizes = limits.step_sizes
    if sizes and tokens < sizes[-1]:
        below = bisect_right(sizes, tokens)
        tokens = sizes[below - 1] if below else sizes[0]
    return int(min(left, max(tokens - num_decode_tokens, limits.page_size)))
