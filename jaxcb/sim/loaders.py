"""Recorded traces, as CSV with a header line or as JSONL. Columns are known by the names that these tools give them:

    arrival       TIMESTAMP (a date and time: Azure LLM inference traces), timestamp (ms: Mooncake, vLLM's bench),
                  Timestamp (s: BurstGPT), arrived_at (s: Vidur), arrival_s
    prompt        ContextTokens (Azure), input_length (Mooncake, vLLM), "Request tokens" (BurstGPT), num_prefill_tokens
                  (Vidur), prompt_tokens_count or prompt_tokens (guidellm), prompt_len, num_prompt_tokens
    output        GeneratedTokens, output_length, "Response tokens", num_decode_tokens, output_tokens_count or
                  output_tokens, output_len, num_output_tokens
    content       hash_ids (Mooncake): an id for each 512 tokens of the prompt; equal first ids are a shared prefix

The clock starts with the first arrival. Without an arrival column all requests are there at the start.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from jaxcb.errors import ConfigError
from jaxcb.sim.trace import TraceRequest, arrivals

SUFFIXES = (".csv", ".jsonl")
HASH_BLOCK_TOKENS = 512
"""Tokens that one of Mooncake's hash ids stands for."""

_PROMPT = (
    "ContextTokens",
    "input_length",
    "Request tokens",
    "num_prefill_tokens",
    "prompt_tokens_count",
    "prompt_tokens",
    "prompt_len",
    "num_prompt_tokens",
)
_OUTPUT = (
    "GeneratedTokens",
    "output_length",
    "Response tokens",
    "num_decode_tokens",
    "output_tokens_count",
    "output_tokens",
    "output_len",
    "num_output_tokens",
)
_Row = dict[str, Any]


def load_trace(
    file: Path, *, rate: float | None = None, gap_cv: float | None = None, random: np.random.Generator | None = None
) -> list[TraceRequest]:
    """Read a trace, in the order of its arrivals.

    Arguments:
        rate: draw arrivals at this rate instead of those of the file.
        gap_cv: of arrivals that are drawn; default 1.

    Raises:
        ConfigError: the file can't be read or a row is malformed; the message names the line.
    """
    rows = list(_rows(file))
    if not rows:
        raise ConfigError(f"the trace {file} holds no requests", param="trace")
    trace = [_parsed(file, number, row) for number, row in rows]
    trace.sort(key=lambda request: request.arrival_s)
    if rate is not None:
        random = np.random.default_rng(42) if random is None else random
        times = arrivals(len(trace), rate=rate, gap_cv=1.0 if gap_cv is None else gap_cv, random=random)
    else:
        times = [request.arrival_s - trace[0].arrival_s for request in trace]
    return [request._replace(arrival_s=time) for request, time in zip(trace, times, strict=True)]


def _rows(file: Path) -> Iterator[tuple[int, _Row]]:
    """(line number, row) of each; empty lines are skipped."""
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            if file.suffix == ".csv":
                reader = csv.DictReader(lines, skipinitialspace=True)
                for row in reader:
                    yield reader.line_num, row
            else:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield number, _object(file, number, line)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"can't read the trace {file}: {error}", param="trace") from error


def _object(file: Path, number: int, line: str) -> _Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise _malformed(file, number, f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise _malformed(file, number, f"expected an object, got {line.strip()[:60]}")
    return row


def _parsed(file: Path, number: int, row: _Row) -> TraceRequest:
    try:
        num_prompt = _count(row, _PROMPT)
        request = TraceRequest(_arrival_s(row), num_prompt, _count(row, _OUTPUT), _content(row, num_prompt))
    except ValueError as error:
        raise _malformed(file, number, str(error)) from error
    return request


def _malformed(file: Path, number: int, what: str) -> ConfigError:
    return ConfigError(f"{file}, line {number}: {what}", param="trace")


def _count(row: _Row, names: tuple[str, ...]) -> int:
    """The first of the columns that the row has.

    Raises:
        ValueError: it has none, or it isn't a positive integer.
    """
    for name in names:
        if (value := row.get(name)) not in (None, ""):
            try:
                count = int(value)
            except (TypeError, ValueError):
                count = 0
            if isinstance(value, bool | list | dict) or count < 1 or count != float(value):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
            return count
    raise ValueError(f"none of the columns {', '.join(names)} is there; the row has {', '.join(map(str, row))}")


def _date_s(value: str) -> float:
    return datetime.fromisoformat(value.strip()[:26]).timestamp()  # Azure writes 7 digits of a second, Python reads 6


_ARRIVALS: dict[str, Callable[[Any], float]] = {
    "TIMESTAMP": _date_s,
    "timestamp": lambda value: float(value) / 1e3,
    "Timestamp": float,
    "arrived_at": float,
    "arrival_s": float,
}


def _arrival_s(row: _Row) -> float:
    for name, parse in _ARRIVALS.items():
        if (value := row.get(name)) not in (None, ""):
            try:
                time_s = parse(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name} can't be read as a time: {value!r}") from error
            if not math.isfinite(time_s):
                raise ValueError(f"{name} must be finite, got {value!r}")
            return time_s
    return 0.0


def _content(row: _Row, num_prompt: int) -> tuple[tuple[int, int], ...]:
    """Runs of a prompt with hash ids; the last block may be shorter."""
    ids = row.get("hash_ids")
    if ids in (None, ""):
        return ()
    ids = json.loads(ids) if isinstance(ids, str) else ids
    if not isinstance(ids, list) or not all(isinstance(x, int) for x in ids):
        raise ValueError(f"hash_ids must be a list of integers, got {str(ids)[:60]}")
    if len(ids) != -(-num_prompt // HASH_BLOCK_TOKENS):
        raise ValueError(
            f"hash_ids names {len(ids)} blocks of {HASH_BLOCK_TOKENS} tokens, the prompt has {num_prompt} tokens"
        )
    last = num_prompt - (len(ids) - 1) * HASH_BLOCK_TOKENS
    return tuple((x, HASH_BLOCK_TOKENS if i < len(ids) - 1 else last) for i, x in enumerate(ids))
