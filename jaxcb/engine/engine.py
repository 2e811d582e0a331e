"""Engine: a thread that owns the device and steps the core, and the methods by which other threads reach it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxcb import validation
from jaxcb.cache import cache_dir
from jaxcb.config import EngineConfig
from jaxcb.devices import placement_of
from jaxcb.engine import gpu_memory, prepare
from jaxcb.engine.compile_guard import CompileGuard
from jaxcb.engine.core import EngineCore
from jaxcb.engine.handovers import Handovers
from jaxcb.engine.inbox import Add, Arrival, Forks, Inbox
from jaxcb.engine.incoming import Source
from jaxcb.engine.loop import StepLoop
from jaxcb.engine.serving import ServingEngine
from jaxcb.engine.sizing import (
    kv_bytes_per_token,
    resolve_config,
    runner_of,
    scheduler_of,
)
from jaxcb.engine.stats import EngineStats
from jaxcb.engine.step_log import StepLog
from jaxcb.engine.stream import OutputStream, deliver, nobody, running_loop
from jaxcb.engine.trace import EngineTrace
from jaxcb.errors import ConfigError, QueueFullError, RequestError
from jaxcb.grammar import Grammar, GrammarCompiler
from jaxcb.held_model import HeldModel
from jaxcb.logits_processor import check_extra_args
from jaxcb.models import ModelSpec
from jaxcb.models.parallel import check_divides
from jaxcb.models.params import Params
from jaxcb.request import FinishReason, Request
from jaxcb.scheduler import SchedulerLimits
from jaxcb.step.orders import NOBODY, Followers
from jaxcb.structured_outputs import StructuredOutputs
from jaxcb.text import Tokenizer
from jaxcb.text.worker import TextEvent, TextUpdate, TextWorker
from jaxcb.weights import load
from jaxcb.weights.held import held_params
from jaxcb.weights.loader import prepared
from jaxcb.weights.placed import placed

_STUCK_S = 2.0
"""For the engine's thread to end after a failure: a device that waits for another host's can't be woken."""


class Engine(ServingEngine):
    """One engine, on devices of its own. What its public methods do is said in :class:`ServingEngine`.

    The way of a request: ``submit`` validates it and puts it in the inbox; the engine's thread moves it to the
    scheduler before the next plan; committed tokens go to the text thread, which feeds the request's OutputStream.
    """

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        params: Params,
        tokenizer: Tokenizer,
        config: EngineConfig,
        sampling_defaults: Mapping[str, Any] | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        followers: Followers = NOBODY,
    ):
        """An engine over weights that the caller holds; the native CPU kernels take a copy in their own layout, others
        use them in place. Call :meth:`compile`, then :meth:`run`; :meth:`start` loads a model and does both.

        Arguments:
            devices: as for :meth:`start`; weights that lie elsewhere are copied to them.
            followers: of several hosts, the others. :func:`jaxcb.hosts.start` makes such an engine.
        """
        if config.data_parallel_size > 1:
            raise ConfigError(
                f"this is one engine; jaxcb.cluster.start starts {config.data_parallel_size}",
                param="data_parallel_size",
            )
        if followers is NOBODY:
            _check_one_host(config)
        self.name, self.spec, self.tokenizer = name, spec, tokenizer
        self.sampling_defaults = dict(sampling_defaults or {})
        self.placement = placement_of(
            devices, config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel
        )
        """The devices that it computes on."""
        check_divides(spec, self.placement.size, expert_parallel=config.enable_expert_parallel)
        self.asked_for = config
        self.config = resolve_config(config, spec, params["embed"]["embedding"].dtype, self.placement)
        params = prepared(placed(params, spec, self.placement), spec, config)
        self._scheduler = scheduler_of(self.config, spec)
        self._followers = followers
        self._runner = runner_of(self.config, spec, params, self.placement, followers)
        self._step_log = None
        if self.config.step_log is not None:
            itemsize = params["embed"]["embedding"].dtype.itemsize
            self._step_log = StepLog(
                Path(self.config.step_log),
                spec,
                self._runner.buckets,
                itemsize,
                kv_bytes_per_token=kv_bytes_per_token(self.config, spec, itemsize),
                padding_costs=self.config.backend != "native",
            )
        self._trace = None if self.config.trace is None else EngineTrace(Path(self.config.trace))
        self._core = EngineCore(
            self._scheduler,
            self._runner,
            run_ahead=self.config.run_ahead,
            step_log=self._step_log,
            trace=self._trace,
        )
        self._grammars = GrammarCompiler(tokenizer, spec.vocab_size, spec.eos_token_ids)
        self._random = random.Random(self.config.seed)
        self._guard = CompileGuard()

        self._inbox = Inbox()
        self.handovers = Handovers(self._core, self._inbox, self._submit, transfers=self.config.kv_transfer)
        """What it has to do with other engines."""
        self._started_s = time.monotonic()
        on_batch = None if self._trace is None else self._texted
        self._text = TextWorker(tokenizer, self._deliver, self._stop_found, on_batch)
        self._loop = StepLoop(self._inbox, self._core, self._text, self._guard)
        self._thread = threading.Thread(target=self._loop.run, name="jaxcb-engine", daemon=True)

    @classmethod
    def start(
        cls,
        config: EngineConfig | None = None,
        *,
        progress: bool = True,
        devices: Sequence[jax.Device] | None = None,
    ) -> Engine:
        """Load the model, compile every program, and run.

        Arguments:
            progress: show bars while that goes on.
            devices: ``tensor_parallel_size`` to compute on; everything of the engine lies there. Default: jax's first.

        Raises:
            ModelError: the model can't be found or read.
            ConfigError: the configuration can't work for it.
        """
        config = config or EngineConfig()
        _check_one_host(config)
        if not isinstance(config.model, HeldModel):  # whose arrays jax holds already
            gpu_memory.start_jax(config.gpu_memory_utilization, config.host_kv_gib)
        placement = placement_of(devices, config.tensor_parallel_size, expert_parallel=config.enable_expert_parallel)
        model = load(config, progress=progress, placement=placement)
        engine = cls(
            model.name,
            model.spec,
            model.params,
            model.tokenizer,
            config,
            model.sampling_defaults,
            devices=placement.devices,
        )
        try:
            engine.compile(progress=progress)
            engine.run()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def compile(self, *, progress: bool = True) -> None:
        """Compile every program of the engine, or load it from the cache; afterwards nothing compiles any more."""
        self._runner.compile(cache_dir(), progress=progress)
        if self._scheduler.weighs_swaps:
            self._scheduler.set_host_page_s(self._runner.measure_host_page_s())

    def run(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    # ------------------------------------------------------------------ for callers

    def submit_choices(self, request: Request, *, blocking: bool = False) -> list[OutputStream]:
        return self._submit(request, None if blocking else running_loop(), self._core.add_choices)

    def submit_into(self, request: Request, streams: Sequence[OutputStream], *, source: Source | None = None) -> None:
        """Queue a request whose answers go into streams that the caller made, one for each of
        :func:`jaxcb.engine.prepare.choices_of` it, in their order. It brings its seed, if it draws, and what
        :func:`jaxcb.engine.prepare.with_words_and_states` gives it. A source computes its prompt: see
        :meth:`Handovers.submit`.

        Errors as for :meth:`submit_choices`.
        """
        self.check_request(request)
        grammar = self._grammar_of(request)
        with self._inbox.lock:
            self._check_room(request)
            add = self._core.add_choices if source is None else self.handovers.adding(source)
            self._arrive(request.request_id, prepare.choices_of(request), streams, grammar, add)

    @property
    def params(self) -> Params:
        """The weights as it computes with them, in the layout of its backend."""
        return self._runner.params

    @property
    def idle(self) -> bool:
        """It has nothing to do; requests whose prompt another engine computes may be on their way."""
        return not (self._scheduler.num_running or self._scheduler.roster.waiting)

    def _submit(self, request: Request, loop: asyncio.AbstractEventLoop | None, add: Add) -> list[OutputStream]:
        request, grammar = self._prepared(request)
        with self._inbox.lock:
            self._check_room(request)
            request = prepare.with_seed(request, self._random)
            choices = prepare.choices_of(request)
            streams = [OutputStream(choice, nobody, loop, index) for index, choice in enumerate(choices)]
            self._arrive(request.request_id, choices, streams, grammar, add)
        return streams

    def _prepared(self, request: Request) -> tuple[Request, Grammar | None]:
        """What is done of a request before the lock is taken, which takes its time."""
        self.check_request(request)
        request = prepare.with_words_and_states(request, self.tokenizer, self.config.logits_processors)
        return request, self._grammar_of(request)

    def _grammar_of(self, request: Request) -> Grammar | None:
        structured = request.sampling.structured_outputs
        return None if structured is None else self._grammars.compile(structured)

    def _check_room(self, request: Request) -> None:
        """Raise if the engine takes nothing now. The caller holds the inbox's lock."""
        self._inbox.check_open(request.request_id)
        limit = self.config.max_waiting
        if limit is not None and (num_waiting := self._num_waiting()) + request.sampling.num_choices > limit:
            raise QueueFullError(f"{num_waiting} requests are waiting, the limit is {limit}")

    def _arrive(
        self,
        request_id: str,
        choices: Sequence[Request],
        streams: Sequence[OutputStream],
        grammar: Grammar | None,
        add: Add,
    ) -> None:
        """Put a request into the inbox. The caller holds its lock."""
        keys = [self._open(request_id, choice, stream) for choice, stream in zip(choices, streams, strict=True)]
        own = [dataclasses.replace(choice, request_id=key) for choice, key in zip(choices, keys, strict=True)]
        self._inbox.put(Arrival(own, grammar, add))

    def fork(
        self, parents: Sequence[OutputStream], children: Sequence[tuple[Request, int]], *, blocking: bool = False
    ) -> list[OutputStream]:
        ready = []
        for request, parent in children:
            prepare.check_single(request)
            self.check_request(request)
            if request.sampling.structured_outputs is not None:
                raise RequestError("a fork can't be held to a grammar", param="structured_outputs")
            request = prepare.with_words_and_states(request, self.tokenizer, self.config.logits_processors)
            ready.append((request, parent))
        loop = None if blocking else running_loop()
        with self._inbox.lock:
            self._inbox.check_open()
            known = [self._inbox.key_of(parent) for parent in parents]
            streams, forks = [], []
            for request, parent in ready:
                stream = OutputStream(request, nobody, loop)
                key = self._open(request.request_id, request, stream)
                forks.append((dataclasses.replace(request, request_id=key), known[parent]))
                streams.append(stream)
            self._inbox.put(Forks(forks, [key for key in known if key is not None]))
        return streams

    def _open(self, request_id: str, choice: Request, stream: OutputStream) -> str:
        """A key for one answer. The caller holds the inbox's lock."""
        key = self._inbox.open(request_id, stream)
        self._text.open(key, choice)
        return key

    def check_request(self, request: Request) -> None:
        self._scheduler.check_request(request)  # first: it bounds the number of tokens to look at
        validation.check_vocabulary("prompt", request.prompt_token_ids, self.spec.vocab_size)
        sampling = request.sampling
        check_extra_args(self.config.logits_processors, sampling.extra_args)
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids or ()),
            ("logit_bias", sampling.logit_bias or ()),
        ):
            validation.check_vocabulary(name, ids, self.spec.vocab_size)
        if sampling.num_choices > self.max_choices:
            raise RequestError(
                f"{sampling.num_choices} answers are asked for, and at most {self.max_choices} sequences run at once",
                param="n" if sampling.best_of is None else "best_of",
            )

    def compile_grammar(self, structured: StructuredOutputs) -> None:
        self._grammars.compile(structured)

    def abort(self, request_id: str) -> None:
        for key in self._inbox.keys_of(request_id):
            self._inbox.end(key, FinishReason.ABORT)

    def stats_by_engine(self) -> dict[str, EngineStats]:
        return {"0": self.stats()}

    def stats(self) -> EngineStats:
        scheduler, counters = self._scheduler, self._scheduler.counters
        now_s = time.monotonic()
        with self._inbox.lock:
            num_waiting = self._num_waiting()
            stalled_s = self._inbox.stalled_s(now_s)
            finished = {reason.value: self._inbox.finished[reason] for reason in FinishReason}
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=num_waiting,
            kv_pages_total=scheduler.pool.num_pages,
            kv_pages_used=scheduler.pool.num_used,
            kv_pages_cached=scheduler.pool.num_reusable_free,
            prompt_tokens=counters.prompt_tokens,
            prompt_tokens_cached=counters.prompt_tokens_cached,
            generation_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            num_swapped=scheduler.num_swapped,
            swaps=counters.swaps,
            host_pages_total=scheduler.host.num_pages,
            host_pages_swapped=scheduler.host.num_used - scheduler.host.num_freed,
            host_pages_cached=scheduler.host.num_cached,
            host_pages_brought_back=scheduler.cache.num_brought_back,
            host_page_s=scheduler.preemption.host_page_s,
            steps=self._core.num_steps,
            compiles=self._guard.num_compiles,
            finished=finished,
            uptime_s=now_s - self._started_s,
            stalled_s=stalled_s,
            healthy=self.healthy,
        )

    def pause(self) -> None:
        self._inbox.pause()

    def resume(self) -> None:
        self._inbox.resume()

    def update_params(self, params: Any, *, running: Literal["keep", "restart"] = "restart") -> None:
        if self.config.nnodes > 1:
            raise ConfigError(
                f"update_params is for engines of one host, and this one is on {self.config.nnodes}", param="nnodes"
            )
        if running not in ("keep", "restart"):
            raise ConfigError(f'running must be "keep" or "restart", got {running!r}', param="running")
        self.handovers.check_update()
        with self._inbox.lock:
            self._inbox.check_open()  # before anything is copied
        new = prepared(held_params(self.spec, params, self.placement), self.spec, self.config)

        def swap() -> None:
            self._runner.set_params(new)
            self._loop.emit(self._core.drain())
            self.handovers.weights_changed()
            if running == "restart":
                self._core.restart_all()
            else:
                self._scheduler.prefixes.reset()

        self._inbox.call(swap)

    def sleep(self) -> None:
        self.pause()

        def drop() -> None:
            if not self._inbox.asleep:
                self._inbox.asleep = True
                self._loop.emit(self._core.drain())
                self._core.restart_all()
                self._runner.drop_pages()

        self._inbox.call(drop)

    def wake(self) -> None:
        def take() -> None:
            if self._inbox.asleep:
                self._runner.take_pages()
                self._inbox.asleep = False

        self._inbox.call(take)
        self.resume()

    def reset_prefix_cache(self) -> None:
        self._inbox.call(self._scheduler.cache.reset)

    @property
    def paused(self) -> bool:
        return self._inbox.paused

    @property
    def accepting(self) -> bool:
        return self._inbox.accepting

    @property
    def healthy(self) -> bool:
        """False once the step loop has failed or was shut down."""
        return self._inbox.error is None and not self._inbox.stopping

    @property
    def limits(self) -> SchedulerLimits:
        """What its scheduler may use."""
        return self._scheduler.limits

    @property
    def num_programs(self) -> int:
        """Forward programs, one a bucket."""
        return len(self._runner.buckets)

    def fail(self, reason: str) -> None:
        """End every request with an error, and take no more. The engine's thread may be waiting for devices that will
        never be done."""
        self._loop.fail(reason)

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        self._inbox.stop(drain_s)
        while self._thread.is_alive():
            self._thread.join(_STUCK_S)
            if self._inbox.error is not None:  # maybe since it was waited for
                break
        self._text.put([TextEvent(key, None, FinishReason.ABORT) for key in self._inbox.open_keys()])
        self._inbox.refuse_calls("the engine is shutting down")
        self._text.close()
        self._grammars.close()
        for file in (self._step_log, self._trace):
            if file is not None:
                file.close()
        self._followers.close()

    def _num_waiting(self) -> int:
        return self._inbox.num_arrived() + self._scheduler.num_waiting

    # ------------------------------------------------------------------ the text thread

    def _deliver(self, updates: list[tuple[str, TextUpdate]]) -> None:
        deliver(self._inbox.streams_of(updates))

    def _stop_found(self, key: str) -> None:
        self._inbox.end(key, FinishReason.STOP)

    def _texted(self, start_s: float, end_s: float, num_events: int) -> None:
        assert self._trace is not None
        self._trace.span("text", "text", start_s, end_s, tokens=num_events)


def _check_one_host(config: EngineConfig) -> None:
    if config.nnodes > 1:
        raise ConfigError(
            f"this is an engine of one host; jaxcb.hosts.start starts one over {config.nnodes}", param="nnodes"
        )
