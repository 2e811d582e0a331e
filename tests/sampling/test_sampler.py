from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from jaxcb.sampling import Draws, Tier, sample
from pallas_kernels.xla.threshold import kth_largest, mass_threshold

V = 300
NONE = -1


@functools.partial(jax.jit, static_argnames="tier")
def tokens_of(logits, draws, tier):
    return sample(logits, draws, tier=tier)[0]


def draw(
    logits, *, tier=Tier.TRUNCATED, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, position=0, forbidden=()
):
    """Token of every row; scalars are used for all rows."""
    return np.asarray(
        tokens_of(
            jnp.asarray(logits),
            draws_of(len(logits), temperature, top_k, top_p, min_p, seed, position, forbidden),
            tier,
        )
    )


def draws_of(S, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, position=0, forbidden=()):
    def row(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (S,)))

    banned = np.full((S, 8), NONE, np.int32)
    banned[:, : len(forbidden)] = forbidden
    return Draws(
        temperature=row(temperature, np.float32),
        top_k=row(top_k, np.int32),
        top_p=row(top_p, np.float32),
        min_p=row(min_p, np.float32),
        seeds=jnp.stack([row(seed, np.uint32), jnp.zeros(S, jnp.uint32)], 1),
        positions=row(position, np.int32),
        forbidden=jnp.asarray(banned),
    )


def random_logits(S: int = 4, vocabulary: int = V, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(5).standard_normal((S, vocabulary)) * scale).astype(np.float32)


def reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution, by sorting, in float64."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p[p < min_p] = 0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize("tier", [Tier.GREEDY, Tier.PLAIN, Tier.TRUNCATED])
def test_temperature_zero_takes_the_first_of_the_largest_in_every_tier(tier):
    logits = random_logits()
    logits[1, [40, 250]] = 99.0
    for temperature in (0.0, 1e-9, 9e-6):
        np.testing.assert_array_equal(draw(logits, tier=tier, temperature=temperature), logits.argmax(-1))


def test_top_k_of_one_is_greedy_and_top_p_near_zero_keeps_one_token():
    logits = random_logits(S=64)
    np.testing.assert_array_equal(draw(logits, top_k=1, position=np.arange(64)), logits.argmax(-1))
    for top_p in (0.0, 1e-6, 1e-38, 1e-40, 5e-324):  # the last ones are zero as float32
        np.testing.assert_array_equal(draw(logits, top_p=top_p, position=np.arange(64)), logits.argmax(-1))


@pytest.mark.parametrize("top_k", [-1, V, V + 1, 2**31 - 1])
def test_a_top_k_of_minus_one_or_of_all_tokens_keeps_all(top_k):
    logits, rows = random_logits(S=64), np.arange(64)
    np.testing.assert_array_equal(draw(logits, top_k=top_k, position=rows), draw(logits, position=rows))
    assert (draw(logits, top_k=2, position=rows) != draw(logits, position=rows)).any()


@pytest.mark.parametrize("vocabulary", [100, 128, 300])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 10, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.5, 40, 0.9, 0.05),
        (1.0, 10**6, 1.0, 0.0),
    ],
)
def test_draws_follow_the_distribution_of_the_sorted_reference(vocabulary, temperature, top_k, top_p, min_p):
    count = 20_000
    logits = random_logits(S=1, vocabulary=vocabulary, scale=1.5)
    tokens = draw(
        np.repeat(logits, count, 0),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        position=np.arange(count),
    )
    expected = reference(logits[0], temperature, min(top_k, vocabulary), top_p, min_p) * count
    seen = np.bincount(tokens, minlength=vocabulary)
    assert seen[expected == 0].sum() == 0
    rare = expected < 10
    seen, expected = np.append(seen[~rare], seen[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        seen, expected = seen[:-1], expected[:-1]
    assert chisquare(seen, expected).pvalue > 1e-3


def test_a_plain_draw_is_the_truncated_one_with_nothing_cut():
    logits = random_logits(S=32)
    rows = np.arange(32)
    np.testing.assert_array_equal(draw(logits, tier=Tier.PLAIN, position=rows), draw(logits, position=rows))


def test_forbidden_ids_are_never_taken():
    logits = random_logits(S=200)
    best = int(logits[0].argmax())
    logits[:, best] = 30.0
    assert best not in draw(logits, position=np.arange(200), forbidden=(best,))
    assert best not in draw(logits, temperature=0.0, forbidden=(0, best))
    assert (draw(logits, temperature=0.0) == best).all()


def test_a_row_does_not_depend_on_its_neighbours_nor_on_its_place():
    logits = random_logits(S=16)
    seeds, positions = np.arange(16) + 7, np.arange(16) * 3
    together = draw(logits, seed=seeds, position=positions, top_p=0.9)
    for i in (0, 5, 15):
        alone = draw(logits[i : i + 1], seed=seeds[i], position=positions[i], top_p=0.9)
        assert alone[0] == together[i]
    flipped = draw(logits[::-1], seed=seeds[::-1], position=positions[::-1], top_p=0.9)
    np.testing.assert_array_equal(flipped[::-1], together)


def test_seed_and_position_both_change_the_draw():
    flat = np.zeros((64, V), np.float32)
    by_position = draw(flat, position=np.arange(64))
    by_seed = draw(flat, seed=np.arange(64))
    assert len(set(by_position.tolist())) > 40 and len(set(by_seed.tolist())) > 40
    np.testing.assert_array_equal(by_position, draw(flat, position=np.arange(64)))


rows_of_weights = st.lists(st.floats(0, 1, width=32, allow_subnormal=False), min_size=5, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(rows_of_weights, min_size=3, max_size=3), st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_kth_largest_is_what_sorting_finds(rows, ks):
    values = np.asarray(rows, np.float32)
    found = jax.jit(kth_largest)(jnp.asarray(values), jnp.asarray(ks, jnp.int32))
    np.testing.assert_array_equal(found, [np.sort(row)[::-1][k - 1] for row, k in zip(values, ks, strict=True)])


@settings(max_examples=60, deadline=None)
@given(st.lists(rows_of_weights, min_size=3, max_size=3), st.floats(0.05, 1.0))
def test_mass_threshold_keeps_the_fewest_values_that_reach_the_share(rows, share):
    values = np.asarray(rows, np.float32)
    found = np.asarray(
        jax.jit(mass_threshold)(jnp.asarray(values), jnp.asarray(values), jnp.full(3, share, jnp.float32))
    )
    for row, threshold in zip(values, found, strict=True):
        kept, goal = row[row >= threshold].astype(np.float64), share * row.sum(dtype=np.float64)
        assert kept.sum() >= goal * (1 - 1e-5)
        if threshold > 0 and share < 1:
            above = row[row > threshold].sum(dtype=np.float64)
            assert above < goal * (1 + 1e-5) or threshold == row.max()


def test_bfloat16_logits_are_accepted():
    logits = random_logits()
    tokens = draw(jnp.asarray(logits, jnp.bfloat16), temperature=0.0)
    np.testing.assert_array_equal(tokens, np.asarray(jnp.asarray(logits, jnp.bfloat16)).argmax(-1))
