"""Runs the real step program on hand-made plans and hands out the logits: for tests of the model and the step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxcb.models import ModelSpec
from jaxcb.models.decoder import Params
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import PlanRow, Sequence, StepPlan
from jaxcb.step.batch import SlotState, StepLayout
from jaxcb.step.buckets import Bucket
from jaxcb.step.program import StepProgram
from jaxcb.step.runner import RunnerShape, kv_dtype, kv_shape

PAGE_SIZE = 16


@functools.lru_cache(maxsize=32)
def _compiled(spec: ModelSpec, bucket: Bucket, width: int):
    layout = StepLayout(bucket, width, bucket.num_seqs)
    program = StepProgram(spec, layout, PAGE_SIZE, "xla")
    return layout, jax.jit(program.forward, donate_argnums=(1, 2))


def teacher_forced(spec: ModelSpec, params: Params, token_ids: list[int]) -> np.ndarray:
    """Logits [T, V] after every token of one sequence, all in one mixed step: T rows that share the first pages.

    Row i is a "sequence" of its own whose chunk is token i, over the block table that all rows share; so the logits
    of every position come out of the very program that serves.
    """
    T = len(token_ids)
    width = -(-T // PAGE_SIZE)
    layout, forward = _compiled(spec, Bucket(T, T, False), width)
    pages = list(range(1, width + 1))
    rows = [row_of(i, [token], start=i, pages=pages) for i, token in enumerate(token_ids)]
    upload, overflow = layout.pack(StepPlan(0, rows, T, T))
    state = SlotState.zeros(layout.num_slots, width)
    if overflow:
        state = state._replace(block_tables=jnp.tile(jnp.asarray(pages, jnp.int32), (T + 1, 1)))
    shape = RunnerShape(num_pages=width, page_size=PAGE_SIZE, num_slots=T, max_model_len=width * PAGE_SIZE)
    kv = jnp.zeros(kv_shape(spec, shape), kv_dtype(params["embed"]["embedding"].dtype))
    return np.asarray(forward(params, kv, state, upload)[2], np.float32)


def row_of(
    slot: int, token_ids: list[int], *, start: int, pages: list[int], sampling: SamplingParams | None = None
) -> PlanRow:
    """A row of a plan, with a sequence that only carries its sampling parameters."""
    request = Request(request_id=str(slot), prompt_token_ids=[0], sampling=sampling or SamplingParams(temperature=0))
    sequence = Sequence(request=request, token_ids=[0], max_total_tokens=10**6, end_ids=frozenset())
    return PlanRow(
        sequence=sequence,
        generation=0,
        slot=slot,
        token_ids=token_ids,
        start=start,
        samples=True,
        first_new_page=0,
        new_pages=pages,
    )


def chunked(spec: ModelSpec, params: Params, token_ids: list[int], chunk: int) -> np.ndarray:
    """Logits [num_chunks, V] after each chunk of one sequence, prefilled chunk by chunk."""
    width = -(-len(token_ids) // PAGE_SIZE)
    layout, forward = _compiled(spec, Bucket(chunk, 1, False), width)
    shape = RunnerShape(num_pages=width, page_size=PAGE_SIZE, num_slots=1, max_model_len=width * PAGE_SIZE)
    kv = jnp.zeros(kv_shape(spec, shape), kv_dtype(params["embed"]["embedding"].dtype))
    state = SlotState.zeros(layout.num_slots, width)
    logits = []
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        pages = list(range(1, width + 1)) if start == 0 else []
        upload, _ = layout.pack(StepPlan(0, [row_of(0, part, start=start, pages=pages)], len(part), 0))
        kv, state, out, _ = forward(params, kv, state, upload)
        logits.append(np.asarray(out[0], np.float32))
    return np.stack(logits)
