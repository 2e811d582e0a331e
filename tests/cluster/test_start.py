"""Engines on devices of their own behind the real server, and behind generate(): the same answers as one engine's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxcb import cluster
from jaxcb.cluster.start import of_engine
from jaxcb.config import Backend, EngineConfig
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError
from jaxcb.generate import generate
from jaxcb.request import SamplingParams
from tests.serve.process import REAL, ROOT, ServerProcess
from tests.serve.real_server import write_served_model

SETTINGS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "num_kv_pages": 64,
    "decode_buckets": (),
    "mixed_buckets": (),
}
PROMPTS = [f"{'the same beginning ' * 5}{i}" for i in range(12)]
WANTED = [
    {"max_tokens": 12, "ignore_eos": True, "temperature": 0.8 * (i % 2), "seed": i, "n": 1 + i % 2} for i in range(12)
]

pytestmark = pytest.mark.xdist_group("data_parallel")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("served") / "model")


def of_one_engine(model: Path, backend: Backend) -> list[list[str]]:
    """Its answers."""
    config = EngineConfig(model=model, backend=backend, **SETTINGS)
    outputs = generate(PROMPTS, [SamplingParams(**wanted) for wanted in WANTED], config=config, progress=False)
    return [[choice.text for choice in output.choices] for output in outputs]


def flags() -> list[str]:
    named = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items() if not name.endswith("buckets")]
    return [*named, "--decode-buckets", "--mixed-buckets", "--backend=native", "--data-parallel-size=2"]


def test_a_server_of_two_engines_answers_as_one_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = of_one_engine(model, "native")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    files = [f"--step-log={tmp_path / 'steps.jsonl'}", "--admin-api-key=admin"]
    with ServerProcess(REAL, str(model), *flags(), *files) as server:
        assert "2 behind one queue; what follows is of each" in server.banner

        def ask(index: int) -> list[str]:
            body = {"prompt": PROMPTS[index], **WANTED[index]}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
            return [choice["text"] for choice in answer["choices"]]

        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(ask, range(12))) == texts
        health = httpx.get(f"{server.url}/health").json()
        assert health == {"status": "ok", "engines": {"0": "ok", "1": "ok"}}
        assert httpx.get(f"{server.url}/load").json()["num_running"] == 0
        ended = {"0": 0.0, "1": 0.0, "queue": 0.0}
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
            for sample in family.samples:
                if sample.name == "vllm:request_success_total":
                    ended[sample.labels["engine"]] += sample.value
                if sample.name == "jaxcb:compiles_after_start_total":
                    assert sample.value == 0
        assert ended["0"] > 3 and ended["1"] > 3 and ended["0"] + ended["1"] == 18 and not ended["queue"]
        rows = httpx.post(f"{server.url}/v1/embeddings", json={"input": PROMPTS}, timeout=60).json()["data"]
        assert len(rows) == 12
        key = {"Authorization": "Bearer admin"}
        for path in ("pause", "resume", "reset_prefix_cache"):
            assert httpx.post(f"{server.url}/{path}", headers=key).status_code == 200
        assert ask(1) == texts[1]
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    for index in (0, 1):
        assert (tmp_path / f"steps-{index}.jsonl").read_text().count("\n") > 3


_SCRIPT = """
import json, sys
from jaxcb.config import EngineConfig
from jaxcb.generate import generate
from jaxcb.request import SamplingParams
settings, prompts, wanted = json.loads(sys.stdin.read())
settings |= {"decode_buckets": (), "mixed_buckets": ()}
config = EngineConfig(data_parallel_size=2, backend="xla", **settings)
outputs = generate(prompts, [SamplingParams(**one) for one in wanted], config=config, progress=False)
import jaxcb.generate as module
engine = module._shared
places = [sorted({d.id for leaf in __import__("jax").tree.leaves(e._runner.params) for d in leaf.devices()})
          for e in engine.engines]
print(json.dumps({
    "texts": [[choice.text for choice in output.choices] for output in outputs],
    "places": places,
    "ended": [sum(stats.finished.values()) for stats in engine.stats_by_engine().values()],
}))
"""


def test_generate_takes_two_engines_and_each_lies_on_its_own_device(model: Path) -> None:
    texts = of_one_engine(model, "xla")
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        input=json.dumps([{**SETTINGS, "model": str(model)}, PROMPTS, WANTED]),
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["texts"] == texts
    assert result["places"] == [[0], [1]]
    assert sum(result["ended"]) == 18 and min(result["ended"]) > 3


def test_more_devices_than_there_are_are_refused_at_the_start(model: Path) -> None:
    count = jax.local_device_count() + 1
    with pytest.raises(ConfigError, match=rf"data_parallel_size {count} needs {count} devices, jax has {count - 1}"):
        cluster.start(EngineConfig(model=model, data_parallel_size=count, **SETTINGS))
    size = 2 * count
    with pytest.raises(ConfigError, match=rf"with tensor_parallel_size 2 needs {size} devices"):
        cluster.start(EngineConfig(model=model, data_parallel_size=count, tensor_parallel_size=2, **SETTINGS))


def test_one_engine_does_not_take_a_config_of_several(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"jaxcb\.cluster\.start starts 2"):
        Engine.start(EngineConfig(model=model, data_parallel_size=2, **SETTINGS), progress=False)
    with pytest.raises(ConfigError, match="data_parallel_size must be"):
        EngineConfig(data_parallel_size=0)


def test_each_engine_writes_files_of_its_own() -> None:
    config = EngineConfig(data_parallel_size=3, trace="/x/trace.json", event_log="events", max_waiting=7)
    second = of_engine(config, 1)
    assert (second.trace, second.event_log, second.step_log) == ("/x/trace-1.json", "events-1", None)
    assert second.data_parallel_size == 1 and second.max_waiting is None
