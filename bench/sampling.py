"""Samplers by tier, vocabulary and rows, and top-k with top-p by sorting each row, which the truncated tier avoids.

Both cut the same tokens off: 50 likeliest, then a share of 0.9. Calls take turns, round by round; the columns are
medians in milliseconds, "sort / truncated" is the median of the ratio within a round. Logits are random, of deviation
3.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from bench.common import (
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
from jaxcb.sampling import Draws, Tier, sample
from jaxcb.sampling_params import MAX_FORBIDDEN_IDS

VOCABULARIES = "49152,128256,262144"
ROWS = "1,4,16,64,256"
TOP_K, TOP_P = 50, 0.9
DEVIATION = 3.0
TIERS = (Tier.GREEDY, Tier.PLAIN, Tier.TRUNCATED)


def sample_by_sorting(logits: Float[Array, "S V"], draws: Draws) -> Int[Array, "S"]:
    """Top-k, then top-p, from the sorted row; drawn by the same inverse CDF over the sorted weights."""
    order = jnp.argsort(-logits, -1)
    ordered = jnp.take_along_axis(logits, order, -1) / draws.temperature[:, None]
    weights = jnp.exp(ordered - ordered[:, :1])
    weights = jnp.where(jnp.arange(logits.shape[1]) < draws.top_k[:, None], weights, 0.0)
    before = jnp.cumsum(weights, -1) - weights
    weights = jnp.where(before < draws.top_p[:, None] * weights.sum(-1, keepdims=True), weights, 0.0)
    uniform = jax.vmap(lambda seed: jax.random.uniform(jax.random.wrap_key_data(seed)))(draws.seeds)
    ends = jnp.cumsum(weights, -1)
    place = jnp.argmax(ends > (uniform * ends[:, -1])[:, None], -1)
    return jnp.take_along_axis(order, place[:, None], -1)[:, 0]


def draws_of(num_rows: int, rng: np.random.Generator) -> Draws:
    """Rows that ask for both cuts at temperature 1."""
    return Draws(
        temperature=jnp.ones(num_rows, jnp.float32),
        top_k=jnp.full(num_rows, TOP_K, jnp.int32),
        top_p=jnp.full(num_rows, TOP_P, jnp.float32),
        min_p=jnp.zeros(num_rows, jnp.float32),
        seeds=jnp.asarray(rng.integers(0, 2**32, (num_rows, 2), dtype=np.uint32)),
        positions=jnp.arange(num_rows, dtype=jnp.int32),
        forbidden=jnp.full((num_rows, MAX_FORBIDDEN_IDS), -1, jnp.int32),
    )


def measure(vocabulary: int, num_rows: int, num_rounds: int, rng: np.random.Generator) -> dict[str, float]:
    """Milliseconds of each way, and the ratio."""
    logits = jnp.asarray(rng.standard_normal((num_rows, vocabulary), np.float32) * DEVIATION)
    draws = draws_of(num_rows, rng)
    ways: dict[str, Callable[..., Any]] = {
        tier.name.lower(): jax.jit(functools.partial(sample, tier=tier)) for tier in TIERS
    }
    ways["sort"] = jax.jit(sample_by_sorting)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        jax.block_until_ready(way(logits, draws))
    for _ in range(num_rounds):
        for name, way in ways.items():
            started_s = time.perf_counter()
            jax.block_until_ready(way(logits, draws))
            times[name].append((time.perf_counter() - started_s) * 1e3)
    row = {name: percentile(values, 50) for name, values in times.items()}
    return row | {"ratio": paired_ratio(times["sort"], times["truncated"])}


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("sampling", __doc__, seed=0, seed_help="of the logits")
    parser.add_argument("--vocabularies", default=VOCABULARIES, metavar="N,N,...", help=f"default {VOCABULARIES}")
    parser.add_argument("--rows", default=ROWS, metavar="N,N,...", help=f"default {ROWS}")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="default 5")
    args = parser.parse_args(argv)

    facts = machine() | {"device": jax.devices()[0].device_kind}
    shapes = [(positive(V), positive(S)) for V in args.vocabularies.split(",") for S in args.rows.split(",")]
    rows = [
        {"vocabulary": V, "rows": S} | measure(V, S, args.rounds, np.random.default_rng(args.seed))
        for V, S in tqdm(shapes, desc="timing", unit="shape", disable=not show_progress())
    ]
    result = {"bench": "sampling", "machine": facts, "top_k": TOP_K, "top_p": TOP_P, "rows": rows}
    _print(result)
    save(args.json, result)
    return result


def _print(result: Result) -> None:
    names = [tier.name.lower() for tier in TIERS]
    lines = [
        [row["vocabulary"], row["rows"], *(f"{row[name]:.2f}" for name in [*names, "sort"]), f"{row['ratio']:.1f}"]
        for row in result["rows"]
    ]
    print(f"machine: {describe(result['machine'])}")
    print(markdown_table(["V", "rows", *names, "sort", "sort / truncated"], lines))


if __name__ == "__main__":
    raise SystemExit(run(main))
