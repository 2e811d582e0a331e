"""Flags of ``python -m jaxcb.serve``."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError
from jaxcb.scheduler import SchedulingKnobs
from jaxcb.serve.cli import parse


def test_no_flags_are_the_engines_own_defaults() -> None:
    config, options = parse([])
    assert config == EngineConfig()
    assert (options.host, options.port, options.drain_timeout_s) == ("127.0.0.1", 8000, 30.0)
    assert options.api_key is None and options.chat_template is None and options.served_model_names == ()


def test_flags_reach_the_engines_settings() -> None:
    flags = (
        "--model m --revision r --dtype float32 --max-model-len 100 --max-num-seqs 4 --max-num-batched-tokens 64 "
        "--block-size 32 --num-kv-pages 10 --kv-cache-memory-bytes 2GiB --gpu-memory-utilization 0.5 "
        "--no-enable-prefix-caching --no-run-ahead --max-waiting 7 --seed 9 --backend xla "
        "--deterministic --generation-config vllm"
    )
    config, _ = parse(flags.split())
    assert config == EngineConfig(
        model="m",
        revision="r",
        dtype="float32",
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        page_size=32,
        num_kv_pages=10,
        kv_cache_memory_bytes=2 * 2**30,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        run_ahead=False,
        max_waiting=7,
        seed=9,
        backend="xla",
        deterministic=True,
        generation_config="none",
    )


def test_every_scheduling_knob_has_a_flag() -> None:
    flags = (
        "--policy sjf --length-predictor max_tokens --priority-ageing 3 --max-overtakes 5 --max-passes 2 "
        "--batching static --prefill-first --max-chunk-tokens 9 --max-num-partial-prefills 2 "
        "--long-prefill-token-threshold 0 --exact-fill --itl-target-ms 30 --waiting-served-ratio 0.3 "
        "--max-waiting-steps 4 --reservation guaranteed --admission-watermark 0.1 --preemption swap "
        "--victim least_progress --host-kv-gib 1.5"
    )
    config, _ = parse(flags.split())
    unchunked, _ = parse(["--no-enable-chunked-prefill"])
    assert not unchunked.enable_chunked_prefill and config.host_kv_gib == 1.5
    same = [f.name for f in fields(SchedulingKnobs) if getattr(config, f.name) == f.default]
    assert same == ["enable_chunked_prefill"]


def test_vllms_names_work_too() -> None:
    config, _ = parse(["--num-gpu-blocks-override", "10", "--no-async-scheduling"])
    assert config == EngineConfig(num_kv_pages=10, run_ahead=False)


def test_server_flags(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    flags = "--host ::1 --port 0 --api-key k --served-model-name a b --drain-timeout 1.5 --log-level debug"
    _, options = parse([*flags.split(), "--chat-template", f"{tmp_path}/t.jinja"])
    assert (options.host, options.port, options.api_key, options.log_level) == ("::1", 0, "k", "debug")
    assert (options.served_model_names, options.drain_timeout_s) == (("a", "b"), 1.5)
    assert options.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1000", 1000), ("512M", 512_000_000), ("2GiB", 2**31), ("1k", 1000), ("3gb", 3_000_000_000)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse(["--kv-cache-memory-bytes", text])[0].kv_cache_memory_bytes == num_bytes


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        ("--max-num-seqs 0", "max_num_seqs"),
        ("--block-size 12", "page_size"),
        ("--gpu-memory-utilization 2", "gpu_memory_utilization"),
        ("--port 70000", "port"),
        ("--drain-timeout -1", "drain_timeout"),
        ("--drain-timeout nan", "drain_timeout"),
        ("--api-key ", "api_key"),
        ("--chat-template /no/such/file", "chat_template"),
    ],
)
def test_values_that_can_not_work_are_config_errors(flags: str, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags.split(" "))
    assert caught.value.param == param


@pytest.mark.parametrize("flags", ["--max-num-seqs many", "--mode m", "--dtype int4", "--kv-cache-memory-bytes lots"])
def test_flags_that_can_not_be_read_end_with_status_2(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flags.split())
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_help_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"])
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) < 100
