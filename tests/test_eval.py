"""The model that lm-eval is given: it scores and writes as the engine does, and cuts texts as lm-eval does."""

from __future__ import annotations

import pytest

pytest.importorskip("lm_eval", reason="the harness is an extra of its own")

import json

import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from jaxcb.errors import ConfigError, RequestError
from jaxcb.eval import JaxcbLM, sampling_of
from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC, backend, make_engines, params, tokenizer  # noqa: F401  # fixtures
from tests.step.forward import teacher_forced


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=args, idx=i) for i, args in enumerate(arguments)]


@pytest.fixture
def model(make_engines, monkeypatch):  # noqa: F811  # the fixture
    engine = make_engines()
    lm = JaxcbLM(engine, progress=False)
    monkeypatch.setattr(JaxcbLM, "prefix_token_id", 1)
    return lm


def by_hand(weights, ids: list[int], start: int) -> float:
    """Log-probability of ``ids[start:]``."""
    logits = np.asarray(teacher_forced(SPEC, weights, ids), np.float64)
    table = (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - logits.max(-1, keepdims=True)
    )
    return float(sum(table[i - 1, ids[i]] for i in range(start, len(ids))))


def test_likelihoods_are_those_of_the_continuation(model, params):  # noqa: F811
    encode = model.engine.tokenizer.encode
    pairs = [("to the", " end"), ("to the ", "end"), ("", "end"), ("x" * 900, "y")]
    values = model.loglikelihood(instances("loglikelihood", pairs))
    whole = encode("to the end")
    assert values[0][0] == pytest.approx(by_hand(params, whole, len(encode("to the"))), abs=1e-2)
    assert values[1] == pytest.approx(values[0], abs=1e-3), "a space at the end belongs to what follows"
    assert values[2][0] == pytest.approx(by_hand(params, [1, *encode("end")], 1), abs=1e-2)
    long = encode("x" * 900)[-(model.max_length - 1) :] + encode("y")
    assert values[3][0] == pytest.approx(by_hand(params, long, len(long) - 1), abs=1e-2)


def test_a_text_of_several_windows_is_scored_token_by_token_once(model, params, monkeypatch):  # noqa: F811
    text = "the end of it all"
    [short] = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    ids = [1, *model.engine.tokenizer.encode(text)]
    assert short == pytest.approx(by_hand(params, ids, 1), abs=1e-2)
    monkeypatch.setattr(JaxcbLM, "max_length", 7)
    asked = []
    score = model.engine.score
    monkeypatch.setattr(model.engine, "score", lambda pairs: asked.extend(pairs) or score(pairs))
    [windows] = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    assert [token for _, continuation in asked for token in continuation] == ids[1:]
    assert max(len(context) + len(continuation) for context, continuation in asked) <= 7
    expected = sum(by_hand(params, [*context, *continuation], len(context)) for context, continuation in asked)
    assert windows == pytest.approx(expected, abs=2e-2) and windows != pytest.approx(short, abs=1e-2)


def test_answers_end_before_their_stop_strings(model):
    wanted = {"until": ["a", "e"], "max_gen_toks": 40, "do_sample": False}
    [text, other] = model.generate_until(instances("generate_until", [("to the", wanted), ("x" * 900, wanted)]))
    assert "a" not in text and "e" not in text and "a" not in other


@pytest.mark.parametrize(
    ("wanted", "params"),
    [
        ({"until": "\n"}, {"stop": ("\n",), "max_tokens": 256, "temperature": 0.0}),
        (
            {"until": [], "max_gen_toks": 3, "do_sample": False, "temperature": 0.7},
            {"max_tokens": 3, "temperature": 0.0},
        ),
        ({"do_sample": True, "top_p": 0.5}, {"temperature": 1.0, "top_p": 0.5, "max_tokens": 256}),
        ({"temperature": 0.3, "max_new_tokens": 9}, {"temperature": 0.3, "max_tokens": 9}),
    ],
)
def test_generation_arguments_are_honoured(wanted, params):  # noqa: F811
    assert sampling_of(wanted) == SamplingParams(**params)


def test_what_is_not_known_is_refused(model):
    with pytest.raises(RequestError, match="num_beams"):
        sampling_of({"num_beams": 4})
    with pytest.raises(ConfigError, match="either"):
        JaxcbLM(model.engine, model="x")


def test_the_harness_runs_a_task_of_a_file(model, tmp_path, monkeypatch):
    """A multiple choice of two, whose metric is computed by lm-eval."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    docs = [{"q": f"question {i}", "choices": ["yes", "no"], "answer": i % 2} for i in range(4)]
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    (tmp_path / "yes_no.yaml").write_text(
        f"""
task: yes_no
dataset_path: json
dataset_kwargs:
  data_files: {{"test": "{tmp_path / "docs.jsonl"}"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
    )
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = lm_eval.simple_evaluate(model, tasks=["yes_no"], task_manager=tasks, bootstrap_iters=0)
    assert 0.0 <= results["results"]["yes_no"]["acc,none"] <= 1.0
    assert results["n-samples"]["yes_no"]["effective"] == 4
