"""Penalties, bans, biases and the filters of the full tier, each against a plain numpy rendering of its definition."""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.sampling import Controls, Tier, sample
from jaxcb.sampling.controls import adjust, repetition_lengths
from jaxcb.sampling.sampler import NOTHING
from jaxcb.sampling.truncation import exclude_top_choices, keep_top_n_sigma, keep_typical
from tests.sampling.test_sampler import draws_of, random_logits

V, L, W = 70, 24, 3


def controls_of(S: int, histories=(), num_prompt=0, **changes) -> Controls:
    """Controls that change nothing but what is named; scalars and rows are used for all rows."""
    history = np.full((S, L), V - 1, np.int32)  # behind the sampled position: anything
    for row, tokens in zip(history, histories, strict=False):
        row[: len(tokens)] = tokens
    values = {
        "history": history,
        "num_prompt": np.int32(num_prompt),
        "repetition_penalty": np.float32(1),
        "presence_penalty": np.float32(0),
        "frequency_penalty": np.float32(0),
        "no_repeat_ngram_size": np.int32(0),
        "dry_multiplier": np.float32(0),
        "dry_base": np.float32(1.75),
        "dry_allowed_length": np.int32(2),
        "dry_breakers": np.full(2, -1, np.int32),
        "typical_p": np.float32(1),
        "top_n_sigma": np.float32(0),
        "xtc_probability": np.float32(0),
        "xtc_threshold": np.float32(0.1),
        "allowed": np.full(W, 2**32 - 1, np.uint32),
        "bias_ids": np.full(4, -1, np.int32),
        "bias": np.zeros(4, np.float32),
        "bad_words": np.full((2, 3), -1, np.int32),
    }
    for name, value in changes.items():
        values[name] = np.asarray(value, values[name].dtype)
    rank = {"history": 2, "dry_breakers": 2, "allowed": 2, "bias_ids": 2, "bias": 2, "bad_words": 3}
    arrays = {}
    for name, value in values.items():
        full = value if value.ndim == rank.get(name, 1) else np.broadcast_to(value, (S, *value.shape))
        arrays[name] = jnp.asarray(full)
    return Controls(**arrays)


def adjusted(logits: np.ndarray, histories, **changes) -> np.ndarray:
    positions = jnp.asarray([len(tokens) for tokens in histories], jnp.int32)
    return np.asarray(jax.jit(adjust)(jnp.asarray(logits), controls_of(len(logits), histories, **changes), positions))


tokens = st.lists(st.integers(0, 5), min_size=1, max_size=20)


def test_controls_at_rest_change_nothing():
    logits = random_logits(S=3, vocabulary=V)
    np.testing.assert_array_equal(adjusted(logits, [[1], [2, 2, 2, 2], [1, 2, 3] * 5]), logits)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(tokens, min_size=3, max_size=3), st.integers(0, 5), st.floats(0.5, 2), st.floats(-2, 2), st.floats(-2, 2)
)
def test_penalties_are_what_their_definitions_say(histories, num_prompt, repetition, presence, frequency):
    logits = random_logits(S=3, vocabulary=V)
    expected = logits.astype(np.float64)
    for row, history in zip(expected, histories, strict=True):
        answer = Counter(history[num_prompt:])
        for token in set(history):
            row[token] = row[token] / repetition if row[token] > 0 else row[token] * repetition
        for token, count in answer.items():
            row[token] -= presence + frequency * count
    seen = adjusted(
        logits,
        histories,
        num_prompt=num_prompt,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5)


def test_the_prompt_counts_for_the_repetition_penalty_alone():
    logits = np.ones((1, V), np.float32)
    seen = adjusted(
        logits, [[7, 8]], num_prompt=1, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.125
    )[0]
    assert (seen[7], seen[8], seen[9]) == (0.5, 0.125, 1.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(tokens, min_size=2, max_size=2), st.integers(1, 4))
def test_no_ngram_occurs_twice(histories, n):
    logits = random_logits(S=2, vocabulary=V)
    seen = adjusted(logits, histories, no_repeat_ngram_size=n)
    for row, history in zip(seen, histories, strict=True):
        begun = history[len(history) - n + 1 :] if n > 1 else []
        grams = {tuple(history[i : i + n]) for i in range(len(history) - n + 1)}
        banned = {gram[-1] for gram in grams if list(gram[:-1]) == begun}
        assert {int(token) for token in np.flatnonzero(np.isneginf(row))} == banned


@settings(max_examples=60, deadline=None)
@given(st.lists(tokens, min_size=2, max_size=2), st.lists(st.integers(0, 5), min_size=2, max_size=2))
def test_repetition_lengths_are_those_of_a_plain_search(histories, breakers):
    history = np.zeros((2, L), np.int32)
    for row, given_tokens in zip(history, histories, strict=True):
        row[: len(given_tokens)] = given_tokens
    positions = jnp.asarray([len(given_tokens) for given_tokens in histories], jnp.int32)
    seen = np.asarray(
        jax.jit(repetition_lengths)(jnp.asarray(history), positions, jnp.asarray([breakers] * 2, jnp.int32))
    )
    for row, given_tokens in zip(seen, histories, strict=True):
        for i in range(len(given_tokens)):
            length = 0
            while i - 1 - length >= 0 and given_tokens[i - 1 - length] == given_tokens[-1 - length]:
                if given_tokens[-1 - length] in breakers:
                    break
                length += 1
            assert row[i] == length, (given_tokens, i)


def test_dry_takes_off_more_the_longer_the_repetition():
    logits = np.zeros((3, V), np.float32)
    histories = [[1, 2, 3, 9, 1, 2, 3], [5, 1, 2, 8, 1, 2, 7, 5, 1, 2], [4, 6, 4]]
    seen = adjusted(logits, histories, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
    assert seen[0][9] == -1.0, "three tokens repeat: 0.5 * 2 ** (3 - 2)"
    assert seen[1][8] == -1.0 and seen[1][7] == -0.5, "the longest repetition counts for each token"
    assert not seen[2].any(), "one token is below the allowed length"
    broken = adjusted(logits, histories, dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2, dry_breakers=[2, -1])
    assert not broken[0].any(), "token 2 breaks the sequence, and one token is left"


def test_biases_bans_and_allowed_ids():
    logits = random_logits(S=2, vocabulary=V)
    seen = adjusted(logits, [[1], [2]], bias_ids=[3, 69, -1, -1], bias=[5.0, -100.0, 77.0, 77.0])
    expected = logits.copy()
    expected[:, 3] += 5.0
    expected[:, 69] -= 100.0
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    allowed = adjusted(logits, [[1], [2]], allowed=[1 << 5, 0, 1 << 2])
    assert {5, 66} == {int(i) for row in allowed for i in np.flatnonzero(np.isfinite(row))}


def test_bad_words_are_banned_only_after_what_they_begin_with():
    logits = np.zeros((4, V), np.float32)
    words = [[-1, 4, 5], [1, 2, 3]]
    seen = adjusted(logits, [[4], [1, 2], [2, 1, 2, 4], [2]], bad_words=words)
    assert [set(np.flatnonzero(np.isneginf(row)).tolist()) for row in seen] == [{5}, {3}, {5}, set()]
    single = adjusted(logits, [[4], [1, 2], [9], [0]], bad_words=[[-1, -1, 8], [-1, -1, -1]])
    assert [set(np.flatnonzero(np.isneginf(row)).tolist()) for row in single] == [{8}] * 4


def weights_of(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max(-1, keepdims=True))


@pytest.mark.parametrize("typical_p", [0.05, 0.3, 0.9])
def test_typical_keeps_the_tokens_of_expected_surprise(typical_p):
    weights = weights_of(random_logits(S=4, vocabulary=V))
    kept = np.asarray(jax.jit(keep_typical)(jnp.asarray(weights), jnp.full(4, typical_p)))
    for row, keep in zip(weights.astype(np.float64), kept, strict=True):
        p = row / row.sum()
        order = np.argsort(np.abs(-np.log(p) + (p * np.log(p)).sum()), kind="stable")
        count = int((np.cumsum(p[order]) < typical_p).sum()) + 1
        assert set(np.flatnonzero(keep)) == set(order[:count])
    np.testing.assert_array_equal(jax.jit(keep_typical)(jnp.asarray(weights), jnp.ones(4)), weights)


def test_top_n_sigma_keeps_what_stands_out():
    logits = random_logits(S=3, vocabulary=V)
    logits[:, 0] = -np.inf
    kept = np.asarray(jax.jit(keep_top_n_sigma)(jnp.asarray(logits), jnp.asarray([1.0, 0.0, -1.0])))
    real = logits[0, 1:].astype(np.float64)
    np.testing.assert_array_equal(np.isfinite(kept[0, 1:]), real >= real.max() - real.std())
    np.testing.assert_array_equal(kept[1:], logits[1:])


def test_xtc_leaves_only_the_least_likely_of_the_likely_ones():
    weights = np.float32([[1.0, 0.5, 0.4, 0.01], [1.0, 0.5, 0.4, 0.01], [1.0, 0.02, 0.02, 0.01]])
    act = functools.partial(jax.jit(exclude_top_choices), jnp.asarray(weights))
    kept = act(jnp.full(3, 0.5), jnp.full(3, 0.1), jnp.asarray([0.4, 0.6, 0.4]))
    np.testing.assert_array_equal(kept, np.float32([[0, 0, 0.4, 0.01], [1.0, 0.5, 0.4, 0.01], weights[2]]))


def test_xtc_with_a_threshold_of_0_keeps_the_least_likely_of_those_that_were_left():
    weights = jnp.asarray(np.float32([[0.0, 1.0, 0.5, 0.0]]))
    kept = jax.jit(exclude_top_choices)(weights, jnp.ones(1), jnp.zeros(1), jnp.zeros(1))
    np.testing.assert_array_equal(kept, np.float32([[0, 0, 0.5, 0]]))


def test_the_full_tier_with_controls_at_rest_draws_as_the_truncated_one():
    logits = jnp.asarray(random_logits(S=16, vocabulary=V))
    draws = draws_of(16, temperature=0.8, top_k=20, top_p=0.9, position=np.arange(16))
    controls = controls_of(16, [[1, 2]] * 16)
    run = jax.jit(sample, static_argnames="tier")
    expected, kept = run(logits, draws, tier=Tier.TRUNCATED)
    seen, same = run(logits, draws, tier=Tier.FULL, controls=controls)
    np.testing.assert_array_equal(seen, expected)
    np.testing.assert_array_equal(same, kept)


def test_the_logits_drawn_from_hold_only_what_can_be_drawn():
    logits = jnp.asarray(random_logits(S=400, vocabulary=V)[:1].repeat(400, 0))
    draws = draws_of(400, top_k=5, position=np.arange(400))
    controls = controls_of(400, allowed=[2**32 - 1, 0, 0], xtc_probability=1.0, xtc_threshold=0.05)
    ids, kept = jax.jit(sample, static_argnames="tier")(logits, draws, tier=Tier.FULL, controls=controls)
    assert set(np.asarray(ids).tolist()) == set(np.flatnonzero(np.isfinite(np.asarray(kept)[0])).tolist())


def test_a_row_where_nothing_can_be_taken_says_so():
    logits = jnp.asarray(random_logits(S=2, vocabulary=V))
    for temperature in (0.0, 1.0):
        ids, _ = jax.jit(sample, static_argnames="tier")(
            logits, draws_of(2, temperature=temperature), tier=Tier.FULL, controls=controls_of(2, allowed=[0, 0, 0])
        )
        assert (np.asarray(ids) == NOTHING).all()
