import dataclasses
import json
import math

import numpy as np
import pytest

from jaxcb.errors import ConfigError
from jaxcb.sim import StepLoad, StepTimeModel
from jaxcb.sim.calibrate import FIGURES, padded_tokens, read_step_log
from tests.sim.runs import round_model

TRUE = round_model(kv_bandwidth=1e12, attention_flops=50e12)
HEADER = {name: getattr(TRUE, name) for name in FIGURES} | {"decode_sizes": [8, 64], "mixed_sizes": [128, 512]}


def log_lines(num_steps, noise=0.0, seed=0):
    """Steps of a device that keeps to TRUE: decodes of many contexts, and chunks up to far past the knee."""
    print("seed", seed)
    random = np.random.default_rng(seed)
    lines = [json.dumps(HEADER)]
    for step in range(num_steps):
        tokens = int(random.integers(1, 500)) if step % 2 else int(random.integers(1, 64))
        kv_tokens = int(random.integers(100, 60_000))
        pairs = kv_tokens * 3 if step % 2 == 0 else int(random.integers(1, 200)) * kv_tokens
        padded = padded_tokens(tokens, (128, 512) if step % 2 else (8, 64))
        wall_s = TRUE.step_s(StepLoad(padded, kv_tokens, pairs)) * (1 + noise * random.standard_normal())
        record = {"step": step, "tokens": tokens, "padded_tokens": padded, "decode_rows": 0}
        lines.append(json.dumps(record | {"kv_tokens": kv_tokens, "pairs": pairs, "wall_ms": wall_s * 1e3}))
    return lines


def fitted(tmp_path, lines):
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    return StepTimeModel.fit(tmp_path / "log.jsonl")


def test_a_fit_finds_the_rates_behind_exact_times(tmp_path):
    model = fitted(tmp_path, log_lines(200))
    for field in dataclasses.fields(TRUE):
        assert getattr(model, field.name) == pytest.approx(getattr(TRUE, field.name), rel=1e-3), field.name
    assert model.knee_tokens == pytest.approx(100, rel=1e-3)


def test_a_fit_to_noisy_times_predicts_steps_that_it_has_not_seen(tmp_path):
    model = fitted(tmp_path, log_lines(400, noise=0.05))
    for tokens, kv_tokens, pairs in ((1, 10_000, 10_000), (64, 50_000, 50_000), (512, 20_000, 10**6)):
        load = StepLoad(tokens, kv_tokens, pairs)
        assert model.step_s(load) == pytest.approx(TRUE.step_s(load), rel=0.04)


def test_what_costs_nothing_gets_an_infinite_rate(tmp_path):
    lines = [json.dumps(HEADER)]
    for step in range(20):
        record = {"step": step, "tokens": step, "padded_tokens": step, "decode_rows": 0, "kv_tokens": 7 * step % 5}
        lines.append(json.dumps(record | {"pairs": step % 3, "wall_ms": 2.0 + step}))
    model = fitted(tmp_path, lines)
    assert model.kv_bandwidth > 1e12 and model.step_s(StepLoad(5, 10**6, 10**6)) == pytest.approx(7e-3, rel=1e-3)
    assert math.isfinite(model.flops)


def test_padding_goes_to_the_next_compiled_size(tmp_path):
    (tmp_path / "log.jsonl").write_text("\n".join(log_lines(10)))
    log = read_step_log(tmp_path / "log.jsonl")
    assert (log.decode_sizes, log.mixed_sizes, len(log.steps)) == ((8, 64), (128, 512), 10)
    assert [padded_tokens(n, log.mixed_sizes) for n in (1, 128, 129)] == [128, 128, 512]
    assert padded_tokens(9, ()) == 9


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        (log_lines(3), "3 steps is too short to fit: at least 8"),
        ([*log_lines(10), "{"], "line 12: not a line of a step log"),
        ([*log_lines(10), '{"step": 3}'], "line 12: not a line of a step log .KeyError: 'tokens'"),
        (["[]"], "line 1: not a line of a step log"),
    ],
)
def test_a_log_that_cannot_be_used_is_refused_by_line(tmp_path, lines, message):
    with pytest.raises(ConfigError, match=message):
        fitted(tmp_path, lines)


def test_a_log_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't read the step log"):
        StepTimeModel.fit(tmp_path / "nothing.jsonl")
