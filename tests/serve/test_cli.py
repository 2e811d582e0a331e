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
        "--deterministic --fast-norm --generation-config vllm"
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
        fast_norm=True,
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


FILES = {
    "c.yaml": "port: 9\nmax_model_len: 50\nserved-model-name: [a, b]\nenable-prefix-caching: false\nseed: null\n",
    "c.json": '{"port": 9, "max-model-len": 50, "served_model_name": ["a", "b"], "no-enable-prefix-caching": true}',
    "c.toml": 'port = 9\nmax-model-len = 50\nserved-model-name = ["a", "b"]\nenable_prefix_caching = false\n',
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_says_what_flags_say(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    config, options = parse(["--config", str(tmp_path / name)], {})
    assert (options.port, options.served_model_names) == (9, ("a", "b"))
    assert config == EngineConfig(max_model_len=50, enable_prefix_caching=False)


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("port: 1\nhost: a\nseed: 1\npreset: tgi\ndeterministic: true\n")
    environment = {"JAXCB_CONFIG": str(file), "JAXCB_PORT": "2", "JAXCB_HOST": "b", "JAXCB_CACHE": "/x"}
    config, options = parse(["--port", "3"], environment)
    assert (options.port, options.host, config.seed) == (3, "b", 1)
    assert config.deterministic and config.waiting_served_ratio > 0, "of the preset"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"JAXCB_API_KEY": "-k"}, ("api_key", "-k")),
        ({"JAXCB_ADMIN_API_KEY": "a"}, ("admin_api_key", "a")),
        ({"JAXCB_SERVED_MODEL_NAME": "a b"}, ("served_model_names", ("a", "b"))),
        ({"JAXCB_ALLOWED_ORIGINS": '["https://x", "*"]'.replace(" ", "")}, ("allowed_origins", ("https://x", "*"))),
        ({"JAXCB_MODEL": "m"}, ("model", "m")),
        ({"JAXCB_DETERMINISTIC": "1"}, ("deterministic", True)),
        ({"JAXCB_DETERMINISTIC": "off"}, ("deterministic", False)),
        ({"JAXCB_ENABLE_PREFIX_CACHING": "no"}, ("enable_prefix_caching", False)),
        ({"JAXCB_NO_ENABLE_PREFIX_CACHING": "no"}, ("enable_prefix_caching", True)),
        ({"JAXCB_KV_CACHE_MEMORY_BYTES": "1k"}, ("kv_cache_memory_bytes", 1000)),
    ],
)
def test_every_flag_has_a_variable(environment: dict[str, str], expected: tuple[str, object]) -> None:
    config, options = parse([], environment)
    name, value = expected
    assert getattr(options if hasattr(options, name) else config, name) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("port", "map flags"),
        ("- port", "map flags"),
        ("porto: 1", "--porto"),
        ("config: x", "--config"),
        ("port: [1]", "one value"),
        ("deterministic: 1", "true or false"),
        ("{", "can't read"),
    ],
)
def test_a_config_file_that_can_not_work_is_a_config_error(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse(["--config", str(file)], {})


@pytest.mark.parametrize("file", ["/no/such.yaml", "/no/such.ini"])
def test_a_config_file_must_be_there_and_of_a_known_kind(file: str) -> None:
    with pytest.raises(ConfigError, match=file):
        parse(["--config", file], {})


def test_variables_that_can_not_be_read_are_named() -> None:
    with pytest.raises(ConfigError, match="JAXCB_DETERMINISTIC"):
        parse([], {"JAXCB_DETERMINISTIC": "perhaps"})


def test_the_model_may_stand_alone() -> None:
    assert parse(["m", "--port", "1"], {"JAXCB_SERVED_MODEL_NAME": "a"})[0].model == "m"
    with pytest.raises(ConfigError, match="twice"):
        parse(["m", "--model", "n"], {})


def test_more_of_vllms_flags_work() -> None:
    flags = (
        "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --enable-prefix-caching "
        "--async-scheduling --kv-cache-dtype auto --scheduling-policy priority --logprobs-mode processed_logprobs "
        "--allowed-origins *"
    )
    config, options = parse(flags.split(), {})
    assert config == EngineConfig(policy="priority", logprobs_mode="processed")
    assert (options.tool_call_parser, options.reasoning_parser, options.allowed_origins) == ("hermes", "qwen3", ("*",))
    assert parse(["--chat-template", "{{ messages }}"], {})[1].chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("flags", "param"),
    [
        ("--admin-api-key a --api-key a", "admin_api_key"),
        ("--kv-cache-dtype bfloat16 --dtype float32", "kv_cache_dtype"),
        ("--allowed-origins [x", "allowed_origins"),
    ],
)
def test_flags_that_contradict_each_other_are_config_errors(flags: str, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(flags.split(), {})
    assert caught.value.param == param
