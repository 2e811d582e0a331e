"""``python -m jaxcb.generate --input in.jsonl --output out.jsonl``: a file of requests, answered into another.

Lines are those of OpenAI's batch API:

    in   {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
    out  {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"}, "error": null}

in the order in which answers come. The bodies go through the server's own application, without a socket: what they may
hold, and what comes back, is what the server says. An output file that is there already is gone on with: a line whose
``custom_id`` has an answer in it is skipped, and a last line that was cut off is taken away. Lines are written whole.
What says that the engine failed is no answer: the run ends, and goes on from there when it is begun again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from tqdm import tqdm

from jaxcb.errors import ConfigError, EngineStoppedError, JaxcbError
from jaxcb.gather import RETRY_S

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

OPEN_AT_ONCE = 512
"""Requests in the engine."""
QUEUE_FULL = 429
_OF_A_SERVER = ("host", "port", "api-key", "admin-api-key", "allowed-origins", "drain-timeout", "log-level", "profile")
"""Flags of ``python -m jaxcb.serve`` that say nothing about an answer. Its file and environment may hold them."""
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


def answered(file: Path) -> dict[str, bool]:
    """The ids that an output file has answers for, False for refusals. A last line that was cut off is taken away.

    Raises:
        ConfigError: it holds something else.
    """
    if not file.exists():
        return {}
    ids: dict[str, bool] = {}
    end = 0
    with file.open("r+b") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            end += len(line)
            try:
                entry = json.loads(line)
                ids[entry["custom_id"]] = not _refused(entry)
            except (ValueError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"line {number} of {file} is no answer of a batch: choose another --output"
                ) from error
        lines.truncate(end)
    return ids


def _refused(line: dict[str, Any]) -> bool:
    response = line["response"]
    return response is None or response["status_code"] != 200


def requests(lines: Iterable[str], skip: set[str]) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """(custom_id, line) of each line that is to be answered, or in the place of the line what is wrong with it.
    ``skip`` grows by those ids."""
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name = f"line-{number}"
        wrong: str | None = None
        entry: Any = None
        try:
            line.encode()
            entry = json.loads(line)
        except UnicodeEncodeError:
            wrong = f"line {number} is not UTF-8"
        except (ValueError, RecursionError) as error:
            wrong = f"line {number} is not JSON: {error}"
        if wrong is None:
            if isinstance(entry, dict) and isinstance(entry.get("custom_id"), str):
                name = entry["custom_id"]
            wrong = _wrong(entry, number)
            if name in seen:
                wrong, name = f"line {number} has the custom_id {name[:80]!r} of a line before it", f"line-{number}"
            seen.add(name)
        if name in skip:
            continue
        skip.add(name)
        yield name, entry if wrong is None else wrong


def _wrong(entry: Any, number: int) -> str | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("custom_id"), str):
        return f"line {number} needs a custom_id, which is a string"
    if entry.get("method", "POST") != "POST" or entry.get("url") not in URLS:
        return f"line {number} must POST to one of {', '.join(URLS)}, got {str(entry.get('url'))[:80]!r}"
    body = entry.get("body")
    if not isinstance(body, dict):
        return f"line {number} needs a body, which is an object"
    return f"line {number} asks for a stream, which a file can't hold" if body.get("stream") else None


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the application's answer to a POST."""
    sent = False
    status, parts = 500, []

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client stays
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif message["type"] == "http.response.body":
            parts.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"batch"), (b"content-type", b"application/json")],
        "client": None,
        "server": ("batch", 80),
    }
    await app(scope, receive, send)
    return status, b"".join(parts)


async def run(app: ASGIApp, source: Iterable[str], output: BinaryIO, done: set[str], *, progress: bool) -> int:
    """Answer every line that is not ``done``; returns how many were refused.

    Raises:
        EngineStoppedError: the engine failed; what is written so far are answers.
    """
    failures = num_tokens = 0
    started_s = time.monotonic()
    running: set[asyncio.Task[dict[str, Any]]] = set()
    bar = tqdm(desc="answering", unit="line", disable=not progress)

    def collect(tasks: Iterable[asyncio.Task[dict[str, Any]]]) -> None:
        nonlocal failures, num_tokens
        for task in tasks:
            line = task.result()
            response = line["response"]
            if response is not None and response["status_code"] >= 500:
                raise EngineStoppedError(response["body"]["error"]["message"])
            failures += _refused(line)
            usage = {} if response is None else response["body"].get("usage") or {}
            num_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
            # What has no UTF-8, a lone surrogate in a custom_id, is written as JSON's own escape.
            output.write(json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") + b"\n")
            elapsed_s = max(time.monotonic() - started_s, 1e-6)
            bar.set_postfix_str(f"{num_tokens / elapsed_s:,.0f} tok/s", refresh=False)
            bar.update()

    try:
        for name, entry in requests(source, done):
            running.add(asyncio.create_task(_answer(app, name, entry)))
            if len(running) >= OPEN_AT_ONCE:
                ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                collect(ended)
        while running:
            ended, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            collect(ended)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        bar.close()
    return failures


async def _answer(app: ASGIApp, name: str, entry: dict[str, Any] | str) -> dict[str, Any]:
    """The line of output for a line of input."""
    line: dict[str, Any] = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": name, "response": None, "error": None}
    if isinstance(entry, str):
        return line | {"error": {"code": "invalid_line", "message": entry}}
    request = json.dumps(entry["body"]).encode()
    while (answered := await post(app, entry["url"], request))[0] == QUEUE_FULL:
        await asyncio.sleep(RETRY_S)
    status, body = answered
    answer = json.loads(body)
    request_id = answer.get("id", line["id"])
    return line | {"response": {"status_code": status, "request_id": request_id, "body": answer}}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; status 0 if every line has its answer, 1 if some were refused, 2 if nothing could start, 130
    after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxcb.generate",
        description="Answer a file of OpenAI batch lines. Flags of the model and the engine are those of python -m "
        "jaxcb.serve.",
        epilog=f"A line's url is one of {', '.join(URLS)}. A line with an answer in the output file is passed over, a "
        "refusal too: take its line out of that file to have it tried again.",
        allow_abbrev=False,
    )
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl", help="gone on with if it is there")
    parser.add_argument("--quiet", action="store_true", help="no progress bars")
    args, rest = parser.parse_known_args(argv)
    from jaxcb import cluster
    from jaxcb.parsing import reasoning_markers, tool_format
    from jaxcb.serve.app import make_app
    from jaxcb.serve.cli import parse

    try:
        _refuse_flags_of_a_server(rest)
        config, options = parse(rest)
        tool_format(options.tool_call_parser, None)  # names that there aren't are known before the model is loaded
        reasoning_markers(options.reasoning_parser, None)
        done = answered(args.output)
        with (
            args.input.open(encoding="utf-8-sig", errors="surrogateescape") as source,  # a bad line has an error
            _appending(args.output) as output,
            cluster.start(config, progress=not args.quiet) as engine,
        ):
            if options.chat_template is not None:
                engine.tokenizer.chat_template = options.chat_template
            app = make_app(
                engine,
                model_names=options.served_model_names,
                tool_call_parser=options.tool_call_parser,
                reasoning_parser=options.reasoning_parser,
            )
            failures = list(done.values()).count(False)
            failures += asyncio.run(run(app, source, output, set(done), progress=not args.quiet))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return 130
    except (JaxcbError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if failures:
        print(f"{failures} lines were refused or failed; their answers say why", file=sys.stderr)
    return 1 if failures else 0


def _refuse_flags_of_a_server(argv: Sequence[str]) -> None:
    for flag in (word.partition("=")[0] for word in argv):
        if flag.removeprefix("--") in _OF_A_SERVER and flag.startswith("--"):
            raise ConfigError(f"{flag} is a flag of python -m jaxcb.serve alone: leave it out", param=flag)


@contextlib.contextmanager
def _appending(file: Path) -> Iterator[BinaryIO]:
    """Unbuffered, so that a line is one write, and on the disk when the file is closed."""
    with open(file, "ab", buffering=0) as output:
        yield output
        os.fsync(output.fileno())
