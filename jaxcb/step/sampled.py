"""What a step's sampler is asked for, and its results on their way to the host, by the sequences they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int

from jaxcb.logprobs import Logprobs
from jaxcb.sampling.logprobs import RowLogprobs
from jaxcb.sampling_params import SamplingParams
from jaxcb.scheduler import StepPlan
from jaxcb.scheduler.sequence import Sequence
from jaxcb.sizing import PROMPT_ROWS
from jaxcb.step.buckets import Bucket
from jaxcb.step.orders import PooledRows, PromptRows, RowMasks, SampleOrder
from jaxcb.step.program import Pooled


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


class Values(NamedTuple):
    """What a :class:`SampleOrder` has computed."""

    token_ids: Int[Array, "S"]
    logprobs: Mapping[bool, RowLogprobs]
    prompts: list[RowLogprobs]
    pooled: Pooled | None


class PooledChunk(NamedTuple):
    """A chunk of a prompt that is to be embedded."""

    sequence: Sequence
    first: int
    num_tokens: int
    offset: int
    """Of its first token in the step."""


class Pieces(NamedTuple):
    """Whose values those are."""

    prompts: list[tuple[Sequence, int, list[int]]]
    """As the first fields of :class:`PromptPiece`."""
    pooled: list[PooledChunk]

    def of(self, values: Values) -> Sampled:
        token_ids, logprobs, prompts, pooled = values
        prompt = [PromptPiece(*piece, own) for piece, own in zip(self.prompts, prompts, strict=True)]
        if pooled is None:
            return Sampled(token_ids, logprobs, prompt, [])
        chunks = enumerate(self.pooled)
        return Sampled(
            token_ids,
            logprobs,
            prompt,
            [PooledPiece(sequence, first, count, row, pooled) for row, (sequence, first, count, _) in chunks],
        )


_NO_PIECES = Pieces([], [])


def asked(plan: StepPlan, tokens: SampleOrder, masks: RowMasks | None = None) -> tuple[SampleOrder, Pieces]:
    """What is to be computed of a step's rows, under masks if some are given, and whose it is. ``tokens``: the order
    that asks for their tokens."""
    order = tokens if masks is None or not masks.rows else tokens._replace(masks=masks)
    if not plan.chunks:
        return order, _NO_PIECES
    prompts, pooled = list(_prompts(plan)), _pooled(plan)
    order = order._replace(
        prompts=[rows for *_, rows in prompts], pooled=_pooled_rows(order.bucket, pooled) if pooled else None
    )
    return order, Pieces([(sequence, first, ids) for sequence, first, ids, _ in prompts], pooled)


def _prompts(plan: StepPlan) -> Iterator[tuple[Sequence, int, list[int], PromptRows]]:
    """(sequence, prompt position before the first, token ids, what is asked) of prompts' log-probabilities."""
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
                yield sequence, start, token_ids, PromptRows(rows, targets, count, wanted < 0)
        offset += row.num_tokens


def _pooled(plan: StepPlan) -> list[PooledChunk]:
    """Chunks of prompts that are to be embedded."""
    chunks, offset = [], plan.num_tokens - sum(row.num_tokens for row in plan.chunks)
    for row in plan.chunks:
        count = min(row.num_tokens, row.sequence.num_prompt_tokens - row.start)
        if row.sequence.request.pooling is not None and count > 0:
            chunks.append(PooledChunk(row.sequence, row.start, count, offset))
        offset += row.num_tokens
    return chunks


def _pooled_rows(bucket: Bucket, chunks: Seq[PooledChunk]) -> PooledRows:
    """One program for all of them."""
    S = bucket.num_seqs
    token_rows, last = np.full(bucket.num_tokens, S, np.int32), np.zeros(S, np.int32)
    for i, (_, _, count, offset) in enumerate(chunks):
        token_rows[offset : offset + count] = i
        last[i] = offset + count - 1
    return PooledRows(token_rows, last)


def _on_host(values: RowLogprobs, token_ids: list[int], rows: slice, k: int | None) -> Logprobs:
    chosen, ranks, top = (np.asarray(array)[rows] for array in (values.chosen, values.ranks, values.top))
    if values.top_ids is None:
        top_ids = np.broadcast_to(np.arange(top.shape[1], dtype=np.int32), top.shape)
    else:
        top_ids = np.asarray(values.top_ids)[rows]
    everything = Logprobs(np.asarray(token_ids, np.int32), chosen, ranks, top_ids, top)
    return everything if k is None or k < 0 else everything.limited(k)
