"""What bench.gpu measured, for people: tables, and the targets with what was reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from bench.common import Result, describe, markdown_table


class Target(NamedTuple):
    """A ratio that is to be reached: at least ``value``, or at most for those that are better if small."""

    what: str
    value: float
    reached: float | None
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.reached is None:
            return "not measured"
        return "yes" if (self.reached <= self.value if self.at_most else self.reached >= self.value) else "no"


DECODE_TARGETS: Mapping[str, float] = {"decode 1": 0.85, "decode 32": 0.85, "decode 128": 0.85, "decode 256": 0.80}
"""Share of the bound, at context 1,024."""
PREFILL_TARGET = 0.60
"""Share of the product's rate, prompts of 8k tokens."""
PEER_TARGET = 3.0
"""Times transformers' continuous batching."""
IDLE_TARGET = 0.01


def targets(model: Mapping[str, Any], peer: Mapping[str, Any]) -> Iterator[Target]:
    """Of one model."""
    shares = {row["bucket"]: row["of_bound"] for row in model.get("buckets", [])}
    for bucket, value in DECODE_TARGETS.items():
        yield Target(f"{bucket} at context 1,024, of the bound", value, shares.get(bucket))
    yield Target("prefill at 8k tokens, of the product", PREFILL_TARGET, model.get("long_prompts", {}).get("of_matmul"))
    yield Target("times transformers' continuous batching", PEER_TARGET, times(model, peer, "continuous batching"))
    yield Target("device idle", IDLE_TARGET, model.get("idle", {}).get("share"), at_most=True)


def times(model: Mapping[str, Any], peer: Mapping[str, Any], way: str) -> float | None:
    """The engine's output tokens a second over those of one of transformers' ways."""
    ours, theirs = model.get("chats", {}).get("output_tok_s"), peer.get(way, {}).get("output_tok_s")
    return ours / theirs if ours and theirs else None


def report(result: Result) -> str:
    """Markdown."""
    parts = result["parts"]
    lines = ["# bench.gpu", "", describe(result["device"]), describe(result["machine"])]
    if result["dry"]:
        lines += ["", "**A dry run: tiny shapes on a CPU. It shows that everything works; its numbers mean nothing.**"]
    lines += ["", "## Parts", "", _parts_table(parts)]
    for name in result["models"]:
        model, peer = (parts.get(part, {}).get("result", {}) for part in (name, f"transformers {name}"))
        lines += ["", f"## {name}", "", *_model(model, peer)]
        if not result["dry"]:
            lines += ["", _targets_table(model, peer)]
    if "kernels" in parts and (markdown := parts["kernels"]["result"].get("markdown")):
        lines += ["", "## Kernels", "", markdown]
    return "\n".join(lines) + "\n"


def _parts_table(parts: Mapping[str, Any]) -> str:
    rows = [
        (name, part["outcome"], f"{part['took_s']:.0f}", f"{part['limit_s']:.0f}", _note(part))
        for name, part in parts.items()
    ]
    return markdown_table(("part", "outcome", "s", "at most", "note"), rows)


def _note(part: Mapping[str, Any]) -> str:
    """What went wrong; of tests, how many did what."""
    counts = [f"{count} {outcome}" for outcome, count in part["result"].items() if isinstance(count, int)]
    failures = part["result"].get("failures", [])
    counts = [] if "failures" not in part["result"] else counts
    return _one_line("; ".join([", ".join(counts), *failures, part.get("note", "")]).strip("; "))


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:160]


def _model(model: Mapping[str, Any], peer: Mapping[str, Any]) -> list[str]:
    lines = []
    if "engine" in model:
        lines += [describe(model["engine"]), ""]
    if "ceilings" in model:
        rates = model["ceilings"]
        copied, product = rates["bytes_per_s"] / 1e9, rates["flops_per_s"] / 1e12
        lines += [f"Ceilings: a copy moves {copied:,.0f} GB/s, a bfloat16 product makes {product:,.3g} TFLOP/s.", ""]
    if model.get("buckets"):
        rows = [
            (
                row["bucket"],
                f"{row['tok_s']:,.0f}",
                f"{row['step_ms']['median']:.3f}",
                f"{row['step_ms']['p90']:.3f}",
                f"{row['bound_ms']:.3f}",
                row["bound_by"],
                f"{row['of_bound']:.0%}",
            )
            for row in model["buckets"]
        ]
        lines += [markdown_table(("bucket", "tok/s", "ms", "p90", "bound ms", "bound by", "of bound"), rows), ""]
    if "chats" in model:
        chats = model["chats"]
        lines += [f"{chats['workload']}:", "", _speeds_table(model, peer), ""]
    elif peer:
        lines += [_speeds_table(model, peer), ""]
    if "idle" in model:
        gaps = model["idle"]
        lines += [
            f"Idle: {gaps['share']:.2%} of {gaps['wall_us'] / 1e3:.1f} ms, {gaps['steps']} steps of {gaps['running']} "
            f"sequences; longest gap {gaps['longest_gap_us']:.0f} us.",
            "",
        ]
    if "replay" in model:
        replay = model["replay"]
        lines += [
            f"Scheduling: {replay['steps']} steps take {replay['scheduled_s']:.2f} s, {replay['replayed_s']:.2f} s "
            f"back to back with no scheduler: {replay['ratio']:.3f} times.",
            "",
        ]
    lines += [f"Left out: {name}: {_one_line(reason)}" for name, reason in model.get("left_out", {}).items()]
    return lines


def _targets_table(model: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    rows = [
        (each.what, f"{each.value:g}", "-" if each.reached is None else f"{each.reached:.3f}", each.verdict)
        for each in targets(model, peer)
    ]
    return markdown_table(("target", "wanted", "reached", "there"), rows)


def _speeds_table(model: Mapping[str, Any], peer: Mapping[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    if "chats" in model:
        rows.append(("jaxcb", f"{model['chats']['output_tok_s']:,.0f}", "100%", "1"))
    for way in ("continuous batching", "generate"):
        got = peer.get(way, {})
        if "output_tok_s" in got:
            ratio = times(model, peer, way)
            share = f"{got['part_of_workload']:.0%}"
            ours = "-" if ratio is None else f"{ratio:.2f}"
            rows.append((f"transformers, {way}", f"{got['output_tok_s']:,.0f}", share, ours))
        elif got:
            rows.append((f"transformers, {way}", "-", _one_line(got["left_out"]), "-"))
    return markdown_table(("requests all at once", "output tok/s", "of the workload", "jaxcb is times as fast"), rows)
