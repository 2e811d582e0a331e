"""Requests to replay: prompts of token ids, and how many tokens each answer has. The same seed makes the same file.

``python -m bench.workload --out bench/workload.json`` makes the committed workload: 32 requests for the built-in model,
of lognormal lengths, the prompts cut out of this repository's LICENSE.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import BenchError, Result, make_parser, positive, run, save
from jaxcb.text import Tokenizer

SEED = 20240601
COMMITTED = Path(__file__).parent / "workload.json"
TEXT = Path(__file__).parents[1] / "LICENSE"
Z90 = 1.2815515655446004
"""A normal variable's 90th percentile."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A prompt, and the exact number of tokens to be generated from it."""

    prompt_ids: Sequence[int]
    output_len: int


@dataclasses.dataclass(frozen=True)
class Workload:
    seed: int
    items: Sequence[Item]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(item.prompt_ids) for item in self.items)

    @property
    def num_output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)

    def __str__(self) -> str:
        return (
            f"{len(self.items)} requests, {self.num_prompt_tokens:,} prompt and {self.num_output_tokens:,} output "
            f"tokens, seed {self.seed}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """A lognormal distribution of token counts, clipped to [low, high]."""

    median: float
    sigma: float
    low: int
    high: int

    @classmethod
    def from_percentiles(cls, *, p50: float, p90: float, low: int, high: int) -> Lengths:
        return cls(median=p50, sigma=math.log(p90 / p50) / Z90, low=low, high=high)

    def scaled(self, factor: float) -> Lengths:
        """The same shape with every length ``factor`` times as long; at least one token."""
        low, high = (max(round(limit * factor), 1) for limit in (self.low, self.high))
        return dataclasses.replace(self, median=self.median * factor, low=low, high=high)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        lengths = np.exp(rng.normal(np.log(self.median), self.sigma, count))
        return np.clip(lengths, self.low, self.high).astype(int).tolist()


PROMPTS = Lengths(median=96, sigma=0.85, low=16, high=512)
OUTPUTS = Lengths(median=64, sigma=0.8, low=8, high=256)
SHAREGPT_PROMPTS = Lengths.from_percentiles(p50=150, p90=796, low=4, high=2048)
SHAREGPT_OUTPUTS = Lengths.from_percentiles(p50=140, p90=555, low=4, high=1024)
"""What people type into a chat, and what they get: a few answers are many times as long as most."""


def make(
    tokenizer: Tokenizer,
    seed: int,
    num_requests: int,
    *,
    prompts: Lengths = PROMPTS,
    outputs: Lengths = OUTPUTS,
    max_total_tokens: int | None = None,
) -> Workload:
    """Draw lengths, and cut the prompts out of the LICENSE at different places, so that no two begin alike.

    Arguments:
        tokenizer: of the model that will read the prompts.
        max_total_tokens: a prompt and an answer get at most half of this each, for models with a short context.
    """
    rng = np.random.default_rng(seed)
    prompt_lens, output_lens = prompts.draw(rng, num_requests), outputs.draw(rng, num_requests)
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    starts = rng.choice(len(ids), num_requests, replace=num_requests > len(ids))
    items = []
    for start, prompt_len, output_len in zip(starts.tolist(), prompt_lens, output_lens, strict=True):
        if max_total_tokens is not None:
            prompt_len, output_len = (min(length, max_total_tokens // 2) for length in (prompt_len, output_len))
        items.append(Item([ids[(start + i) % len(ids)] for i in range(prompt_len)], output_len))
    return Workload(seed, items)


def to_json(workload: Workload) -> str:
    """{"seed": ..., "requests": [{"prompt_len": ..., "output_len": ..., "prompt_ids": [...]}, ...]}, a line each."""
    requests = [
        {"prompt_len": len(item.prompt_ids), "output_len": item.output_len, "prompt_ids": list(item.prompt_ids)}
        for item in workload.items
    ]
    lines = ",\n".join(json.dumps(request) for request in requests)
    return f'{{"seed": {workload.seed}, "requests": [\n{lines}\n]}}\n'


def read(file: Path) -> Workload:
    """A file that :func:`to_json` wrote, or another in the same format.

    Raises:
        BenchError: it isn't in the format.
    """
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        items = [Item(request["prompt_ids"], request["output_len"]) for request in fields["requests"]]
        workload = Workload(fields["seed"], items)
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f'{file} is no workload ({type(error).__name__}: {error}); expected {{"seed": ..., "requests": '
            '[{"prompt_ids": [...], "output_len": ...}, ...]}'
        ) from error
    if not items:
        raise BenchError(f"{file} holds no requests")
    return workload


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("workload", __doc__, seed=SEED, seed_help="of the lengths and the places in the text")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the workload goes there")
    parser.add_argument("--num-requests", type=positive, default=32, metavar="N", help="default 32")
    parser.add_argument("--model", metavar="DIR|ID|FILE.gguf", help="whose tokenizer; default: the built-in model's")
    args = parser.parse_args(argv)

    from jaxcb.weights import resolve  # imports jax, which --help need not wait for

    workload = make(Tokenizer.from_dir(resolve(args.model).directory), args.seed, args.num_requests)
    args.out.write_text(to_json(workload), encoding="utf-8")
    print(f"{args.out}: {workload}")
    result = {
        "bench": "workload",
        "seed": args.seed,
        "num_requests": len(workload.items),
        "num_prompt_tokens": workload.num_prompt_tokens,
        "num_output_tokens": workload.num_output_tokens,
    }
    save(args.json, result)
    return result


if __name__ == "__main__":
    raise SystemExit(run(main))
