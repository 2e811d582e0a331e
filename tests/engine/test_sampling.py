"""Sampling parameters through the whole engine: what a request asks holds in any company and after preemption."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxcb.errors import RequestError
from jaxcb.generate import generate
from jaxcb.request import Request, SamplingParams
from tests.engine.conftest import SPEC
from tests.engine.restarted import JOBS, answers_of
from tests.engine.run import complete
from tests.step.forward import teacher_forced

PROMPTS = [[(7 * i + j * j) % 250 for j in range(5 + 3 * i)] for i in range(6)]
KINDS = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "ngram": {"no_repeat_ngram_size": 2},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    "filters": {"typical_p": 0.8, "top_n_sigma": 3.0, "min_p": 0.02, "top_k": 50, "xtc_probability": 0.5},
    "ids": {"logit_bias": {5: 3.0, "9": -100}, "allowed_token_ids": range(2, 200), "bad_words": ["ab", "c"]},
}


def params_of(kind: str, **more) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 40, "ignore_eos": True, "seed": 11} | KINDS[kind] | more))


@pytest.fixture(scope="module")
def alone(make_engines) -> dict[str, list[list[int]]]:
    """Each prompt with each kind of parameters, by itself."""
    engine = make_engines(max_num_seqs=8)
    return {
        kind: [list(complete(engine, [prompt], params_of(kind))[0].token_ids) for prompt in PROMPTS] for kind in KINDS
    }


def test_every_kind_of_parameter_changes_the_answer(alone, make_engines):
    plain = complete(make_engines(max_num_seqs=8), PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True, seed=11))
    for kind, answers in alone.items():
        assert answers != [list(output.token_ids) for output in plain], kind


@pytest.mark.parametrize("changes", [{}, {"num_kv_pages": 12, "max_model_len": 128}], ids=["roomy", "preempting"])
def test_a_request_draws_the_same_in_any_company_and_after_preemption(alone, make_engines, changes):
    engine = make_engines(max_num_seqs=8, **changes)
    jobs = [(prompt, params_of(kind)) for prompt in PROMPTS for kind in KINDS]
    outputs = complete(engine, [prompt for prompt, _ in jobs], [params for _, params in jobs])
    together = [list(output.token_ids) for output in outputs]
    assert together == [alone[kind][i] for i in range(len(PROMPTS)) for kind in KINDS]
    if changes:
        assert sum(output.num_preemptions for output in outputs) > 0


def test_a_request_draws_the_same_after_a_restart(make_engines):
    """There each by itself, here all together; hashes of strings differ between the processes."""
    engine = make_engines(max_num_seqs=8)
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.restarted"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    before = json.loads(run.stdout.splitlines()[-1])
    assert [len(choices) for choices in before] == [1, 1, 3, 1]
    assert len({tuple(answer) for choices in before for answer in choices}) == 6
    assert answers_of(engine, JOBS) == before


def test_a_slot_keeps_nothing_of_its_last_owner(make_engines):
    engine = make_engines(max_num_seqs=8)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0, repetition_penalty=1.0)
    first = complete(engine, PROMPTS, greedy)
    complete(engine, PROMPTS * 3, params_of("ids", allowed_token_ids=[3, 4]))
    mixed = [greedy, params_of("penalties")] * 3
    assert [output.token_ids for output in complete(engine, PROMPTS, mixed)][::2] == [
        output.token_ids for output in first
    ][::2]


def test_the_answers_have_the_properties_that_were_asked_for(alone, tokenizer):
    [letter] = tokenizer.encode("c")
    for prompt, answer in zip(PROMPTS, alone["ngram"], strict=True):
        whole = prompt + answer
        grams = Counter(pairwise(whole))
        new = Counter(pairwise(answer))
        assert all(grams[gram] == 1 for gram in new)
    for answer in alone["ids"]:
        assert set(answer) <= set(range(2, 200)) - {9, letter}


def test_a_bias_of_100_and_one_allowed_id_force_a_token(make_engines):
    engine = make_engines(max_num_seqs=8)
    for forcing in ({"logit_bias": {77: 100}}, {"allowed_token_ids": [77]}):
        [output] = complete(engine, [[1, 2]], SamplingParams(max_tokens=5, ignore_eos=True, **forcing))
        assert list(output.token_ids) == [77] * 5


def test_bad_words_are_not_in_the_text(make_engines, tokenizer):
    engine = make_engines(max_num_seqs=8)
    words = ("abc", "cb", "bb")
    letters = SamplingParams(
        max_tokens=150, ignore_eos=True, seed=3, temperature=100.0, allowed_token_ids=tokenizer.encode("abc ")
    )
    [free] = complete(engine, [[97]], letters)
    assert all(word in free.text for word in words)
    [held] = complete(engine, [[97]], dataclasses.replace(letters, bad_words=words))
    assert len(held.text) == 150 and not any(word in held.text for word in words)


# ---------------------------------------------------------------- logprobs


def reference(prompt: list[int], answer: list[int], params) -> np.ndarray:
    """Log-probabilities [len(prompt) + len(answer), V] by one teacher-forced forward; row i is of token i + 1."""
    logits = teacher_forced(SPEC, params, prompt + answer)
    return np.asarray(jax.nn.log_softmax(logits, -1))


@pytest.mark.parametrize("k", [0, 3, 20, -1])
def test_logprobs_are_those_of_a_teacher_forced_forward(make_engines, params, k):
    engine = make_engines(max_num_seqs=8)
    prompts = PROMPTS[:3]
    outputs = complete(engine, prompts, SamplingParams(max_tokens=12, ignore_eos=True, seed=5, top_k=40, logprobs=k))
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.token_ids)
        expected = reference(prompt, answer, params)[len(prompt) - 1 : -1]
        found = output.logprobs
        assert found is not None and found.token_ids.tolist() == answer
        chosen = expected[np.arange(len(answer)), answer]
        np.testing.assert_allclose(found.logprobs, chosen, atol=1e-4)
        np.testing.assert_array_equal(found.ranks, (expected > chosen[:, None]).sum(-1) + 1)
        assert found.top_ids.shape == (len(answer), SPEC.vocab_size if k < 0 else k)
        if k > 0:
            np.testing.assert_array_equal(found.top_ids, np.argsort(-expected, -1, kind="stable")[:, :k])
        np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(expected, found.top_ids, -1), atol=1e-4)


@pytest.mark.parametrize("k", [2, -1])
@pytest.mark.parametrize("changes", [{}, {"max_num_batched_tokens": 17}], ids=["whole", "chunks"])
def test_prompt_logprobs_hold_across_chunks_and_on_a_prefix_hit(make_engines, params, changes, k):
    engine = make_engines(max_num_seqs=8, **changes)
    prompt = [(i * i + 3) % 250 for i in range(150)]
    sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0, prompt_logprobs=k)
    expected = reference(prompt, [], params)[:-1]
    for _ in range(2):
        [output] = complete(engine, [prompt], sampling)
        found = output.prompt_logprobs
        assert found is not None and found.token_ids.tolist() == prompt[1:]
        np.testing.assert_allclose(found.logprobs, expected[np.arange(149), prompt[1:]], atol=1e-4)
        if k < 0:
            np.testing.assert_allclose(found.top_logprobs, expected, atol=1e-4)
        else:
            np.testing.assert_array_equal(found.top_ids, np.argsort(-expected, -1, kind="stable")[:, :k])
    [other] = complete(engine, [prompt], SamplingParams(max_tokens=2))
    assert other.num_cached_tokens > 0, "the pages were kept for others"
    assert other.prompt_logprobs is None and other.logprobs is None


def test_processed_logprobs_are_of_what_is_drawn_from(make_engines):
    engine = make_engines(max_num_seqs=8, logprobs_mode="processed")
    [output] = complete(engine, [[1, 2]], SamplingParams(max_tokens=6, ignore_eos=True, seed=1, top_k=1, logprobs=2))
    assert output.logprobs is not None
    np.testing.assert_allclose(output.logprobs.logprobs, 0.0, atol=1e-6)
    assert np.isneginf(output.logprobs.top_logprobs[:, 1]).all()


# ---------------------------------------------------------------- several answers


def test_choices_differ_are_reproducible_and_share_the_prompt(make_engines):
    engine = make_engines(max_num_seqs=8)
    prompt = [(i * 3) % 250 for i in range(100)]
    params = SamplingParams(n=5, seed=4, max_tokens=20, ignore_eos=True)
    before = engine.stats().kv_pages_used
    [output] = generate([prompt], params, engine=engine, progress=False)
    answers = [tuple(choice.token_ids) for choice in output.choices]
    assert [choice.index for choice in output.choices] == list(range(5)) and len(set(answers)) == 5
    assert output.choices[0].token_ids == output.token_ids
    [again] = generate([prompt], params, engine=engine, progress=False)
    assert [tuple(choice.token_ids) for choice in again.choices] == answers
    [one] = generate([prompt], SamplingParams(seed=4, max_tokens=20, ignore_eos=True), engine=engine, progress=False)
    assert tuple(one.token_ids) == answers[0] and [choice.token_ids for choice in one.choices] == [one.token_ids]
    assert all(choice.num_cached_tokens >= 96 for choice in output.choices[1:])
    assert engine.stats().kv_pages_used == before


def test_best_of_gives_the_likeliest_answers_first(make_engines):
    engine = make_engines(max_num_seqs=8)
    params = SamplingParams(n=6, seed=4, max_tokens=10, ignore_eos=True, logprobs=0)
    [everything] = generate([[5, 6]], params, engine=engine, progress=False)
    means = sorted((float(choice.logprobs.logprobs.mean()) for choice in everything.choices), reverse=True)
    best = SamplingParams(n=2, best_of=6, seed=4, max_tokens=10, ignore_eos=True)
    [output] = generate([[5, 6]], best, engine=engine, progress=False)
    by_text = {tuple(choice.token_ids): float(choice.logprobs.logprobs.mean()) for choice in everything.choices}
    assert [by_text[tuple(choice.token_ids)] for choice in output.choices] == means[:2]
    assert [choice.index for choice in output.choices] == [0, 1]
    assert output.logprobs is None, "they were not asked for"


def test_several_answers_are_refused_where_one_is_given_and_beyond_the_slots(make_engines):
    engine = make_engines(max_num_seqs=8)
    several = Request(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(n=2))
    with pytest.raises(RequestError, match="submit_choices") as error:
        engine.submit(several)
    assert error.value.param == "n"
    with pytest.raises(RequestError, match="at most 8 sequences") as error:
        generate([[1]], SamplingParams(best_of=9), engine=engine, progress=False)
    assert error.value.param == "best_of"
    with pytest.raises(RequestError, match="same"):
        SamplingParams(n=2, temperature=0)


@pytest.mark.parametrize(
    "bad", [{"allowed_token_ids": [264]}, {"logit_bias": {264: 1}}, {"stop_token_ids": [999]}, {"bad_words": ["x" * 9]}]
)
def test_ids_outside_the_vocabulary_and_long_bad_words_are_refused_by_name(make_engines, bad):
    with pytest.raises(RequestError) as error:
        generate([[1]], SamplingParams(**bad), engine=make_engines(max_num_seqs=8), progress=False)
    assert error.value.param == next(iter(bad))


def test_a_fresh_engine_s_slots_ask_for_nothing(make_engine):
    """A plain request in a slot that was never used before, beside one with controls."""
    greedy = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    alone = [complete(make_engine(), [prompt], greedy)[0].token_ids for prompt in PROMPTS[:1]]
    mixed = complete(make_engine(), PROMPTS[:2], [greedy, params_of("penalties", max_tokens=20)])
    assert mixed[0].token_ids == alone[0]
