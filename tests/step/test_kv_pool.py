"""Pools of int8 pages: what a step computes over them, and what leaves them as rows of bytes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb import native
from jaxcb.models.decoder import init_params
from jaxcb.paging import PageMoves
from jaxcb.step.kv_pool import flat, like, pool_of
from jaxcb.step.page_mover import PAGES_PER_MOVE, PageMover
from pallas_kernels import QuantizedPages
from pallas_kernels.metadata import default_backend
from tests.step.forward import teacher_forced
from tests.step.test_runner import SPEC

SHAPE = (2 * PAGES_PER_MOVE, 2, 2, 8, 3, 4)


def random_pool() -> QuantizedPages:
    rng = np.random.default_rng(1)
    values, scales = pool_of(SHAPE, jnp.float32, int8=True)
    return QuantizedPages(
        jnp.asarray(rng.integers(-127, 128, values.shape), jnp.int8),
        jnp.asarray(rng.uniform(1e-6, 1e6, scales.shape), jnp.float32).at[3].set(jnp.nan),
    )


def test_a_pool_is_an_array_or_values_with_a_scale_a_row():
    assert pool_of(SHAPE, jnp.uint16, int8=False).shape == SHAPE
    values, scales = pool_of(SHAPE, jnp.uint16, int8=True)
    assert (values.shape, values.dtype, scales.shape, scales.dtype) == (SHAPE, jnp.int8, (64, 2, 2, 3, 8), jnp.float32)
    kv = random_pool()
    assert [part.shape for part in flat(kv)] == [(256, 8, 3, 4), (256, 3, 8)]
    for part, back in zip(kv, like(kv, flat(kv)), strict=True):
        np.testing.assert_array_equal(part, back)


def test_pages_keep_every_bit_on_every_way():
    kv = random_pool()
    before = [np.array(part).view(np.uint8).reshape(64, -1) for part in kv]
    mover = PageMover(kv, 50, default_backend(), transfers=True)
    for job in mover.jobs():
        job.keep(job.lower().compile())
    assert (mover.page.shape, mover.page.dtype) == ((2 * 2 * 8 * 3 * (4 + 4),), jnp.uint8)
    rows = mover.read(kv, [3, 5, *range(10, 50)])
    kv = mover.move(kv, PageMoves(out=[(3, 1), (4, 50)], into=[(50, 6), (1, 7)], copies=[(7, 8)]))
    kv = mover.write(kv, [60, 61], rows[:2])
    kv, _ = mover.measure(kv)
    moved = {6: 4, 7: 3, 8: 3, 60: 3, 61: 5}
    for part, was in zip(kv, before, strict=True):
        now = np.array(part).view(np.uint8).reshape(64, -1)
        for page in range(1, 64):
            np.testing.assert_array_equal(now[page], was[moved.get(page, page)])


@pytest.mark.parametrize("backend", ["xla", pytest.param("native", marks=pytest.mark.native)])
def test_logits_over_int8_pages_are_near_those_over_float32(backend):
    assert backend == "xla" or native.usable(None)
    params = init_params(SPEC, jnp.float32, seed=4)
    tokens = [(7 * i + i * i) % SPEC.vocab_size for i in range(70)]
    wanted = teacher_forced(SPEC, params, tokens, chunk=32, backend="xla")
    got = teacher_forced(SPEC, params, tokens, chunk=32, backend=backend, int8_kv=True)
    assert 1e-5 < np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 0.02
