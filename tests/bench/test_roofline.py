"""What a step must at least do."""

from __future__ import annotations

import jax.numpy as jnp

from bench.full_step import full_plan
from bench.roofline import Speeds, Work
from jaxcb.models.decoder import init_params
from jaxcb.step.buckets import Bucket
from jaxcb.step.shape import RunnerShape
from tests.engine.conftest import SPEC

SHAPE = RunnerShape(num_pages=100, page_size=16, num_slots=8, max_model_len=128)
KV_BYTES = 100


def test_a_decode_reads_the_weights_once_and_the_cache_of_every_row():
    params = init_params(SPEC, jnp.float32)
    work = Work.of(full_plan(Bucket(4, 4, True), SHAPE, context=32), SPEC, params, KV_BYTES)
    weights = SPEC.num_params - SPEC.vocab_size * SPEC.hidden_size  # the embedding is looked up, not read
    norms = SPEC.num_layers * 2 * SPEC.hidden_size
    assert work.num_bytes == 4 * (weights + norms) + 4 * 32 * KV_BYTES
    scores_and_values = 4 * 32 * 4 * SPEC.q_size * SPEC.num_layers
    assert work.num_flops == 4 * 2 * weights + scores_and_values


def test_the_slower_of_memory_and_cores_decides():
    speeds = Speeds(bytes_per_s=10.0, flops_per_s=100.0)
    assert speeds.least_s(Work(num_bytes=20, num_flops=50)) == 2.0
    assert speeds.least_s(Work(num_bytes=20, num_flops=500)) == 5.0
