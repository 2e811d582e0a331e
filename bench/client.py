"""A client that replays a workload over HTTP and times every answer. It parses what it must and keeps no text.

It shares the machine with the server, so it must cost little: bare asyncio and a parser in C take a fifth of the time
that httpx takes for a chunk (50 against 250 microseconds, which at 400 tok/s is a tenth of a core).

Works against any server with OpenAI's /v1/completions that takes token ids, ``ignore_eos`` and ``min_tokens`` (vLLM's
names; llama.cpp, which has no ``min_tokens``, ignores it and generates the same number of tokens).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import httptools
import httpx

from bench.common import BenchError, percentile
from bench.workload import Item

_TIMEOUT_S = 900.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Times of one request, in seconds on the clock of ``time.perf_counter()``."""

    sent_s: float
    token_times_s: Sequence[float]
    """When each chunk with tokens came."""
    num_tokens: int

    @property
    def first_s(self) -> float:
        return self.token_times_s[0]

    @property
    def last_s(self) -> float:
        return self.token_times_s[-1]

    @property
    def latency_s(self) -> float:
        """Until the last token."""
        return self.last_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one chunk and the next."""
        return [after - before for before, after in itertools.pairwise(self.token_times_s)]

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first; None if there is none, or if all came in one piece."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.last_s > self.first_s else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """One replay of a workload."""

    answers: Sequence[Answer]
    num_prompt_tokens: int
    wall_s: float
    client_cpu_s: float
    """CPU time of this process: near ``wall_s``, the client itself was the bottleneck."""

    def metrics(self) -> dict[str, float]:
        """TPOT figures are missing if no answer has one."""
        num_output_tokens = sum(answer.num_tokens for answer in self.answers)
        ttft = [answer.ttft_s for answer in self.answers]
        tpot = [tpot for answer in self.answers if (tpot := answer.tpot_s) is not None]
        metrics = {
            "out_tok_s": num_output_tokens / self.wall_s,
            "total_tok_s": (self.num_prompt_tokens + num_output_tokens) / self.wall_s,
            "ttft_p50_s": percentile(ttft, 50),
            "ttft_p95_s": percentile(ttft, 95),
            "wall_s": self.wall_s,
            "client_cpu_s": self.client_cpu_s,
        }
        if tpot:
            metrics |= {"tpot_p50_ms": percentile(tpot, 50) * 1e3, "tpot_p95_ms": percentile(tpot, 95) * 1e3}
        return metrics


def replay(
    url: str,
    model: str,
    items: Sequence[Item],
    *,
    starts_s: Sequence[float] | None = None,
    concurrency: int | None = None,
    on_token: Callable[[], object] = lambda: None,
) -> Replay:
    """Send the items, greedy and with their exact lengths, and stream all answers.

    Arguments:
        url: of the server, without /v1.
        starts_s: when to send each, from the beginning on; None: all at once.
        concurrency: most requests that are open at a time: so many users, each waiting for an answer before the next
            question; None: no limit.
        on_token: called for each chunk with a token, for progress bars.

    Raises:
        BenchError: an answer failed or has another length than asked for; what the others measured is then worthless.
    """
    starts_s = [0.0] * len(items) if starts_s is None else starts_s
    return asyncio.run(_replay(url, model, items, starts_s, concurrency or len(items), on_token))


def only_model(url: str) -> str:
    """The first model that a server names.

    Raises:
        BenchError: it can't be asked.
    """
    try:
        answer = httpx.get(f"{url}/v1/models", timeout=10.0).raise_for_status()
        return answer.json()["data"][0]["id"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url}/v1/models names no model ({type(error).__name__}: {error})") from error


async def _replay(
    url: str,
    model: str,
    items: Sequence[Item],
    starts_s: Sequence[float],
    concurrency: int,
    on_token: Callable[[], object],
) -> Replay:
    requests = [_request(url, model, item) for item in items]
    places = asyncio.Semaphore(concurrency)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()

    async def ask(request: bytes, item: Item, after_s: float) -> Answer:
        await asyncio.sleep(start_s + after_s - time.perf_counter())
        async with places:
            return await _ask(url, request, item, on_token)

    try:
        async with asyncio.timeout(_TIMEOUT_S):
            answers = await asyncio.gather(*(ask(*each) for each in zip(requests, items, starts_s, strict=True)))
    except OSError as error:  # a TimeoutError too
        raise BenchError(f"{url}: {type(error).__name__}: {error}") from error
    return Replay(
        answers=answers,
        num_prompt_tokens=sum(len(item.prompt_ids) for item in items),
        wall_s=time.perf_counter() - start_s,
        client_cpu_s=time.process_time() - start_cpu_s,
    )


def _request(url: str, model: str, item: Item) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": list(item.prompt_ids),
            "max_tokens": item.output_len,
            "min_tokens": item.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    address = urllib.parse.urlsplit(url)
    head = (
        f"POST {address.path}/v1/completions HTTP/1.1\r\n"
        f"Host: {address.netloc}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


async def _ask(url: str, request: bytes, item: Item, on_token: Callable[[], object]) -> Answer:
    address = urllib.parse.urlsplit(url)
    tls = address.scheme == "https"
    port = address.port or (443 if tls else 80)
    sent_s = time.perf_counter()
    transport, stream = await asyncio.get_running_loop().create_connection(
        lambda: _Stream(on_token), address.hostname or "", port, ssl=tls or None
    )
    try:
        transport.write(request)
        await stream.done
    finally:
        transport.close()
    if stream.error is not None:
        raise BenchError(f"{url}: {stream.error}")
    if stream.usage is None or not stream.token_times_s:
        raise BenchError(f"{url}: the stream ended without tokens or without its usage")
    if stream.usage["completion_tokens"] != item.output_len:
        raise BenchError(
            f"{url}: asked for {item.output_len} tokens, the answer has {stream.usage['completion_tokens']}"
        )
    return Answer(sent_s=sent_s, token_times_s=stream.token_times_s, num_tokens=item.output_len)


class _Stream(asyncio.Protocol):
    """One answer as it comes in. httptools calls the ``on_`` methods; it would wrap what they raise."""

    def __init__(self, on_token: Callable[[], object]):
        self.done = asyncio.get_running_loop().create_future()
        self.token_times_s: list[float] = []
        """When each chunk with tokens came."""
        self.usage: dict[str, Any] | None = None
        self.error: str | None = None
        self._on_token = on_token
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a mistake in this file: asyncio logs it and drops the connection
        except httptools.HttpParserError as error:
            self._end(f"the answer is no HTTP: {error}")

    def on_body(self, body: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._end(f"status {self._parser.get_status_code()}: {body[:300].decode(errors='replace')}")
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                self._take(line[5:])

    def on_message_complete(self) -> None:
        self._end(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(None if exc is None else f"the connection broke: {exc}")

    def _take(self, data: bytes) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            self._end(f"an event of the stream is no JSON: {data[:100]!r}")
            return
        if "error" in event:
            self._end(f"the stream ended with an error: {event['error']}")
        self.usage = event.get("usage") or self.usage
        if event.get("choices"):
            self.token_times_s.append(self._now_s)
            self._on_token()

    def _end(self, error: str | None) -> None:
        if not self.done.done():
            self.error = error
            self.done.set_result(None)
