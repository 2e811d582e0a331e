"""The server process around the fake engine: sockets, signals, start-up errors, and the real openai client."""

from __future__ import annotations

import asyncio
import http.client
import json
import shlex
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .process import FAKE, ServerProcess, run_to_end
from .sse import events

pytestmark = pytest.mark.xdist_group("serve_process")  # one process, shared by the tests of this file


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(FAKE, "--api-key", "k") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        yield client


def gauge(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith(name + "{")]
    return float(line.rpartition(" ")[2])


def until_idle(url: str) -> None:
    deadline_s = time.monotonic() + 5
    while gauge(url, "vllm:num_requests_running") or gauge(url, "vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline_s, "requests are still running"
        time.sleep(0.05)


def test_the_banner_holds_the_facts_and_a_curl_that_works() -> None:
    with ServerProcess(FAKE, "--served-model-name", "mine") as server:
        for fact in (
            "mine",
            "6.00 GB in float32",
            "64 pages of 16 tokens: 1,024 tokens",
            "8 requests of 128 tokens",
            "128 tokens a sequence",
            "tools: told as text, read as hermes; reasoning: none",
            f"OPENAI_BASE_URL={server.url}/v1 ANTHROPIC_BASE_URL={server.url}",
            "decode 1, 4, 8",
        ):
            assert fact in server.banner
        _, url, _, header, _, body = shlex.split(server.banner.splitlines()[-1])
        name, value = header.split(": ")
        assert events(httpx.post(url, content=body, headers={name: value}).text)


def test_openai_client_chats(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi!"}]
    whole = client.chat.completions.create(model="fake-model", messages=messages)
    assert whole.choices[0].message.content == "user:hi"
    stream = client.chat.completions.create(
        model="fake-model", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "user:hi"
    assert last.usage == whole.usage


def test_openai_client_completes(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="fake-model", prompt=["ab", "cd"], max_tokens=3, extra_body={"top_k": 1})
    assert [choice.text for choice in whole.choices] == ["aba", "cdc"]
    stream = client.completions.create(model="fake-model", prompt="ab", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "aba"
    assert [model.id for model in client.models.list()] == ["fake-model"]


def test_openai_client_understands_the_errors(server: ServerProcess, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        client.completions.create(model="nope", prompt="a")
    assert not_found.value.code == "model_not_found"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="fake-model", prompt="a", suffix="b", stream=stream)
        assert bad.value.param == "suffix"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_64_streams_of_the_openai_client_at_once(server: ServerProcess) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> str:
        stream = await client.completions.create(model="fake-model", prompt=f"<{index}>", max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
            return await asyncio.gather(*(one(client, index) for index in range(64)))

    assert asyncio.run(all_of_them()) == [(f"<{index}>" * 20)[:20] for index in range(64)]
    until_idle(server.url)


@pytest.mark.parametrize("stream", [False, True])
def test_closed_sockets_free_their_requests(server: ServerProcess, stream: bool) -> None:
    connections = [http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(16)]
    body = json.dumps({"prompt": ["abc", "de"], "max_tokens": 100, "stream": stream})
    headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    for connection in connections:
        connection.request("POST", "/v1/completions", body, headers)
    while gauge(server.url, "vllm:num_requests_running") < 32:
        time.sleep(0.01)
    for connection in connections:
        connection.close()
    until_idle(server.url)


@pytest.mark.parametrize("raw", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 10_000_000 + b"\r\n\r\n", b""])
def test_broken_http_does_no_harm(server: ServerProcess, raw: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=1) as sock:
        try:
            sock.sendall(raw)
            sock.recv(100)
        except (ConnectionError, TimeoutError):
            pass  # closing on us is a fine answer
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_head_without_end_is_refused_before_it_fills_the_memory(server: ServerProcess) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(OSError):  # reset or broken pipe, whichever the system says
            for _ in range(10_000):
                sock.sendall(b"X-Filler: " + b"x" * 1000 + b"\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX: " + b"x" * 70_000)
        assert sock.recv(1000).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{server.url}/health", headers={"X-Long": "x" * 30_000}).status_code == 200


def test_finished_requests_leave_a_line_in_the_log(server: ServerProcess, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake-model", prompt="ab", max_tokens=3)
    [line] = [line for line in server.log().splitlines() if f"{answer.id}-0" in line]
    assert "length after 2 + 3 tokens (1 cached" in line
    assert "Bearer" not in server.log()


def stream_in_background(url: str, **fields: Any) -> tuple[threading.Thread, dict[str, Any]]:
    """Start a stream of 100 tokens (2 seconds) and return when its first chunk is there."""
    result: dict[str, Any] = {"text": ""}
    begun = threading.Event()

    def read() -> None:
        body = {"prompt": "abc", "max_tokens": 100, "stream": True, **fields}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as response:
            result["status"] = response.status_code
            for piece in response.iter_text():
                result["text"] += piece
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(10)
    return thread, result


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    with ServerProcess(FAKE) as server:
        thread, result = stream_in_background(server.url)
        idle = httpx.Client()  # a connection kept alive must not hold the server up
        idle.get(f"{server.url}/health")
        server.send_signal(number)
        time.sleep(0.5)
        assert server.process.poll() is None
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert server.wait() == 0
        thread.join()
        assert "Traceback" not in server.log()
    chunks = events(result["text"])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ("abc" * 34)[:100]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_body_that_is_still_being_sent_does_not_hold_the_server_up() -> None:
    with ServerProcess(FAKE, "--drain-timeout", "20") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b'Content-Length: 1000\r\n\r\n{"prompt": '
            )
            time.sleep(0.3)
            server.send_signal(signal.SIGTERM)
            assert sock.recv(1000).startswith(b"HTTP/1.1 503")
        assert server.wait(10) == 0
        assert "Traceback" not in server.log()


def test_the_drain_timeout_cuts_requests_short_with_an_error() -> None:
    with ServerProcess(FAKE, "--drain-timeout", "0.2") as server:
        thread, result = stream_in_background(server.url)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        thread.join()
        assert "Traceback" not in server.log()
    assert events(result["text"])[-1]["error"]["code"] == "engine_stopped"


def test_a_second_signal_ends_the_process_at_once() -> None:
    with ServerProcess(FAKE) as server:
        stream = http.client.HTTPConnection("127.0.0.1", server.port)
        body = json.dumps({"prompt": "abc", "max_tokens": 100})
        stream.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        while gauge(server.url, "vllm:num_requests_running") < 1:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 128 + signal.SIGTERM


def test_a_port_in_use_is_one_line_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_to_end(FAKE, "--port", str(port))
    assert result.returncode == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith(f"error: can't listen on 127.0.0.1 port {port}: Address already in use.")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--model missing --port 0", "model 'missing' is not a directory"),
        ("--max-num-seqs 0", "max_num_seqs must be at least 1, got 0"),
        ("--max-num-seqs 64 --max-num-batched-tokens 8", "must be at least max_num_seqs"),
        ("--host no.such.host.invalid", "can't listen on no.such.host.invalid"),
        ("--chat-template /no/such/file", "No such file"),
    ],
)
def test_what_can_not_work_is_one_line_and_status_1(flags: str, text: str) -> None:
    result = run_to_end(FAKE, *flags.split())
    assert result.returncode == 1
    [line] = result.stderr.splitlines()
    assert line.startswith("error: ") and text in line


def test_an_ipv6_address_is_served() -> None:
    with ServerProcess(FAKE, "--host", "::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert httpx.get(f"{server.url}/health").status_code == 200
