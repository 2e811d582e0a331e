"""What a request may ask that looks at its tokens so far or at single ids: penalties, bans and biases on the logits.

Each row's tokens so far lie on the device (``history``), and every sampled token is appended there, so that running
ahead needs no news from the host.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jaxcb.sampling_params import MAX_NGRAM


class Controls(NamedTuple):
    """One row a sequence. L positions, W words of 32 ids, B biases, N bad words of up to M tokens, R breakers."""

    history: Int[Array, "S L"]
    """Token ids of prompt and answer; what lies behind the sampled position is of no meaning."""
    num_prompt: Int[Array, "S"]
    repetition_penalty: Float[Array, "S"]
    presence_penalty: Float[Array, "S"]
    frequency_penalty: Float[Array, "S"]
    no_repeat_ngram_size: Int[Array, "S"]
    dry_multiplier: Float[Array, "S"]
    dry_base: Float[Array, "S"]
    dry_allowed_length: Int[Array, "S"]
    dry_breakers: Int[Array, "S R"]
    """Ids across which DRY sees no repetition; -1 is none."""
    typical_p: Float[Array, "S"]
    top_n_sigma: Float[Array, "S"]
    xtc_probability: Float[Array, "S"]
    xtc_threshold: Float[Array, "S"]
    allowed: UInt[Array, "S W"]
    """Bit i of word w: id 32 w + i can be sampled."""
    bias_ids: Int[Array, "S B"]
    """-1 is none."""
    bias: Float[Array, "S B"]
    bad_words: Int[Array, "S N M"]
    """Each right-aligned, -1 before it: [-1, -1, 5, 6] forbids 6 after 5."""


def adjust(logits: Float[Array, "S V"], controls: Controls, positions: Int[Array, "S"]) -> Float[Array, "S V"]:
    """Logits after bans, biases, penalties and DRY. ``positions``: index of the token that is sampled."""
    logits = keep_allowed(logits, controls.allowed)
    logits = _forbid(logits, _completed_bad_words(controls, positions))
    rows = jnp.arange(logits.shape[0])[:, None]
    logits = logits.at[rows, _or_dropped(controls.bias_ids, logits.shape[1])].add(controls.bias, mode="drop")
    logits = _penalise(logits, controls, positions)
    return _punish_repetition(logits, controls, positions)


def keep_allowed(logits: Float[Array, "S V"], words: UInt[Array, "S W"]) -> Float[Array, "S V"]:
    """-inf where bit i of word w, which stands for id 32 w + i, is 0."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return jnp.where(bits.reshape(words.shape[0], -1)[:, : logits.shape[1]] == 1, logits, -jnp.inf)


def _forbid(logits: Float[Array, "S V"], ids: Int[Array, "S N"]) -> Float[Array, "S V"]:
    """-inf at ids; -1 is none."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, _or_dropped(ids, logits.shape[1])].set(-jnp.inf, mode="drop")


def _or_dropped(ids: Int[Array, "S N"], V: int) -> Int[Array, "S N"]:
    """-1 would count from the end: V is outside, and so dropped."""
    return jnp.where(ids < 0, V, ids)


def _completed_bad_words(controls: Controls, positions: Int[Array, "S"]) -> Int[Array, "S N"]:
    """Last token of each bad word whose other tokens are the sequence's last ones; -1 elsewhere."""
    words = controls.bad_words
    M = words.shape[2]
    before = positions[:, None] - jnp.arange(M - 1, 0, -1)  # positions of the last M - 1 tokens
    tail = jnp.take_along_axis(controls.history, jnp.maximum(before, 0), 1)
    tail = jnp.where(before >= 0, tail, -2)  # no word begins before the prompt does
    agrees = (words[:, :, :-1] == -1) | (words[:, :, :-1] == tail[:, None, :])
    return jnp.where(agrees.all(-1), words[:, :, -1], -1)


def _penalise(logits: Float[Array, "S V"], controls: Controls, positions: Int[Array, "S"]) -> Float[Array, "S V"]:
    """Repetition penalty over prompt and answer (Keskar et al. 2019), presence and frequency over the answer."""
    index = jnp.arange(controls.history.shape[1])
    known = index < positions[:, None]
    in_prompt = known & (index < controls.num_prompt[:, None])
    in_answer = known & (index >= controls.num_prompt[:, None])
    rows = jnp.arange(logits.shape[0])[:, None]
    none = jnp.zeros(logits.shape, jnp.int32)
    counts = none.at[rows, controls.history].add(in_answer.astype(jnp.int32), mode="drop")
    prompted = none.at[rows, controls.history].max(in_prompt.astype(jnp.int32), mode="drop")
    factor = jnp.where((counts + prompted) > 0, controls.repetition_penalty[:, None], 1.0)
    logits = jnp.where(logits > 0.0, logits / factor, logits * factor)
    per_token = controls.frequency_penalty[:, None] * counts
    return logits - per_token - jnp.where(counts > 0, controls.presence_penalty[:, None], 0.0)


def _punish_repetition(
    logits: Float[Array, "S V"], controls: Controls, positions: Int[Array, "S"]
) -> Float[Array, "S V"]:
    """no_repeat_ngram_size forbids, and DRY makes less likely, the token that would extend a repetition."""
    history, V = controls.history, logits.shape[1]
    S, L = history.shape
    known = jnp.arange(L) < positions[:, None]
    rows = jnp.arange(S)[:, None]
    # Both at once, the first without breakers.
    breakers = jnp.concatenate([jnp.full_like(controls.dry_breakers, -1), controls.dry_breakers])
    lengths = repetition_lengths(jnp.tile(history, (2, 1)), jnp.tile(positions, 2), breakers)
    plain, unbroken = lengths[:S], lengths[S:]

    n = controls.no_repeat_ngram_size[:, None]
    forbidden = known & (n > 0) & (plain >= n - 1)
    logits = logits.at[rows, jnp.where(forbidden, history, V)].set(-jnp.inf, mode="drop")

    excess = unbroken - controls.dry_allowed_length[:, None]
    grown = controls.dry_multiplier[:, None] * controls.dry_base[:, None] ** excess.astype(jnp.float32)
    loss = jnp.where(known & (excess >= 0), grown, 0.0)
    return logits - jnp.zeros_like(logits).at[rows, history].max(loss, mode="drop")


def repetition_lengths(
    history: Int[Array, "S L"], positions: Int[Array, "S"], breakers: Int[Array, "S R"]
) -> Int[Array, "S L"]:
    """For each position i, how many tokens just before i equal, backwards, the last tokens of the sequence.

    Counted up to ``MAX_NGRAM``, and not across a breaker. At i, history ``a b c a b`` and position 5:

        token            a  b  c  a  b
        length before i  0  0  2  0  0      c follows "a b", with which the sequence ends
    """
    breaks = (history[:, :, None] == breakers[:, None, :]).any(-1)
    history = jnp.where(breaks, _BREAK, history)

    def one_more(j: Int[Array, ""], state: _Matches) -> _Matches:
        matching, lengths, shifted = state
        last = positions - 1 - j
        token = jnp.take_along_axis(history, jnp.maximum(last, 0)[:, None], 1)
        token = jnp.where((last < 0)[:, None] | (token == _BREAK), _NOTHING, token)
        matching = matching & (shifted == token)
        return matching, lengths + matching, _shift(shifted)

    start = (jnp.ones(history.shape, bool), jnp.zeros(history.shape, jnp.int32), _shift(history))
    return lax.fori_loop(0, MAX_NGRAM, one_more, start)[1]


_BREAK, _NOTHING = -4, -5  # no token has these ids, and they differ
_Matches = tuple[Bool[Array, "S L"], Int[Array, "S L"], Int[Array, "S L"]]


def _shift(tokens: Int[Array, "S L"]) -> Int[Array, "S L"]:
    """Every token one position later; before the first there is a break."""
    return jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=_BREAK)
