"""The same engine and requests, batched in two ways: continuously, and in fixed batches as FasterTransformer does it.

Static: --max-num-seqs requests are started together, and the next ones only when the last of them is done. A batch
runs for as many steps as its longest answer needs, and rows whose answer is complete are computed on: so each request
is made to generate the longest length of its batch, and only the tokens that it asked for are counted.
Continuous: all requests are submitted at once, and each leaves with its last token.

Prompts and answers have the lengths of ShareGPT's chats, times --scale. The prefix cache is off.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence

from tqdm import tqdm

from bench.common import (
    BenchError,
    Result,
    describe,
    machine,
    make_parser,
    markdown_table,
    paired_ratio,
    percentile,
    positive,
    run,
    save,
    show_progress,
)
from bench.inprocess import add_engine_options, engine_config, engine_facts, exact_length
from bench.workload import SEED, SHAREGPT_OUTPUTS, SHAREGPT_PROMPTS, Item, Workload, make
from jaxcb.engine import Engine

_ids = itertools.count()


def static_batches(items: Sequence[Item], batch_size: int) -> list[list[Item]]:
    """The items in their order, in batches; within a batch every answer is as long as the longest."""
    batches = []
    for start in range(0, len(items), batch_size):
        batch = items[start : start + batch_size]
        longest = max(item.output_len for item in batch)
        batches.append([Item(item.prompt_ids, longest) for item in batch])
    return batches


def run_batch(engine: Engine, items: Sequence[Item], bar: tqdm[None]) -> None:
    """Submit all items at once and wait for the last.

    Raises:
        BenchError: an answer has another length than asked for.
        RequestError: an item doesn't fit the engine.
    """
    streams = [engine.submit(exact_length(f"bench-{next(_ids)}", item)) for item in items]
    for stream, item in zip(streams, items, strict=True):
        outputs = list(stream)
        if outputs[-1].error is not None or len(outputs[-1].token_ids) != item.output_len:
            raise BenchError(
                f"asked for {item.output_len} tokens, got {len(outputs[-1].token_ids)} "
                f"({outputs[-1].error or outputs[-1].finish_reason})"
            )
        bar.update(item.output_len)


def time_both(engine: Engine, workload: Workload, batch_size: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of each round by way of batching; the two take turns. A short batch to warm up comes first."""
    static = static_batches(workload.items, batch_size)
    seconds: dict[str, list[float]] = {"static": [], "continuous": []}
    num_tokens = workload.num_output_tokens + sum(item.output_len for batch in static for item in batch)
    with tqdm(total=num_rounds * num_tokens, unit="token", disable=not show_progress()) as bar:
        run_batch(engine, [Item(item.prompt_ids, 2) for item in workload.items[:batch_size]], bar)
        bar.reset()
        for _ in range(num_rounds):
            bar.set_description("static")
            start_s = time.perf_counter()
            for batch in static:
                run_batch(engine, batch, bar)
            seconds["static"].append(time.perf_counter() - start_s)
            bar.set_description("continuous")
            start_s = time.perf_counter()
            run_batch(engine, workload.items, bar)
            seconds["continuous"].append(time.perf_counter() - start_s)
    return seconds


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    args = _parse(argv)
    facts = machine()
    with Engine.start(engine_config(args, enable_prefix_caching=False), progress=show_progress()) as engine:
        config = engine.config
        workload = make(
            engine.tokenizer,
            args.seed,
            args.num_requests,
            prompts=SHAREGPT_PROMPTS.scaled(args.scale),
            outputs=SHAREGPT_OUTPUTS.scaled(args.scale),
            max_total_tokens=config.max_model_len,
        )
        facts |= engine_facts(engine.name, config)
        seconds = time_both(engine, workload, args.max_num_seqs, args.rounds)
    static_tokens = sum(
        item.output_len for batch in static_batches(workload.items, args.max_num_seqs) for item in batch
    )
    result = {
        "bench": "continuous_vs_static",
        "machine": facts,
        "seed": args.seed,
        "scale": args.scale,
        "workload": str(workload),
        "useful_tok_s": {name: workload.num_output_tokens / percentile(walls, 50) for name, walls in seconds.items()},
        "wall_s": seconds,
        "ratio": paired_ratio(seconds["static"], seconds["continuous"]),
        "static_wasted_share": 1 - workload.num_output_tokens / static_tokens,
    }
    _print(result)
    save(args.json, result)
    return result


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("continuous_vs_static", __doc__, seed=SEED, seed_help="of the lengths")
    add_engine_options(parser, max_num_seqs=16)
    parser.add_argument("--num-requests", type=positive, default=64, metavar="N", help="default 64")
    parser.add_argument("--scale", type=float, default=0.25, metavar="F", help="of all lengths; default 0.25")
    parser.add_argument("--rounds", type=positive, default=1, metavar="N", help="of both ways in turn; default 1")
    args = parser.parse_args(argv)
    if not 0 < args.scale <= 1:
        parser.error(f"--scale must be in (0, 1], got {args.scale}")
    return args


def _print(result: Result) -> None:
    print(f"machine: {describe(result['machine'])}")
    print(f"workload: {result['workload']}, ShareGPT-like lengths times {result['scale']}")
    lines = [
        [name, f"{result['useful_tok_s'][name]:.1f}", f"{percentile(walls, 50):.1f}"]
        for name, walls in result["wall_s"].items()
    ]
    print(markdown_table(["batching", "useful tok/s", "wall s"], lines))
    print(f"continuous / static: x{result['ratio']:.2f}")
    print(f"{result['static_wasted_share']:.0%} of the tokens that static batches generated were wanted by nobody")


if __name__ == "__main__":
    raise SystemExit(run(main))
