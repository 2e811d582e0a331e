"""Embeddings and scores are those of one forward over the whole text, however it was cut, cached or preempted."""

from __future__ import annotations

import asyncio

import jax
import numpy as np
import pytest

from jaxcb.errors import RequestError
from tests.engine.conftest import SPEC
from tests.step.forward import teacher_forced

SMALL = {
    "max_num_batched_tokens": 16,
    "max_num_seqs": 4,
    "max_chunk_tokens": 7,
    "num_kv_pages": 60,
    "max_model_len": 256,
}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, SPEC.vocab_size, length).tolist()


TEXTS = [prompt(seed, length) for seed, length in enumerate((1, 5, 40, 7, 90, 33))] + [[*prompt(4, 90)[:70], 9]]


def hidden_states(params, ids: list[int]) -> np.ndarray:
    """After the last norm, [len(ids), E]: the head is a product with the identity."""
    identity = np.eye(SPEC.hidden_size, dtype=np.float32)
    own = params | {"lm_head": {"kernel": identity}}
    return np.asarray(teacher_forced(SPEC, own, ids))


@pytest.mark.parametrize("changes", [{}, SMALL], ids=["whole", "in chunks"])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_those_of_one_forward(make_engines, params, changes, pooling):
    engine = make_engines(**changes)
    engine.embed(TEXTS[2:4])  # what is cached now must not count less
    values = engine.embed(TEXTS, pooling=pooling, normalize=False)
    for ids, value in zip(TEXTS, values, strict=True):
        states = hidden_states(params, ids)
        np.testing.assert_allclose(value, states[-1] if pooling == "last" else states.mean(0), rtol=2e-4, atol=2e-4)
    unit = engine.embed(TEXTS, pooling=pooling)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0, rtol=1e-5)
    np.testing.assert_allclose(unit, values / np.linalg.norm(values, axis=1, keepdims=True), rtol=1e-3, atol=1e-4)
    assert values.dtype == np.float32 and values.shape == (len(TEXTS), SPEC.hidden_size)


@pytest.mark.parametrize("changes", [{}, SMALL], ids=["whole", "in chunks"])
def test_scores_are_those_of_one_forward(make_engines, params, changes):
    engine = make_engines(**changes)
    context = prompt(7, 60)
    pairs = [(context, prompt(seed, 3 + seed)) for seed in range(5)] + [
        ([5], [6]),
        (context[:3], context[:12]),
        (context[:20], []),
    ]
    before = engine.stats().prompt_tokens_cached
    results = engine.score(pairs)
    for (known, continuation), score in zip(pairs, results, strict=True):
        logits = np.asarray(teacher_forced(SPEC, params, [*known, *continuation]))[len(known) - 1 : -1]
        table = np.asarray(jax.nn.log_softmax(logits.astype(np.float64)))
        wanted = table[np.arange(len(continuation)), continuation]
        np.testing.assert_allclose(score.token_logprobs, wanted, atol=1e-4)
        assert score.logprob == pytest.approx(wanted.sum(), abs=1e-3)
        assert score.is_greedy == bool((table.argmax(-1) == continuation).all())
        assert list(score.token_ids) == continuation
    assert engine.score(pairs)[0].logprob == pytest.approx(results[0].logprob, abs=1e-4)
    assert engine.stats().prompt_tokens_cached - before >= 5 * 48, "the context is computed once"


def test_what_greedy_decoding_writes_scores_as_greedy(make_engines, params):
    engine = make_engines()
    ids = prompt(3, 10)
    answer: list[int] = []
    for _ in range(4):
        answer.append(int(np.asarray(teacher_forced(SPEC, params, [*ids, *answer]))[-1].argmax()))
    greedy, other = engine.score([(ids, answer), (ids, [*answer[:3], (answer[3] + 1) % SPEC.vocab_size])])
    assert greedy.is_greedy and not other.is_greedy


def test_strings_are_cut_where_the_context_ends(make_engines):
    engine = make_engines()
    ids = (engine.tokenizer.encode("to the"), engine.tokenizer.encode(" a"))
    by_text, by_ids = engine.score([("to the", " a")]), engine.score([ids])
    assert by_text[0].logprob == pytest.approx(by_ids[0].logprob, abs=1e-4)
    assert engine.embed(["to the"]).shape == (1, SPEC.hidden_size)


def test_coroutines_get_the_same(make_engines):
    engine = make_engines()

    async def both():
        return await asyncio.gather(engine.embed_async(TEXTS), engine.score_async([([5, 6], [7])]))

    embeddings, scored = asyncio.run(both())
    np.testing.assert_allclose(embeddings, engine.embed(TEXTS), atol=1e-4)
    assert scored[0].logprob == pytest.approx(engine.score([([5, 6], [7])])[0].logprob, abs=1e-4)


def test_what_is_impossible_is_refused_before_anything_runs(make_engines):
    engine = make_engines()
    steps = engine.stats().steps
    for call in (
        lambda: engine.embed([[5], []]),
        lambda: engine.embed([[5], [5] * 2000]),
        lambda: engine.embed([[5]], pooling="max"),
        lambda: engine.score([([5], [6]), ([], [6])]),
        lambda: engine.embed([[5]], pooling=None),
        lambda: engine.embed("text"),
        lambda: engine.score([("text", [6])]),
        lambda: engine.score([("a", "b", "c")]),
        lambda: engine.score(["ab"]),
    ):
        with pytest.raises(RequestError):
            call()
    assert engine.stats().steps == steps
    assert engine.embed([]).shape == (0, SPEC.hidden_size) and engine.score([]) == []
