"""The whole path: a server process, the real engine, a tiny model, clients over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from scipy.special import log_softmax

from jaxcb.serve.__main__ import main

from .process import REAL, ServerProcess
from .real_server import FLAGS, LIMIT, PAGES, QUEUE, SHARED
from .sse import events
from .tiny_model import CHECKPOINT, EOS_ID, FIRST_ORDINARY_ID, VOCAB_SIZE

pytestmark = SHARED

GREEDY = {"temperature": 0, "ignore_eos": True}
ALIKE = {"temperature": 1, "top_k": 1, "ignore_eos": True}
"""As greedy, which refuses several answers: they would be one and the same."""


@pytest.fixture(scope="module")
def server(real_server: ServerProcess) -> ServerProcess:
    return real_server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client; after the test the server must be idle, alive, and give the answer it gave before."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        before = complete(client, "probe")
        yield client
        until_idle(client)
        assert client.get("/health").status_code == 200
        assert complete(client, "probe") == before


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    """The one choice of a greedy completion and its usage, without the parts that differ from call to call."""
    response = client.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    body = response.json()
    [choice] = body["choices"]
    usage = body["usage"]
    return {**choice, "prompt_tokens": usage["prompt_tokens"], "completion_tokens": usage["completion_tokens"]}


def refused(client: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json=fields, timeout=5)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert "Traceback" not in error["message"] and "/work" not in error["message"]
    return error


def metrics(client: httpx.Client) -> dict[str, float]:
    """Sample name (with the state or reason, if any) -> value."""
    samples = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            extra = sample.labels.get("state") or sample.labels.get("finished_reason")
            samples[sample.name if extra is None else f"{sample.name}/{extra}"] = sample.value
    return samples


def until_idle(client: httpx.Client) -> None:
    deadline_s = time.monotonic() + 10
    while True:
        now = metrics(client)
        busy = [now["vllm:num_requests_running"], now["vllm:num_requests_waiting"], now["jaxcb:kv_pages/used"]]
        if busy == [0, 0, 0]:
            break
        assert time.monotonic() < deadline_s, f"still running, waiting, pages in use: {busy}"
        time.sleep(0.05)
    assert now["vllm:kv_cache_usage_perc"] == 0
    assert now["jaxcb:kv_pages/cached"] + now["jaxcb:kv_pages/free"] == PAGES


def ordinary_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(FIRST_ORDINARY_ID, VOCAB_SIZE), k=count)


def test_64_streams_of_the_openai_client_at_once(server: ServerProcess, http: httpx.Client) -> None:
    prompts = [ordinary_ids(1 + index % 20, seed=index) for index in range(64)]

    async def one(client: openai.AsyncOpenAI, prompt: list[int]) -> tuple[str, str | None, int]:
        stream = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        *chunks, last = [chunk async for chunk in stream]
        assert last.usage is not None
        text = "".join(chunk.choices[0].text for chunk in chunks)
        return text, chunks[-1].choices[0].finish_reason, last.usage.completion_tokens

    async def together() -> list[tuple[str, str | None, int]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    answers = asyncio.run(together())
    assert [answer[1:] for answer in answers] == [("length", 40)] * 64
    for prompt, (text, _, _) in list(zip(prompts, answers, strict=True))[::8]:
        assert text == complete(http, prompt, max_tokens=40)["text"]


def test_the_context_limit_to_the_token(http: httpx.Client) -> None:
    """lm-evaluation-harness#2880, vllm#33418: off by one at the limit, and refusals that quoted another one."""
    one = complete(http, ordinary_ids(LIMIT - 1), max_tokens=1)
    assert (one["completion_tokens"], one["finish_reason"]) == (1, "length")
    ten = complete(http, ordinary_ids(LIMIT - 10), max_tokens=10)
    assert (ten["completion_tokens"], ten["finish_reason"]) == (10, "length")
    default = complete(http, ordinary_ids(LIMIT - 10))
    assert (default["completion_tokens"], default["text"]) == (10, ten["text"])
    for count, max_tokens in ((LIMIT, 1), (LIMIT + 1, 1), (LIMIT - 10, 11), (LIMIT - 10, 10**9)):
        error = refused(http, "/v1/completions", prompt=ordinary_ids(count), max_tokens=max_tokens)
        assert f"{LIMIT} tokens" in error["message"]
    until_limit = http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **GREEDY}
    ).json()
    assert until_limit["usage"]["total_tokens"] == LIMIT


def test_prompts_without_tokens_harm_nobody(http: httpx.Client) -> None:
    """vllm#7283, #7632: a prompt that tokenizes to nothing stopped the engine."""
    body = {"prompt": "neighbour", "max_tokens": 100, "stream": True, **GREEDY}
    with http.stream("POST", "/v1/completions", json=body) as neighbour:
        for prompt in ("", [], [""], [[]], ["ok", ""], [[5, 6], []], None):
            assert refused(http, "/v1/completions", prompt=prompt)["param"].startswith("prompt")
        assert refused(http, "/v1/completions")["param"] == "prompt"
        assert refused(http, "/v1/chat/completions", messages=[])["param"] == "messages"
        for content in ("", []):
            messages = [{"role": "user", "content": content}]
            response = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 4})
            assert response.status_code == 200
        chunks = events(neighbour.read().decode())
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == complete(http, "neighbour", max_tokens=100)["text"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [VOCAB_SIZE]},
        {"prompt": [-1]},
        {"prompt": [5], "stop_token_ids": [VOCAB_SIZE]},
        {"echo": True, "prompt": [[5], [-1]]},
        {"use_beam_search": True, "prompt": [-1]},
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert refused(http, "/v1/completions", **fields)["param"] == list(fields)[-1]


def four_ways(client: httpx.Client, prompt: str, **fields: Any) -> list[tuple[str, str, int]]:
    """(text, finish_reason, completion_tokens) of completions and chat, whole and streamed, for the same prompt ids.

    ``prompt`` stands before the template's "[assistant]" in both.
    """
    results = []
    completion = {"prompt": f"[user]{prompt}[assistant]"}
    chat = {"messages": [{"role": "user", "content": prompt}]}
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        body = {**body, **GREEDY, **fields}
        whole = client.post(path, json=body).json()
        choice = whole["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        results.append((text, choice["finish_reason"], whole["usage"]["completion_tokens"]))
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(client.post(path, json=body).text)
        parts = [chunk["choices"][0] for chunk in chunks]
        text = "".join(part["text"] if "text" in part else part["delta"].get("content", "") for part in parts)
        results.append((text, parts[-1]["finish_reason"], last["usage"]["completion_tokens"]))
    return results


def test_stop_strings_cut_the_text_at_the_same_place_on_every_path(http: httpx.Client) -> None:
    """text-generation-inference#1039, omlx#2386, vllm#3672, #57052: a stop string was only found at a token's edge,
    part of one of two that overlap stayed in the text, and ``include_stop_str_in_output`` was ignored on one path."""
    [(full, reason, count)] = set(four_ways(http, "tell me", max_tokens=40))
    assert (reason, count) == ("length", 40)
    stop, start = full[5:8], full.index(full[5:8])
    for stops in (stop, [stop], [stop, stop + "\n"], [stop, stop[:-1] + "~"], ["~~", "@@@", stop, "\n\n\n"]):
        [(text, reason, count)] = set(four_ways(http, "tell me", max_tokens=40, stop=stops))
        assert (text, reason) == (full[:start], "stop")
        assert count <= 40
        [(kept, _, kept_count)] = set(
            four_ways(http, "tell me", max_tokens=40, stop=stops, include_stop_str_in_output=True)
        )
        assert (kept, kept_count) == (full[:start] + stop, count)
    for stops in ([""], ["x"] * 100):
        assert refused(http, "/v1/completions", prompt="tell me", stop=stops)["param"] == "stop"
    for stops in ([], None, "tell me"):
        assert set(four_ways(http, "tell me", max_tokens=40, stop=stops)) == {(full, "length", 40)}


def test_a_seed_repeats_its_answer(http: httpx.Client) -> None:
    def sample(**fields: Any) -> str:
        return complete(http, "dice", temperature=1.0, max_tokens=30, **fields)["text"]

    assert sample(seed=7) == sample(seed=7)
    assert sample(seed=7) != sample(seed=8)
    assert sample() != sample()
    assert sample(top_k=1) == complete(http, "dice", max_tokens=30)["text"]


def test_min_tokens_hold_back_stop_ids_and_stop_strings(http: httpx.Client) -> None:
    """vllm#21987, TensorRT-LLM#4776: a stop string ended the answer before ``min_tokens`` were there."""
    full = complete(http, "abc", max_tokens=40)["text"]
    held = complete(http, "abc", max_tokens=40, min_tokens=10, stop=list(full[:3]))
    assert held["completion_tokens"] >= 10
    assert held["text"].startswith(full[:3])
    ordinary = range(FIRST_ORDINARY_ID, VOCAB_SIZE)
    groups = [list(ordinary[start : start + 7]) for start in range(0, len(ordinary), 7)]
    [first] = [ids for ids in groups if complete(http, "abc", stop_token_ids=ids)["completion_tokens"] == 1]
    held = complete(http, "abc", max_tokens=40, min_tokens=10, ignore_eos=False, stop_token_ids=first)
    assert held["completion_tokens"] >= 10
    forced = {"max_tokens": 40, "min_tokens": 5, "ignore_eos": False, "logit_bias": {str(EOS_ID): 100}}
    ended = complete(http, "abc", **forced)
    assert (ended["completion_tokens"], ended["finish_reason"]) == (6, "stop"), "the end token is the sixth"


def test_scores_of_an_echoed_prompt_are_those_of_transformers(http: httpx.Client) -> None:
    """llama.cpp#27174: echo with logprobs gave the scores of the answer alone."""
    stored = np.load(CHECKPOINT / "logits.npz")
    ids = stored["ids"].tolist()
    expected = log_softmax(stored["logits"], -1)[np.arange(len(ids) - 1), ids[1:]]
    body = {"prompt": ids, "echo": True, "logprobs": 2}
    for max_tokens in (0, 1, 5):
        choice = complete(http, **body, max_tokens=max_tokens)
        scores = choice["logprobs"]
        assert {len(values) for values in scores.values()} == {len(ids) + max_tokens}
        assert choice["completion_tokens"] == max_tokens and choice["prompt_tokens"] == len(ids)
        assert scores["token_logprobs"][0] is None and max(scores["token_logprobs"][1:]) <= 0
        np.testing.assert_allclose(scores["token_logprobs"][1 : len(ids)], expected, atol=2e-3)
        starts = np.cumsum([0, *map(len, scores["tokens"])])[:-1]
        assert scores["text_offset"] == starts.tolist()
        request = {**body, **GREEDY, "max_tokens": max_tokens, "stream": True}
        chunks = events(http.post("/v1/completions", json=request).text)
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        for name in scores:
            assert [value for piece in streamed if piece for value in piece[name]] == scores[name]


@contextlib.asynccontextmanager
async def open_streams(url: str, count: int) -> AsyncIterator[None]:
    """``count`` streams whose first lines may or may not have come; all sockets close at the end, at once."""
    client = httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=count))
    body = {"prompt": "abc", "max_tokens": 120, "stream": True, **GREEDY}
    requests = [client.build_request("POST", "/v1/completions", json=body) for _ in range(count)]
    responses = await asyncio.gather(*(client.send(request, stream=True) for request in requests))
    assert {response.status_code for response in responses} == {200}
    yield
    await asyncio.gather(*(response.aclose() for response in responses))
    await client.aclose()


def test_clients_that_all_leave_at_once_leave_nothing_behind(server: ServerProcess, http: httpx.Client) -> None:
    """vllm#29928, #22545, #31503: the gauges kept their last values when all clients had left, and no counter saw the
    aborts."""
    before = metrics(http)

    async def scenario() -> None:
        async with open_streams(server.url, 36):
            assert metrics(http)["vllm:num_requests_running"] > 0

    asyncio.run(scenario())
    until_idle(http)
    after = metrics(http)

    def rise(name: str) -> float:
        return after[name] - before[name]

    ended = {reason: rise(f"vllm:request_success_total/{reason}") for reason in ("stop", "length", "abort", "error")}
    assert sum(ended.values()) == 36
    assert ended["abort"] > 0 and ended["error"] == ended["stop"] == 0
    assert all(after[name] >= value for name, value in before.items() if name.endswith("_total"))


def test_token_counters_are_the_sums_of_usage(http: httpx.Client) -> None:
    before = metrics(http)
    answers = [complete(http, ordinary_ids(5 + index), max_tokens=3 + index) for index in range(5)]
    after = metrics(http)
    for name in ("prompt", "completion"):
        total = "vllm:prompt_tokens_total" if name == "prompt" else "vllm:generation_tokens_total"
        assert after[total] - before[total] == sum(answer[f"{name}_tokens"] for answer in answers)


def test_a_burst_beyond_the_queue_is_answered_to_the_last_request(server: ServerProcess, http: httpx.Client) -> None:
    """sglang#33858, vllm#49445, #32193, text-generation-inference#439: the queue grew without bound, requests got no
    answer once it had overflowed, or the burst killed the engine."""
    alone = complete(http, "burst", max_tokens=60)["text"]

    async def one(client: httpx.AsyncClient, index: int) -> tuple[int, str]:
        stream = index % 2 == 0
        body = {"prompt": "burst", "max_tokens": 60, "stream": stream, **GREEDY}
        response = await client.post("/v1/completions", json=body)
        if response.status_code != 200:
            assert response.headers["content-type"] == "application/json"
            return response.status_code, response.json()["error"]["code"]
        if not stream:
            return 200, response.json()["choices"][0]["text"]
        return 200, "".join(chunk["choices"][0]["text"] for chunk in events(response.text))

    async def watch(client: httpx.AsyncClient, done: asyncio.Event) -> None:
        while not done.is_set():
            assert (await client.get("/health", timeout=5)).status_code == 200
            assert (await client.get("/metrics", timeout=5)).status_code == 200
            await asyncio.sleep(0.2)

    async def burst() -> list[tuple[int, str]]:
        done = asyncio.Event()
        limits = httpx.Limits(max_connections=300)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            watcher = asyncio.ensure_future(watch(client, done))
            results = await asyncio.gather(*(one(client, index) for index in range(300)))
            done.set()
            await watcher
        return results

    results = asyncio.run(burst())
    assert set(results) == {(200, alone), (429, "queue_full")}
    assert sum(status == 200 for status, _ in results) >= QUEUE
    for _ in range(10):
        assert complete(http, "burst", max_tokens=60)["text"] == alone


def test_a_burst_with_a_common_beginning_is_answered_as_each_would_be_alone(
    server: ServerProcess, http: httpx.Client
) -> None:
    """nano-vllm#208: of two requests with a common beginning in one step, the second took the first one's pages as
    computed. A salt of its own keeps a request from every page of others."""
    prompts = [[*ordinary_ids(160, seed=3), *ordinary_ids(3, seed=4 + index)] for index in range(8)]
    fields = {"max_tokens": 12, "logprobs": 1}
    alone = [complete(http, prompt, cache_salt=f"alone-{index}", **fields) for index, prompt in enumerate(prompts)]

    async def burst(salt: str, leaver: int | None) -> list[dict[str, Any]]:
        async def one(client: httpx.AsyncClient, index: int) -> dict[str, Any]:
            body = {"prompt": prompts[index], "cache_salt": salt, **fields, **GREEDY}
            timeout = 0.05 if index == leaver else 60.0
            try:
                answer = (await client.post("/v1/completions", json=body, timeout=timeout)).json()
            except httpx.TimeoutException:
                return {}
            return answer["choices"][0]

        async with httpx.AsyncClient(base_url=server.url) as client:
            return await asyncio.gather(*(one(client, index) for index in range(8)))

    for leaver in (None, 0, 3):
        for index, choice in enumerate(asyncio.run(burst(f"burst-{leaver}", leaver))):
            if index != leaver:
                assert choice["text"] == alone[index]["text"]
                for kind in ("token_logprobs", "text_offset"):
                    np.testing.assert_allclose(choice["logprobs"][kind], alone[index]["logprobs"][kind], atol=1e-3)


def test_a_mix_of_requests_is_counted_to_the_last(server: ServerProcess, http: httpx.Client) -> None:
    """vllm#29928, #31503: 100 requests, 30 of whose clients leave and 10 of which are refused; some ask for several
    answers or have several prompts."""
    before = metrics(http)

    async def one(client: httpx.AsyncClient, index: int) -> tuple[str, int, int]:
        """(what became of it, answers, their tokens)"""
        body: dict[str, Any] = {"prompt": ["ab", "cd"] if index % 7 == 0 else "ab", "max_tokens": 5, **ALIKE}
        if index % 10 == 9:
            response = await client.post("/v1/completions", json={**body, "top_p": 5})
            assert response.status_code == 400
            return "refused", 0, 0
        if index % 10 >= 6:
            body |= {"max_tokens": 480, "stream": True, "prompt": "ab"}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
            return "abort", 1, 0
        answer = (await client.post("/v1/completions", json={**body, "n": 2 if index % 3 == 0 else 1})).json()
        return "length", len(answer["choices"]), answer["usage"]["completion_tokens"]

    async def mix() -> list[tuple[str, int, int]]:
        async with httpx.AsyncClient(
            base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=16)
        ) as client:
            return await asyncio.gather(*(one(client, index) for index in range(100)))

    results = asyncio.run(mix())
    until_idle(http)
    after = metrics(http)
    ended = {
        kind: after[f"vllm:request_success_total/{kind}"] - before[f"vllm:request_success_total/{kind}"]
        for kind in ("length", "abort", "stop", "error")
    }
    counts = {kind: sum(answers for what, answers, _ in results if what == kind) for kind in ended}
    # On a busy machine the answer to a client that leaves may be complete before the server learns of it: such a one
    # ends once too, under "length".
    late = ended["length"] - counts["length"]
    assert 0 <= late < counts["abort"] / 2
    assert ended == counts | {"length": counts["length"] + late, "abort": counts["abort"] - late}
    assert [what for what, _, _ in results].count("abort") == 30
    assert [what for what, _, _ in results].count("refused") == 10
    generated = after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
    assert sum(tokens for _, _, tokens in results) <= generated


@pytest.fixture(scope="module")
def unlimited(model_dir: Path, real_server: ServerProcess) -> Iterator[ServerProcess]:
    """A server without a limit of its queue. The shared one has compiled its programs."""
    at = FLAGS.index("--max-waiting")
    with ServerProcess(REAL, "--model", str(model_dir), *FLAGS[:at], *FLAGS[at + 2 :]) as server:
        yield server


def test_without_a_limit_every_request_of_a_burst_is_answered(unlimited: ServerProcess) -> None:
    """sglang#33858, vllm#49445: as above, without a limit. Half are streamed, some ask for two answers."""
    body = {"prompt": "burst", "max_tokens": 8, **ALIKE}

    async def one(client: httpx.AsyncClient, index: int) -> list[str]:
        fields = {**body, "stream": index % 2 == 0, "n": 2 if index % 5 == 0 else 1}
        response = await client.post("/v1/completions", json=fields)
        assert response.status_code == 200
        texts = [""] * fields["n"]
        for part in events(response.text) if fields["stream"] else [response.json()]:
            for choice in part["choices"]:
                texts[choice["index"]] += choice["text"]
        return texts

    async def burst() -> list[list[str]]:
        limits = httpx.Limits(max_connections=150)
        async with httpx.AsyncClient(base_url=unlimited.url, timeout=120, limits=limits) as client:
            return await asyncio.gather(*(one(client, index) for index in range(150)))

    with httpx.Client(base_url=unlimited.url, timeout=60) as client:
        alone = complete(client, "burst", max_tokens=8)["text"]
        for index, texts in enumerate(asyncio.run(burst())):
            assert texts == [alone] * (2 if index % 5 == 0 else 1)
        until_idle(client)


def test_sigterm_lets_the_real_engine_finish(unlimited: ServerProcess) -> None:
    """The last test of that server."""
    begun = threading.Event()
    received: list[str] = []

    def read() -> None:
        body = {"prompt": "abc", "max_tokens": 500, "stream": True, **GREEDY}
        with httpx.stream("POST", f"{unlimited.url}/v1/completions", json=body, timeout=60) as response:
            for piece in response.iter_text():
                received.append(piece)
                begun.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(30)
    unlimited.send_signal(signal.SIGTERM)
    assert unlimited.wait(60) == 0
    thread.join()
    assert "Traceback" not in unlimited.log()
    assert events("".join(received))[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--model /no/such/dir --port 0", "/no/such/dir"),
        ("--model {model} --max-model-len 100000 --port 0", "max_model_len"),
    ],
)
def test_what_can_not_work_is_one_line(
    model_dir: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, flags: str, text: str
) -> None:
    caplog.set_level("INFO", "jaxcb")  # which main() sets, and this sets back
    assert main(flags.format(model=model_dir).split()) == 1
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert text in line
