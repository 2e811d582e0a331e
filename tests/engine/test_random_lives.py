"""Whatever callers do, in whatever order: nothing compiles, no request fails, and no page stays in use."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from typing import Any

import pytest

from jaxcb.engine import Engine
from jaxcb.sampling_params import SamplingParams
from tests.engine.conftest import SPEC, sensitive_params
from tests.engine.random_life import FIELDS, RandomLife
from tests.engine.test_page_moves import PAGE_GIB
from tests.engine.test_pressure import TIGHT, until_idle

SWAP = {"host_kv_gib": 64 * PAGE_GIB, "preemption": "swap"}
SEED = int(os.environ.get("JAXCB_FUZZ_SEED", "0"))
"""Of the first life; the short form lives the same lives every time."""
MINUTES = float(os.environ.get("JAXCB_FUZZ_MINUTES", "2"))
"""How long the long form lives on each engine."""


def live(engine: Engine, seed: int, num_acts: int) -> RandomLife:
    """One life, which leaves the engine as it was."""
    print(f"seed {seed}")  # shown when it fails
    original = sensitive_params(SPEC, seed=3)
    life = RandomLife(engine, (original, sensitive_params(SPEC, seed=8)), random.Random(seed))
    life.live(num_acts)
    engine.update_params(original)
    assert engine.stats().compiles == 0 and engine.healthy
    until_idle(engine)
    return life


def test_every_sampling_parameter_is_drawn():
    assert set(FIELDS) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize("changes", [{}, SWAP], ids=["recompute", "swap"])
def test_nothing_compiles_and_nothing_fails_in_a_random_life(make_engines, changes):
    """What must have happened depends on when the engine's thread gets its turns: more lives are lived until it has."""
    engine = make_engines(**TIGHT, **changes)
    before = engine.stats()
    lives: list[RandomLife] = []

    def missing() -> set[str]:
        after = engine.stats()
        happened = {output.finish_reason.value for each in lives for output in each.outputs}
        happened |= {"preemption"} if after.preemptions > before.preemptions else set()
        happened |= {"cached prompt"} if after.prompt_tokens_cached > before.prompt_tokens_cached else set()
        happened |= {"swap"} if after.swaps > before.swaps else set()
        return {"stop", "length", "abort", "preemption", "cached prompt", *(["swap"] if changes else [])} - happened

    while len(lives) < 2 or (missing() and len(lives) < 12):
        lives.append(live(engine, SEED + len(lives), 30))
    assert not missing()
    assert changes or engine.stats().swaps == before.swaps


LONG: dict[str, dict[str, Any]] = {
    "recompute": {},
    "swap": SWAP,
    "auto": {"host_kv_gib": 64 * PAGE_GIB},
    "waits for every step": {"run_ahead": False, "policy": "priority"},
    "deterministic": {"deterministic": True, "enable_prefix_caching": False},
    "processed": {"logprobs_mode": "processed", "max_chunk_tokens": 13, "mixed_buckets": (16, 64)},
    "many buckets": {"decode_buckets": (1, 2), "mixed_buckets": (16, 64), "exact_fill": True, "max_passes": 3},
    "xla": {"backend": "xla", "decode_buckets": (1, 2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_lives(make_engine, name):
    """JAXCB_FUZZ_SEED and JAXCB_FUZZ_MINUTES choose which lives, and how many."""
    engine = make_engine(**TIGHT | LONG[name])
    seed, until_s = SEED, time.monotonic() + 60 * MINUTES
    while time.monotonic() < until_s:
        live(engine, seed, 150)
        seed += 1
