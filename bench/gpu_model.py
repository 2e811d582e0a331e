"""One model of published shape on this GPU: every compiled shape against the device's ceilings, chats, idle time.

A part of ``bench.gpu``, which gives it a time budget: what it has is written to --json after every measurement, and
what doesn't fit into --seconds any more is left out, with a line that says so.

Ceilings: bytes a second of a copy, FLOP/s of a large bfloat16 product, measured first. A step can't be faster than its
bytes (weights, and the KV that it reads) over the first, nor than its FLOPs over the second.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench.audit_cases import MODELS
from bench.buckets import replay_ratio, time_steps
from bench.common import BenchError, Result, Spread, machine, make_parser, run, save, show_progress
from bench.continuous_vs_static import run_batch
from bench.device_lanes import idle, read_profile
from bench.full_step import full_plan
from bench.inprocess import InProcess, engine_facts, exact_length
from bench.kernel_cases import copy_rate, matmul_rate
from bench.kernels import device_facts
from bench.models import config_of, save_weights, spec_of
from bench.roofline import Speeds, Work
from bench.workload import SEED, SHAREGPT_OUTPUTS, SHAREGPT_PROMPTS, Item, Workload
from jaxcb.config import EngineConfig
from jaxcb.engine import Engine
from jaxcb.models.decoder import init_params
from jaxcb.weights.held import no_tokenizer

GPU: dict[str, Any] = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "mixed_buckets": (512, 1024),
    "max_model_len": 8448,
}
"""Decode buckets are the default ones; of the mixed ones, which take long to compile, three."""
DRY: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "decode_buckets": (),
    "mixed_buckets": (),
    "max_model_len": 256,
}
PROFILED_STEPS = 40


class Model:
    """An engine over random weights, and what was measured of it so far."""

    def __init__(self, name: str, *, dry: bool, seed: int, seconds: float, file: Path | None):
        self.name, self.dry, self.seed, self.file = name, dry, seed, file
        self.until_s = time.monotonic() + seconds
        self.result: Result = {"bench": "gpu_model", "model": name, "dry": dry, "left_out": {}, "machine": machine()}
        self.spec = spec_of(name, small=dry)
        self.context, self.prefill = (24, 100) if dry else (1024, 8192)

    def measure(self, part: str, call: Callable[[], Any]) -> None:
        """Add the result of one measurement, or the reason for which there is none."""
        if time.monotonic() > self.until_s:
            self.result["left_out"][part] = "no time was left"
        else:
            begun_s = time.monotonic()
            try:
                self.result[part] = call()
            except Exception as error:  # whatever it is: the other measurements are wanted all the same
                self.result["left_out"][part] = f"{type(error).__name__}: {error}"[:500]
            self.result.setdefault("took_s", {})[part] = round(time.monotonic() - begun_s, 1)
        self.save()

    def save(self) -> None:
        """What there is so far; never half a file."""
        if self.file is not None:
            partial = self.file.with_suffix(".partial")
            save(partial, self.result)
            partial.replace(self.file)

    def ceilings(self) -> dict[str, float]:
        """Of this device, by a copy and by a product."""
        num_bytes, size = (2**24, 512) if self.dry else (2**31, 8192)
        self.speeds = Speeds(copy_rate(num_bytes, repeats=10), matmul_rate(size, repeats=10))
        return self.speeds._asdict()

    def start(self) -> dict[str, Any]:
        """Make the weights and compile."""
        self.params = init_params(self.spec, jnp.bfloat16, self.seed)
        config = EngineConfig(enable_prefix_caching=False, **(DRY if self.dry else GPU))
        self.engine = Engine(self.name, self.spec, self.params, no_tokenizer(self.spec), config)
        begun_s = time.monotonic()
        self.engine.compile(progress=show_progress())
        compile_s = time.monotonic() - begun_s
        self.process = InProcess.over(self.engine)
        programs = self.engine.num_programs
        return engine_facts(self.name, self.engine.config) | {"programs": programs, "compile_s": compile_s}

    def buckets(self) -> list[dict[str, Any]]:
        """Each full, decodes at the context of the targets."""
        rows: list[dict[str, Any]] = []
        runner = self.process.runner
        itemsize = runner.kv_bytes // (runner.shape.num_pages + 1) // runner.shape.page_size
        for bucket in tqdm(list(runner.buckets), desc="buckets", disable=not show_progress()):
            plan = full_plan(bucket, runner.shape, self.context)
            work = Work.of(plan, self.spec, self.params, itemsize)
            step_ms = Spread.of(s * 1e3 for s in time_steps(runner, plan, 5 if self.dry else 20, run_ahead=True))
            bound_ms = self.speeds.least_s(work) * 1e3
            rows.append(
                {
                    "bucket": str(bucket),
                    "tok_s": bucket.num_tokens / step_ms.median * 1e3,
                    "step_ms": step_ms._asdict(),
                    "bound_ms": bound_ms,
                    "of_bound": bound_ms / step_ms.median,
                    "bound_by": "bytes" if work.num_bytes / self.speeds.bytes_per_s * 1e3 == bound_ms else "FLOPs",
                    "num_bytes": work.num_bytes,
                    "num_flops": work.num_flops,
                }
            )
            self.result["buckets"] = rows
            self.save()
        return rows

    def long_prompts(self) -> dict[str, float]:
        """Prompts of 8k tokens one after the other, in chunks of the token budget."""
        times_s = []
        for number in range(4):
            core, noting = self.process.new_core()
            prompt = np.random.default_rng(number).integers(0, self.spec.vocab_size, self.prefill).tolist()
            core.add(exact_length("prompt", Item(prompt, 1)))
            begun_s = time.perf_counter()
            while core.has_work:
                core.step()
            times_s.append(time.perf_counter() - begun_s)
        # the first one warms up
        took_s = Spread.of(times_s[1:]).median
        flops = sum(Work.of(plan, self.spec, self.params, 0).num_flops for plan in noting.plans)
        return {
            "tokens": self.prefill,
            "tok_s": self.prefill / took_s,
            "flops_per_s": flops / took_s,
            "of_matmul": flops / took_s / self.speeds.flops_per_s,
        }

    def idle(self) -> dict[str, float]:
        """Of the device, while it decodes with as many sequences as it may and the scheduler plans every step."""
        core, _ = self.process.new_core()
        steps = 8 if self.dry else PROFILED_STEPS
        count = self.process.limits.max_num_seqs
        for number in range(count):
            core.add(exact_length(str(number), Item([number % 100 + 1] * 32, steps + 64)))
        while core.scheduler.num_running < count or core.scheduler.num_waiting:
            core.step()
        for _ in range(3):
            core.step()
        with tempfile.TemporaryDirectory() as folder:
            begun_s = time.perf_counter()
            with jax.profiler.trace(folder):
                for _ in range(steps):
                    core.step()
            took_s = time.perf_counter() - begun_s
            while core.has_work:
                core.step()
            found = idle(read_profile(Path(folder)))
        return found._asdict() | {"share": found.share, "running": count, "steps": steps, "with_profiler_s": took_s}

    def workload(self, num_requests: int) -> Workload:
        """Of ShareGPT's lengths, its ids random."""
        rng = np.random.default_rng(self.seed)
        scale = 0.05 if self.dry else 1.0
        lengths = [each.scaled(scale).draw(rng, num_requests) for each in (SHAREGPT_PROMPTS, SHAREGPT_OUTPUTS)]
        items = [Item(rng.integers(0, self.spec.vocab_size, p).tolist(), o) for p, o in zip(*lengths, strict=True)]
        return Workload(self.seed, items)

    def replay(self) -> dict[str, Any]:
        """What planning every step costs: chats with the scheduler, and the very same steps without."""
        workload = self.workload(4 if self.dry else 48)
        return {"workload": str(workload)} | replay_ratio(self.process, workload, 1, progress=show_progress())

    def chats(self) -> dict[str, Any]:
        """ShareGPT-like requests through the engine and its threads, all at once."""
        self.engine.run()
        workload = self.workload(8 if self.dry else 512)
        with tqdm(total=workload.num_output_tokens, desc="chats", unit="token", disable=not show_progress()) as bar:
            run_batch(self.engine, [Item(item.prompt_ids, 2) for item in workload.items[:8]], bar)
            before, begun_s = self.engine.stats(), time.perf_counter()
            run_batch(self.engine, workload.items, bar)
            took_s = time.perf_counter() - begun_s
        after = self.engine.stats()
        if after.compiles:
            raise BenchError(f"{after.compiles} programs were compiled while the engine served: see the log")
        return {
            "workload": str(workload),
            "wall_s": took_s,
            "output_tok_s": workload.num_output_tokens / took_s,
            "total_tok_s": (workload.num_output_tokens + workload.num_prompt_tokens) / took_s,
            "steps": after.steps - before.steps,
            "preemptions": after.preemptions - before.preemptions,
        }

    def hand_over(self, folder: Path) -> dict[str, str]:
        """The weights and the requests, for transformers."""
        folder.mkdir(parents=True, exist_ok=True)
        save_weights(self.spec, self.params, folder)
        config = config_of(self.name, small=self.dry)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        requests = [
            {"prompt_ids": item.prompt_ids, "output_len": item.output_len}
            for item in self.workload(8 if self.dry else 512).items
        ]
        (folder / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
        return {"folder": str(folder)}


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("gpu_model", __doc__, seed=SEED, seed_help="of the weights and the requests")
    parser.add_argument("--model", choices=sorted(MODELS), required=True, help="whose shapes")
    parser.add_argument("--dry", action="store_true", help="a tiny model of the family, and short measurements")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which nothing more is begun; default 150")
    parser.add_argument("--hand-over", type=Path, metavar="DIR", help="write weights and requests there")
    args = parser.parse_args(argv)
    model = Model(args.model, dry=args.dry, seed=args.seed, seconds=args.seconds, file=args.json)
    model.result["device"] = device_facts()
    model.measure("ceilings", model.ceilings)
    model.measure("engine", model.start)
    if "engine" in model.result:
        model.measure("buckets", model.buckets)
        model.measure("long_prompts", model.long_prompts)
        model.measure("idle", model.idle)
        model.measure("replay", model.replay)
        model.measure("chats", model.chats)
        if args.hand_over is not None:
            model.measure("hand_over", lambda: model.hand_over(args.hand_over))
        model.engine.shutdown()
    print(json.dumps(model.result, indent=1))
    return model.result


if __name__ == "__main__":
    raise SystemExit(run(main))
