"""Runner: owns the device arrays (weights, KV pages, slot state) and the compiled programs; launches steps.

Every program is compiled ahead of time, before the engine is ready, and called as an executable: a shape that was not
compiled is an error, never a compile in the middle of service.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered
from jax.tree_util import PyTreeDef
from jaxtyping import Array

from jaxcb.devices import PAGES, WHOLE, Placement, placement_of
from jaxcb.errors import ModelError
from jaxcb.logits_processor import LogitsProcessor
from jaxcb.models import ModelSpec
from jaxcb.models.parallel import TensorParallel, partitions, spec_of_part
from jaxcb.models.params import Params
from jaxcb.paging import PageMoves
from jaxcb.scheduler import StepPlan
from jaxcb.step.batch import CHANGES_PER_UPLOAD, SlotState, StepLayout, apply_changes
from jaxcb.step.buckets import Bucket, Buckets
from jaxcb.step.controls import ControlLayout
from jaxcb.step.jobs import Job, compile_all
from jaxcb.step.kv_pool import KVPages, pool_of
from jaxcb.step.orders import (
    NOBODY,
    Followers,
    ForwardOrder,
    MoveOrder,
    Order,
    PagesOrder,
    RowMasks,
    SampleOrder,
)
from jaxcb.step.owners import SlotOwners
from jaxcb.step.packer import Packer
from jaxcb.step.page_mover import PageMover
from jaxcb.step.program import ForwardResult, StepProgram, compiler_options
from jaxcb.step.program_store import ProgramStore
from jaxcb.step.sampled import Sampled, Values, asked
from jaxcb.step.samplers import Samplers
from jaxcb.step.shape import RunnerShape, empty_pages, kv_dtype, kv_shape
from pallas_kernels import native
from pallas_kernels.metadata import Backend
from pallas_kernels.platform import platform


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A launched step. ``sampled.token_ids[i]`` belongs to ``plan.rows[i]``; the copy to the host is under way."""

    plan: StepPlan
    bucket: Bucket
    sampled: Sampled
    launched_s: float
    """On the clock of ``time.perf_counter()``."""

    def wait(self) -> list[int]:
        """Block until the step has run; token ids by row (of no meaning where the row samples nothing)."""
        return np.asarray(self.sampled.token_ids)[: self.plan.num_rows].tolist()


@dataclasses.dataclass(frozen=True)
class Forwarded:
    """A step whose forward has been launched, and whose sampler has not."""

    plan: StepPlan
    tokens: SampleOrder
    """Asks for its rows' tokens."""
    launched_s: float


class Runner:
    """Not thread-safe: the engine's thread calls it.

    Whatever is launched is an order, of which ``followers`` are told first: runners of the same engine on other hosts,
    which :meth:`carry_out` it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        params: Params,
        buckets: Buckets,
        shape: RunnerShape,
        backend: Backend,
        placement: Placement | None = None,
        *,
        processed_logprobs: bool = False,
        deterministic: bool = False,
        fast_norm: bool = False,
        processors: Sequence[LogitsProcessor] = (),
        followers: Followers = NOBODY,
    ):
        self._followers = followers
        self._placement = placement = placement_of(None, 1) if placement is None else placement
        experts = placement.expert_parallel
        self._part = spec_of_part(spec, placement.size, expert_parallel=experts)
        self._parallel = TensorParallel(
            placement.size,
            spec.vocab_size,
            in_order=deterministic,
            expert_parallel=experts,
            apart=not placement.is_here,
        )
        self._deterministic, self._fast_norm = deterministic, fast_norm
        self.spec, self.params, self.buckets, self.shape, self.backend = spec, params, buckets, shape, backend
        self._layouts = {bucket: StepLayout(bucket, shape.table_width, shape.num_slots) for bucket in buckets}
        self._packer = Packer(self._layouts, SlotOwners(shape.num_slots + 1))
        controls = ControlLayout(spec.vocab_size, shape.max_model_len)
        self._leaves, self._tree = jax.tree.flatten(params)  # once: a step's call would do it again each time
        self._state = SlotState.at_rest(shape.num_slots, shape.table_width, controls, processors, placement.whole)
        dtype = params["embed"]["embedding"].dtype
        kv = pool_of(kv_shape(self._part, shape, placement.size), kv_dtype(dtype, backend), int8=shape.int8_kv)
        make = functools.partial(empty_pages, kv, backend)
        self._empty_pages = jax.jit(make, out_shardings=placement.sharding(PAGES)).lower().compile()
        self._kv: KVPages = self._empty_pages()
        self._forward: dict[Bucket, Compiled] = {}
        self._result: ForwardResult | None = None
        """Of a forward that has not been sampled."""
        logits_dtype = jnp.float32 if platform() == "cpu" else dtype
        self._processed_logprobs = processed_logprobs
        self._samplers = Samplers(
            self._part,
            backend,
            controls,
            logits_dtype,
            processed=processed_logprobs,
            deterministic=deterministic,
            processors=processors,
            placement=placement,
            parallel=self._parallel,
        )
        self._change: Compiled | None = None
        copies = placement.size * self._part.num_kv_heads // spec.num_kv_heads
        self._mover = PageMover(
            self._kv, shape.num_host_pages, backend, placement, copies=copies, transfers=shape.transfers
        )

    def compile(self, cache: Path, *, progress: bool = True) -> None:
        """Compile every program, several at once, or load it from the directory ``cache``, where compiled ones are
        kept (unless jax's switch for compilation caches, ``JAX_ENABLE_COMPILATION_CACHE``, is off)."""
        store = None
        if jax.config.values["jax_enable_compilation_cache"]:
            options = compiler_options(deterministic=self._deterministic, num_devices=self._placement.size)
            store = ProgramStore(
                cache / "programs", *self._made_from(), options=options, devices=self._placement.devices
            )
            store.opened()
        compile_all(self._jobs(), store, progress=progress)

    def launch(self, plan: StepPlan) -> InFlight:
        """Upload a plan and start its two programs. Returns at once; the device works on."""
        return self.sample(self.forward(plan))

    def forward(self, plan: StepPlan) -> Forwarded:
        """Upload a plan and start the first of its programs; :meth:`sample` has to come next."""
        bucket = self.buckets.choose(plan.num_tokens, plan.decode_only)
        launched_s = time.perf_counter()
        newcomers = [row for row in (*plan.others.values(), *plan.chunks) if row.new_pages and not row.first_new_page]
        packed, tokens = self._packer.pack(plan, bucket, newcomers)
        order = ForwardOrder(bucket, packed.upload, packed.overflow, plan.moves)
        if newcomers:
            controls, processors = self._samplers.controls_of(newcomers), self._samplers.processors_of(newcomers)
            order = order._replace(controls=controls, processors=processors)
        self._followers.tell(order)
        self._run_forward(order)
        return Forwarded(plan, tokens, launched_s)

    def sample(self, step: Forwarded, masks: RowMasks | None = None) -> InFlight:
        """Start the second program. ``masks``: of the rows that are held to a grammar."""
        order, pieces = asked(step.plan, step.tokens, masks)
        self._followers.tell(order)
        return InFlight(step.plan, order.bucket, pieces.of(self._run_sampler(order)), step.launched_s)

    def carry_out(self, order: Order) -> None:
        """What the runner that leads has done, on this host's devices."""
        match order:
            case ForwardOrder():
                self._run_forward(order)
            case SampleOrder():
                self._run_sampler(order)
            case MoveOrder(moves):
                self.move_pages(moves)
            case PagesOrder("drop"):
                self.drop_pages()
            case PagesOrder("take"):
                self.take_pages()
            case PagesOrder("measure"):
                self.measure_host_page_s()

    def _run_forward(self, order: ForwardOrder) -> None:
        if order.moves is not None:
            self._kv = self._mover.move(self._kv, order.moves)
        for start in range(0, len(order.changes), CHANGES_PER_UPLOAD):
            self._upload_changes(order.changes[start : start + CHANGES_PER_UPLOAD])
        self._state = self._samplers.enter(self._state, order)
        self._result = result = self._forward[order.bucket](self._leaves, self._kv, self._state.bare, order.upload)
        self._kv, self._state = result.kv, self._state.after(result.state)

    def _run_sampler(self, order: SampleOrder) -> Values:
        assert self._result is not None, "its forward comes first"
        self._state, values = self._samplers.sample(self.params, self._state, self._result, order)
        self._result = None
        return values

    def set_params(self, params: Params) -> None:
        """Compute with other weights from the next step on.

        Raises:
            ModelError: one of them has not the shape, dtype or device of what the programs were compiled for.
        """
        leaves, _ = jax.tree.flatten_with_path(params)
        known, _ = jax.tree.flatten_with_path(self.params)
        if jax.tree.structure(params) != self._tree:  # type: ignore[operator]  # mypy does not know that they compare
            given, wanted = ({jax.tree_util.keystr(path) for path, _ in some} for some in (leaves, known))
            raise ModelError(f"the params have other parts than the model's: {', '.join(sorted(given ^ wanted)[:8])}")
        for (path, new), (_, old) in zip(leaves, known, strict=True):
            if (new.shape, new.dtype, new.sharding) != (old.shape, old.dtype, old.sharding):
                raise ModelError(
                    f"{jax.tree_util.keystr(path)} must be {old.dtype}{list(old.shape)} on {old.sharding}, got "
                    f"{new.dtype}{list(new.shape)} on {new.sharding}"
                )
        self.params, self._leaves = params, [leaf for _, leaf in leaves]

    def drop_pages(self) -> None:
        """Give the memory of the KV pages back. Nothing is in flight, and nothing is launched before
        :meth:`take_pages`."""
        self._followers.tell(PagesOrder("drop"))
        for part in jax.tree.leaves(self._kv):
            part.delete()

    def take_pages(self) -> None:
        """Take it again; the pages hold nothing."""
        self._followers.tell(PagesOrder("take"))
        self._kv = self._empty_pages()

    def move_pages(self, moves: PageMoves | None) -> None:
        """Carry out what the page bookkeeping has decided, before a page of it is written anew."""
        if moves is not None:
            self._followers.tell(MoveOrder(moves))
            self._kv = self._mover.move(self._kv, moves)

    def read_pages(self, pages: list[int]) -> np.ndarray:
        """See :meth:`PageMover.read`."""
        return self._mover.read(self._kv, pages)

    def write_pages(self, pages: list[int], rows: np.ndarray) -> None:
        """See :meth:`PageMover.write`."""
        self._kv = self._mover.write(self._kv, pages, rows)

    def gather_pages(self, pages: list[int]) -> Array:
        """See :meth:`PageMover.gather`."""
        return self._mover.gather(self._kv, pages)

    def scatter_pages(self, pages: list[int], rows: Any) -> None:
        """See :meth:`PageMover.scatter`."""
        self._kv = self._mover.scatter(self._kv, pages, rows)

    def measure_host_page_s(self) -> float:
        """See :meth:`PageMover.measure`; between two steps."""
        self._followers.tell(PagesOrder("measure"))
        self._kv, seconds = self._mover.measure(self._kv)
        return seconds

    @property
    def page_shape(self) -> tuple[tuple[int, ...], Any]:
        """Shape and dtype of a page that :meth:`read_pages` returns: [L, 2, page_size, K, D], of int8 pages bytes.
        The numbers lie in it as :attr:`page_order` says."""
        return self._mover.page.shape, self._mover.page.dtype

    @property
    def page_order(self) -> native.Order:
        """How a page holds its numbers."""
        return native.order_of(self._kv) if self.backend == "native" else "rows"

    @property
    def page_rows(self) -> jax.ShapeDtypeStruct:
        """See :attr:`PageMover.rows`."""
        return self._mover.rows

    @property
    def kv_bytes(self) -> int:
        return sum(part.nbytes for part in jax.tree.leaves(self._kv))

    def _upload_changes(self, changes: list[tuple[int, int]]) -> None:
        index = np.full(CHANGES_PER_UPLOAD, self.shape.num_slots * self.shape.table_width, np.int32)
        page = np.zeros(CHANGES_PER_UPLOAD, np.int32)
        index[: len(changes)], page[: len(changes)] = np.asarray(changes, np.int32).T
        assert self._change is not None, "compile() comes first"
        self._state = self._change(self._state, index, page)

    def _made_from(self) -> Iterable[object]:
        """All that the programs depend on, beside the source and the machine."""
        yield from (self.spec, self.shape, list(self.buckets), self.backend)
        yield from (self._processed_logprobs, self._deterministic, self._fast_norm, self._parallel)
        library = native.loaded()
        yield None if library is None else library.name  # its handlers stand in the programs
        yield jax.tree.map(_abstract, (self.params, self._kv, self._state))

    def _jobs(self) -> Iterable[Job]:
        """Every program, the slowest first."""
        params, kv, state = (jax.tree.map(_abstract, x) for x in (self.params, self._kv, self._state))
        for bucket in sorted(self.buckets, key=lambda bucket: -bucket.num_tokens):
            program = StepProgram(
                self._part,
                self._layouts[bucket],
                self.shape.page_size,
                self.backend,
                deterministic=self._deterministic,
                fast_norm=self._fast_norm,
                parallel=self._parallel,
            )
            yield Job(
                f"forward {bucket}",
                functools.partial(lower_forward, program, params, kv, state, self._placement),
                functools.partial(self._forward.__setitem__, bucket),
            )
        row_counts = sorted({bucket.num_seqs for bucket in self.buckets})
        mixed_tokens = [bucket.num_tokens for bucket in self.buckets if not bucket.decode_only]
        yield from self._samplers.jobs(params, state, row_counts, mixed_tokens)
        change = self._placement.abstract((CHANGES_PER_UPLOAD,), jnp.int32)
        yield Job(
            "change tables",
            functools.partial(
                jax.jit(self._placement.spread(apply_changes), donate_argnums=0).lower, state, change, change
            ),
            functools.partial(setattr, self, "_change"),
        )
        yield from self._mover.jobs()


def lower_forward(
    program: StepProgram, params: Params, kv: Any, state: Any, placement: Placement | None = None
) -> Lowered:
    """The forward of a bucket, ready to be compiled. The arguments are abstract; pages and (bare) state are donated."""
    leaves, tree = jax.tree.flatten(params)
    options = compiler_options(deterministic=program.deterministic, num_devices=program.parallel.size)
    forward: Callable[..., ForwardResult] = functools.partial(_forward, program, tree)
    if placement is not None:
        arguments = (jax.tree.leaves(partitions(params)), PAGES, WHOLE, WHOLE)
        forward = placement.spread(forward, arguments, ForwardResult._make((PAGES, *[WHOLE] * 4)))
    jitted = jax.jit(forward, donate_argnums=(1, 2), compiler_options=options)
    upload = jax.ShapeDtypeStruct((program.layout.size,), jnp.int32, sharding=state.last_token.sharding)
    return jitted.lower(leaves, kv, state.bare, upload)


def _forward(
    program: StepProgram, tree: PyTreeDef, leaves: list[Array], kv: KVPages, state: SlotState, upload: Array
) -> ForwardResult:
    return program.forward(jax.tree.unflatten(tree, leaves), kv, state, upload)


def _abstract(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
