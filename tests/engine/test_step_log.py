import json

import pytest

from jaxcb.errors import ConfigError
from jaxcb.request import SamplingParams
from tests.engine.conftest import SPEC
from tests.engine.run import complete


@pytest.mark.parametrize(
    ("run_ahead", "backend"), [(False, "xla"), (True, "xla"), pytest.param(True, "native", marks=pytest.mark.native)]
)
def test_every_step_gets_a_line_and_the_times_add_up_to_the_run(make_engine, tmp_path, run_ahead, backend):
    file = tmp_path / "steps.jsonl"
    engine = make_engine(step_log=str(file), run_ahead=run_ahead, enable_prefix_caching=False, backend=backend)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    outputs = complete(engine, [[1 + i] * (60 + i) for i in range(4)], sampling)
    wall_s = max(output.finished_s for output in outputs) - min(output.arrival_s for output in outputs)
    num_steps = engine.stats().steps
    engine.shutdown()
    header, *steps = map(json.loads, file.read_text().splitlines())
    assert header["weight_bytes"] == 4 * SPEC.num_params
    if backend == "xla":
        assert (header["decode_sizes"], header["mixed_sizes"]) == ([8], [128])
        assert all(step["padded_tokens"] in (8, 128) for step in steps)
    else:  # these kernels skip padding
        assert header["decode_sizes"] == header["mixed_sizes"] == []
        assert all(step["padded_tokens"] == step["tokens"] for step in steps)
    assert [step["step"] for step in steps] == list(range(num_steps))
    prompts = sum(60 + i for i in range(4))
    decodes = sum(step["decode_rows"] for step in steps)
    assert sum(step["tokens"] for step in steps) >= prompts + 4 * 19 and decodes >= 4 * 19
    first = steps[0]
    assert (first["tokens"], first["kv_tokens"], first["pairs"]) == (60, 60, 60 * 61 // 2) or first["tokens"] == 128
    assert all(step["wall_ms"] > 0 for step in steps)
    assert 0 < sum(step["wall_ms"] for step in steps) / 1e3 <= wall_s * 1.5 + 0.1


def test_idle_time_is_not_counted_as_a_step(make_engine, tmp_path):
    import time

    file = tmp_path / "steps.jsonl"
    engine = make_engine(step_log=str(file))
    sampling = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0)
    complete(engine, [[1, 2, 3]], sampling)
    time.sleep(0.8)
    complete(engine, [[1, 2, 3]], sampling)
    engine.shutdown()
    steps = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert len(steps) >= 6 and max(step["wall_ms"] for step in steps) < 700


def test_a_file_that_cannot_be_written_is_refused(make_engine, tmp_path):
    with pytest.raises(ConfigError, match="step_log: can't write"):
        make_engine(step_log=str(tmp_path / "no" / "such" / "folder"))
