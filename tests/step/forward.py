"""Runs the real step program on hand-made plans and hands out the logits: for tests of the model and the step."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxcb.config import Backend
from jaxcb.models import ModelSpec
from jaxcb.models.params import Params
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import PlanRow, Sequence, StepPlan
from jaxcb.step.batch import Packed, SlotState, StepLayout, apply_changes
from jaxcb.step.buckets import Bucket
from jaxcb.step.controls import ControlLayout
from jaxcb.step.kv_pool import pool_of
from jaxcb.step.owners import SlotOwners
from jaxcb.step.program import StepProgram, compiler_options, head_logits
from jaxcb.step.shape import RunnerShape, kv_dtype, kv_shape
from jaxcb.weights.panels import in_panels

PAGE_SIZE = 16
MIN_WIDTH = 16
"""Pages of a block table: shorter sequences share what is compiled, which takes seconds."""


@functools.lru_cache(maxsize=32)
def _compiled(spec: ModelSpec, bucket: Bucket, width: int, backend: Backend, fast_norm: bool):
    """The step's forward, and one that gives the logits of every token."""
    layout = StepLayout(bucket, width, bucket.num_seqs)
    program = StepProgram(spec, layout, PAGE_SIZE, backend, fast_norm=fast_norm)

    def every_token(params, kv, state, upload):
        batch = layout.unpack(upload)
        state = apply_changes(state, batch.change_index, batch.change_page)
        hidden, kv = program._layers(params, kv, state, batch, batch.token_ids)
        return kv, state, head_logits(spec, program.backend, params, hidden, batch.query_starts[-1])

    # Kernels in the interpreter are large programs that run once: they should be fast to compile.
    options = {"xla_backend_optimization_level": 0} if backend == "triton" else compiler_options(deterministic=False)
    jit = functools.partial(jax.jit, donate_argnums=(1, 2), compiler_options=options)
    return layout, jit(program.forward), jit(every_token)


def teacher_forced(
    spec: ModelSpec,
    params: Params,
    token_ids: list[int],
    chunk: int = 256,
    backend: Backend = "xla",
    *,
    fast_norm: bool = False,
    int8_kv: bool = False,
) -> np.ndarray:
    """Logits [T, V] after every token of one sequence, prefilled chunk by chunk through the layers that serve; chunks
    of one token go as decodes.

    What is compiled goes by the chunk and the next power of two of the length, from 256 tokens on.
    """
    parts = _chunks(spec, params, token_ids, chunk, every=True, backend=backend, fast_norm=fast_norm, int8_kv=int8_kv)
    return np.concatenate([out[:count] for out, count in parts])


def chunked(spec: ModelSpec, params: Params, token_ids: list[int], chunk: int) -> np.ndarray:
    """Logits [num_chunks, V] after each chunk of one sequence, out of the very program that serves."""
    return np.stack([out[0] for out, _ in _chunks(spec, params, token_ids, chunk, every=False, backend="xla")])


def _chunks(
    spec: ModelSpec,
    params: Params,
    token_ids: list[int],
    chunk: int,
    *,
    every: bool,
    backend: Backend,
    fast_norm: bool = False,
    int8_kv: bool = False,
) -> Iterator[tuple[np.ndarray, int]]:
    width = max(MIN_WIDTH, 2 ** (len(token_ids) // PAGE_SIZE).bit_length())
    if backend == "native":
        params = in_panels(params)
    layout, forward, every_token = _compiled(spec, Bucket(chunk, 1, chunk == 1), width, backend, fast_norm)
    shape = RunnerShape(num_pages=width, page_size=PAGE_SIZE, num_slots=1, max_model_len=width * PAGE_SIZE)
    dtype = kv_dtype(params["embed"]["embedding"].dtype, backend)
    pool = pool_of(kv_shape(spec, shape), dtype, int8=int8_kv)
    kv = jax.tree.map(lambda part: jnp.zeros(part.shape, part.dtype), pool)
    state = SlotState.at_rest(layout.num_slots, width, ControlLayout(spec.vocab_size, 8))
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        first, last = start // PAGE_SIZE, -(-(start + len(part)) // PAGE_SIZE)
        row = row_of(0, part, start=start, pages=list(range(first + 1, last + 1)))
        row.first_new_page = first
        upload, overflow, *_ = packed(layout, StepPlan.of([row], 0))
        assert not overflow
        kv, state, logits = (every_token if every else forward)(params, kv, state, upload)[:3]
        yield np.asarray(logits, np.float32), len(part)


def packed(layout: StepLayout, plan: StepPlan) -> Packed:
    """The plan as an upload, by a host that has just met its rows."""
    owners = SlotOwners(layout.num_slots + 1)
    owners.enter(row for row in plan.rows if isinstance(row, PlanRow))
    return layout.pack(plan, owners)


def row_of(
    slot: int, token_ids: list[int], *, start: int, pages: list[int], sampling: SamplingParams | None = None
) -> PlanRow:
    """A row of a plan, with a sequence that only carries its sampling parameters."""
    request = Request(request_id=str(slot), prompt_token_ids=[0], sampling=sampling or SamplingParams(temperature=0))
    sequence = Sequence(request=request, token_ids=[0], max_total_tokens=10**6, end_ids=frozenset())
    return PlanRow(
        sequence=sequence,
        slot=slot,
        token_ids=token_ids,
        start=start,
        samples=True,
        first_new_page=0,
        new_pages=pages,
    )
