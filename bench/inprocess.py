"""An engine without its threads: scheduler and runner stepped by the bench itself, every launched step noted."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any, get_args

import jax

from bench.common import machine, positive, show_progress
from bench.workload import Item
from jaxcb.cache import cache_dir
from jaxcb.config import Backend, EngineConfig, KVCacheDType, Quantization
from jaxcb.engine import Engine
from jaxcb.engine.core import EngineCore
from jaxcb.engine.sizing import backend_of, buckets_of, limits_of, resolve_config, shape_of
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Row, Scheduler, SchedulerLimits, StepPlan
from jaxcb.step.buckets import Bucket
from jaxcb.step.runner import InFlight, Runner
from jaxcb.text import Tokenizer
from jaxcb.weights import load


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedRow:
    """A sequence's part of a step: one token of its answer, or a chunk of its prompt."""

    request_id: str
    num_tokens: int
    decode: bool


@dataclasses.dataclass(frozen=True, slots=True)
class LaunchedStep:
    bucket: Bucket
    rows: tuple[LaunchedRow, ...]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class NotingRunner:
    """Launches like the runner that it holds, and notes what."""

    def __init__(self, runner: Runner):
        self.runner = runner
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> InFlight:
        self.plans.append(plan)
        return self.runner.launch(plan)

    @property
    def steps(self) -> list[LaunchedStep]:
        """What was launched."""
        choose = self.runner.buckets.choose
        return [
            LaunchedStep(choose(plan.num_tokens, plan.decode_only), tuple(map(_note, plan.rows))) for plan in self.plans
        ]


def _note(row: Row) -> LaunchedRow:
    """To the plan, the last token of a prompt is a decode if it comes alone; to a reader it is a chunk."""
    decode = row.num_tokens == 1 and row.start >= row.sequence.num_prompt_tokens
    return LaunchedRow(row.sequence.request.request_id, row.num_tokens, decode)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InProcess:
    """A loaded model with its programs compiled."""

    config: EngineConfig
    """Every None resolved."""
    tokenizer: Tokenizer
    runner: Runner
    limits: SchedulerLimits
    facts: Mapping[str, Any]
    """The machine as it was before anything ran here, the device, the model, and how the engine is set."""

    @classmethod
    def load(cls, config: EngineConfig) -> InProcess:
        """
        Raises:
            ModelError, ConfigError: as for :meth:`jaxcb.engine.Engine.start`.
        """
        before = machine()
        model = load(config)
        config = resolve_config(config, model.spec, model.params["embed"]["embedding"].dtype)
        runner = Runner(
            model.spec,
            model.params,
            buckets_of(config),
            shape_of(config),
            backend_of(config),
            deterministic=config.deterministic,
        )
        runner.compile(cache_dir(), progress=show_progress())
        facts = before | engine_facts(model.name, config)
        return cls(
            config=config, tokenizer=model.tokenizer, runner=runner, limits=limits_of(config, model.spec), facts=facts
        )

    @classmethod
    def over(cls, engine: Engine) -> InProcess:
        """The programs and arrays of an engine that is compiled and doesn't run yet."""
        return cls(
            config=engine.config,
            tokenizer=engine.tokenizer,
            runner=engine._runner,
            limits=limits_of(engine.config, engine.spec),
            facts=machine() | engine_facts(engine.name, engine.config),
        )

    def new_core(self) -> tuple[EngineCore, NotingRunner]:
        """A core with nothing in it yet, over the same device arrays. One is used at a time."""
        noting = NotingRunner(self.runner)
        scheduler = Scheduler(self.limits)
        core = EngineCore(scheduler, noting, run_ahead=self.config.run_ahead)  # type: ignore[arg-type]  # launches alike
        return core, noting


def exact_length(request_id: str, item: Item) -> Request:
    """A greedy request whose answer has exactly ``item.output_len`` tokens."""
    length = item.output_len
    sampling = SamplingParams(temperature=0.0, max_tokens=length, min_tokens=length, ignore_eos=True)
    return Request(request_id=request_id, prompt_token_ids=item.prompt_ids, sampling=sampling)


def engine_facts(model: str, config: EngineConfig) -> dict[str, Any]:
    """The device, the model, and what of a resolved config bears on speed."""
    names = (
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "backend",
        "max_num_seqs",
        "max_num_batched_tokens",
        "page_size",
        "num_kv_pages",
        "run_ahead",
        "deterministic",
    )
    settings = {name: getattr(config, name) for name in names}
    return {"device": jax.devices()[0].device_kind, "model": model} | settings


def add_engine_options(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Flags of the engine to be measured, named as those of ``python -m jaxcb.serve``."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", metavar="DIR|ID|FILE.gguf", help="default: the built-in SmolLM2-135M-Instruct")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    group.add_argument("--quantization", choices=get_args(Quantization), help="of the weights")
    group.add_argument("--kv-cache-dtype", choices=get_args(KVCacheDType), default="auto", help="auto, or int8")
    group.add_argument("--backend", choices=get_args(Backend), help="kernels; default: by platform")
    sizes: Mapping[str, str] = {
        "max_num_seqs": "most sequences in a step",
        "max_num_batched_tokens": "most tokens in a step",
        "max_model_len": "most tokens of a prompt and its answer",
        "page_size": "tokens in a page",
    }
    for name, text in sizes.items():
        default = defaults.get(name)
        text += "; default: the engine's" if default is None else f"; default {default}"
        group.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default, metavar="N", help=text)
    for name, text in {"decode_buckets": "rows", "mixed_buckets": "tokens"}.items():
        group.add_argument(
            f"--{name.replace('_', '-')}", type=_sizes, metavar="N,N,...", help=f"{text} of the smaller programs"
        )


def engine_config(args: argparse.Namespace, **changes: Any) -> EngineConfig:
    """The config that the flags of :func:`add_engine_options` ask for; a flag that was not given says nothing."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(args).items() if name in names - {"seed"} and value is not None}
    return EngineConfig(**given, **changes)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(",")) if text else ()
