"""The programs of a step (forward, sample, log-probabilities), as pure functions of device arrays. Only shapes, the
spec and the tier are static."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxcb import models
from jaxcb.logits_processor import LogitsProcessor
from jaxcb.models import ModelSpec
from jaxcb.models import fused as fused_models
from jaxcb.models import native as native_models
from jaxcb.models.attend import LayerIndex
from jaxcb.models.norm import rms_norm
from jaxcb.models.parallel import ALONE, TensorParallel
from jaxcb.models.params import Params
from jaxcb.models.tiles import CPU_ROWS, GPU_ROWS, SAMPLER_ROWS, InTiles, directly, tiles_of
from jaxcb.sampling import Controls, Draws, Tier, sample
from jaxcb.sampling.controls import keep_allowed
from jaxcb.sampling.logprobs import RowLogprobs, row_logprobs
from jaxcb.step.batch import SlotState, StepBatch, StepLayout, apply_changes, unpack_sampling
from jaxcb.step.controls import rows_of
from jaxcb.step.kv_pool import KVPages, flat, like
from jaxcb.step.processors import ProcessorRows, apply, update
from pallas_kernels import RawQueries, attention_metadata, native, ragged_paged_attention, write_kv
from pallas_kernels.metadata import AttentionMetadata, Backend
from pallas_kernels.platform import platform


class ForwardResult(NamedTuple):
    kv: KVPages
    state: SlotState
    """Both updated in place when donated; of the state the bare part."""
    logits: Float[Array, "S V"]
    """Of all rows; of those that sample nothing they are not used."""
    sample_part: Int[Array, "sample_size"]
    """The upload's part for :func:`sample_step`."""
    hidden: Float[Array, "T E"] | None
    """What :func:`prompt_logprobs` reads. None where every row has one token."""


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """Traces one bucket's forward. ``page_size`` and ``backend`` are the engine's; of a model that is cut over several
    devices, ``spec`` is one part's."""

    spec: ModelSpec
    layout: StepLayout
    page_size: int
    backend: Backend
    deterministic: bool = False
    fast_norm: bool = False
    """The norms' scales are in the weights (:func:`jaxcb.models.fused.fold_norms`)."""
    parallel: TensorParallel = ALONE

    def forward(self, params: Params, kv: KVPages, state: SlotState, upload: Int[Array, "size"]) -> ForwardResult:
        """Write the step's K and V into their pages and compute the logits of each row's last token."""
        params = self.parallel.own(params)
        batch = self.layout.unpack(upload)
        state = apply_changes(state, batch.change_index, batch.change_page)
        slots = batch.slots[batch.token_rows]
        token_ids = jnp.where(batch.token_ids < 0, state.last_token[slots], batch.token_ids)
        hidden, kv = self._layers(params, kv, state, batch, token_ids)
        last = hidden
        if not self.layout.bucket.decode_only:
            last = hidden[jnp.maximum(batch.query_starts[1:] - 1, 0)]
        num_rows = jnp.sum(batch.context_lens > 0)
        logits = head_logits(
            self.spec, self.backend, params, last, num_rows, self.parallel, deterministic=self.deterministic
        )
        return ForwardResult(kv, state, logits, self.layout.sample_part(upload), None if last is hidden else hidden)

    def _layers(
        self, params: Params, kv: KVPages, state: SlotState, batch: StepBatch, token_ids: Int[Array, "T"]
    ) -> tuple[Float[Array, "T E"], KVPages]:
        in_tiles = row_tiles(batch.query_starts[-1], deterministic=self.deterministic)
        if self.backend == "native":
            return self._native_layers(params, kv, state, batch, token_ids, in_tiles)
        spec, flat_pages = self.spec, flat(kv)
        tables = state.block_tables[batch.slots]
        pages = tables[batch.token_rows, batch.positions // self.page_size]
        is_token = jnp.arange(token_ids.shape[0]) < batch.query_starts[-1]
        pages = jnp.where(is_token, pages, 0)  # padding writes to the trash page
        offsets = batch.positions % self.page_size
        windows = sorted(set(spec.windows), key=str)
        kind_of_layer = [windows.index(window) for window in spec.windows]
        kinds = [
            functools.partial(
                ragged_paged_attention,
                metadata=self._metadata(batch, tables, window),
                num_layers=spec.num_layers,
                window=window,
                backend=self.backend,
                interpret=platform() == "cpu",
            )
            for window in windows
        ]

        if self.backend in ("triton", "mosaic") and not self.deterministic:

            def attend_pages(
                layer: int, kv: Array, q: Float[Array, "T H D"] | RawQueries, arrivals: Int[Array, "T K"] | None
            ) -> Float[Array, "T H D"]:
                return kinds[kind_of_layer[layer]](q, kv, layer=layer, arrivals=arrivals)

            places = fused_models.Places(batch.positions, pages, offsets)
            hidden, flat_pages = fused_models.apply_layers(
                spec,
                params,
                token_ids,
                places,
                flat_pages,
                attend_pages,
                decode_only=self.layout.bucket.decode_only,
                fast_norm=self.fast_norm,
                parallel=self.parallel,
            )
            return hidden, like(kv, flat_pages)

        def attend(
            layer: LayerIndex, kv: Any, q: Float[Array, "T H D"], k: Float[Array, "T K D"], v: Float[Array, "T K D"]
        ) -> tuple[Any, Float[Array, "T H D"]]:
            kv = write_kv(kv, k, v, pages, offsets, layer=layer, num_layers=spec.num_layers, backend=self.backend)
            if isinstance(layer, int):
                return kv, kinds[kind_of_layer[layer]](q, kv, layer=layer)
            branches = [functools.partial(kind, layer=layer) for kind in kinds]
            return kv, lax.switch(jnp.asarray(kind_of_layer)[layer], branches, q, kv)

        hidden, flat_pages = models.apply_layers(
            spec, params, token_ids, batch.positions, flat_pages, attend, in_tiles, self.parallel
        )
        return hidden, like(kv, flat_pages)

    def _native_layers(
        self,
        params: Params,
        kv: KVPages,
        state: SlotState,
        batch: StepBatch,
        token_ids: Int[Array, "T"],
        in_tiles: InTiles,
    ) -> tuple[Float[Array, "T E"], KVPages]:
        tables = native.Tables(batch.query_starts, batch.context_lens, state.block_tables[batch.slots])
        hidden, flat_pages = native_models.apply_layers(
            self.spec, params, token_ids, batch.positions, flat(kv), tables, in_tiles
        )
        return hidden, like(kv, flat_pages)

    def _metadata(self, batch: StepBatch, tables: Int[Array, "S P"], window: int | None) -> AttentionMetadata:
        return attention_metadata(
            batch.query_starts,
            batch.context_lens,
            tables,
            num_tokens=self.layout.bucket.num_tokens,
            page_size=self.page_size,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            window=window,
            decode_only=self.layout.bucket.decode_only,
            one_path=self.deterministic,
            backend=self.backend,
        )


class SampleResult(NamedTuple):
    state: SlotState
    token_ids: Int[Array, "S"]
    drawn_from: Float[Array, "S V"] | None
    """The logits after every change, if they were asked for."""


def sample_step(
    state: SlotState,
    logits: Float[Array, "S V"],
    part: Int[Array, "sample_size"],
    *,
    tier: Tier,
    keep_logits: bool,
    deterministic: bool = False,
    processors: Sequence[LogitsProcessor] = (),
    parallel: TensorParallel = ALONE,
) -> SampleResult:
    """Sample every row and leave its token in its slot, where the next step finds it."""
    slots, draws = unpack_sampling(part, logits.shape[0])
    controls = rows_of(state.controls, slots) if tier is Tier.FULL else None
    own = jax.tree.map(lambda values: values[slots], state.processors)
    in_tiles: InTiles = directly
    if deterministic and tier is not Tier.GREEDY:  # which sums nothing
        samples = slots < state.last_token.shape[0] - 1
        num_rows = jnp.max(jnp.where(samples, jnp.arange(1, slots.shape[0] + 1, dtype=jnp.int32), 0))
        in_tiles = tiles_of(SAMPLER_ROWS, num_rows)
    token_ids, drawn_from = in_tiles(functools.partial(_sample, processors, tier), logits, draws, controls, own)
    token_ids = parallel.first(token_ids)
    written = jnp.maximum(token_ids, 0)  # where there is none the sequence ends, and nobody reads it
    if tier is Tier.FULL:
        history = state.controls.history.at[slots, draws.positions].set(written, mode="drop")
        state = state._replace(controls=state.controls._replace(history=history))
    last_token = state.last_token.at[slots].set(written, mode="promise_in_bounds")
    after = jax.tree.map(
        lambda values, rows: values.at[slots].set(rows), state.processors, update(processors, own, written)
    )
    state = state._replace(last_token=last_token, processors=after)
    return SampleResult(state, token_ids, drawn_from if keep_logits else None)


def _sample(
    processors: Sequence[LogitsProcessor],
    tier: Tier,
    logits: Float[Array, "S V"],
    draws: Draws,
    controls: Controls | None,
    own: tuple[ProcessorRows, ...],
) -> tuple[Int[Array, "S"], Float[Array, "S V"]]:
    if processors:
        logits = apply(processors, logits.astype(jnp.float32), own)
    return sample(logits, draws, controls, tier=tier)


def mask_logits(logits: Float[Array, "S V"], mask: Int[Array, "S W"]) -> Float[Array, "S V"]:
    """-inf where a grammar doesn't allow the token: where its bit, i of word w for id 32 w + i, is 0."""
    return keep_allowed(logits, lax.bitcast_convert_type(mask, jnp.uint32))


def mask_some_logits(
    logits: Float[Array, "S V"], rows: Int[Array, "C"], mask: Int[Array, "C W"]
) -> Float[Array, "S V"]:
    """The same for some of the rows; S stands for none."""
    return logits.at[rows].set(mask_logits(logits.at[rows].get(mode="clip"), mask), mode="drop")


def prompt_logprobs(
    spec: ModelSpec,
    backend: Backend,
    params: Params,
    hidden: Float[Array, "T E"],
    rows: Int[Array, "R"],
    targets: Int[Array, "R"],
    num_rows: Int[Array, ""],
    *,
    every: bool,
    deterministic: bool = False,
    parallel: TensorParallel = ALONE,
) -> RowLogprobs:
    """Log-probabilities of the tokens that follow some positions of a step; of the first ``num_rows`` of them."""
    params = parallel.own(params)
    logits = head_logits(spec, backend, params, hidden[rows], num_rows, parallel, deterministic=deterministic)
    return token_logprobs(logits, targets, num_rows, every=every, deterministic=deterministic)


class Pooled(NamedTuple):
    """Of final hidden states, after the last norm: of the tokens of each row."""

    sums: Float[Array, "S E"]
    last: Float[Array, "S E"]


def pool(
    spec: ModelSpec,
    scale: Float[Array, "E"],
    hidden: Float[Array, "T E"],
    token_rows: Int[Array, "T"],
    last: Int[Array, "S"],
) -> Pooled:
    """Sums and last rows. ``token_rows`` is S for tokens of no row; ``last`` is the index of each row's last token."""
    normed = rms_norm(hidden.astype(jnp.float32), scale, spec.rms_norm_eps)
    sums = jnp.zeros((last.shape[0], hidden.shape[1]), jnp.float32).at[token_rows].add(normed, mode="drop")
    return Pooled(sums, normed[last])


def token_logprobs(
    logits: Float[Array, "S V"],
    token_ids: Int[Array, "S"],
    num_rows: Int[Array, ""],
    *,
    every: bool,
    deterministic: bool = False,
) -> RowLogprobs:
    """Log-probabilities of a token of each row; of the first ``num_rows`` rows."""
    in_tiles = tiles_of(SAMPLER_ROWS, num_rows) if deterministic else directly
    return in_tiles(functools.partial(row_logprobs, every=every), logits, token_ids)


def head_logits(
    spec: ModelSpec,
    backend: Backend,
    params: Params,
    hidden: Float[Array, "S E"],
    num_rows: Int[Array, ""],
    parallel: TensorParallel = ALONE,
    *,
    deterministic: bool = False,
) -> Float[Array, "S V"]:
    """Logits; of the first ``num_rows`` rows at least."""
    if backend == "native":
        return native_models.apply_head(spec, params, hidden, num_rows)
    return models.apply_head(spec, params, hidden, row_tiles(num_rows, deterministic=deterministic), parallel)


def compiler_options(*, deterministic: bool, num_devices: int = 1) -> dict[str, bool | str] | None:
    """For every program of a step. What XLA calls an option depends on its version: unknown ones are an error.

    On a GPU:

    - XLA picks kernels by timing them, another one in each process perhaps: to be deterministic it must take the first
      that works, and none that adds in the order of arrival.
    - Products are the library's: their epilogues add the residual stream and biases, and no weight is ever converted
      or copied (python -m bench.audit).
    - The likeliest ids come from a radix select: a sort of 256 rows of 128,256 logits would read and write them 24
      times.
    - Nothing is computed twice to save memory: XLA counts the pages, which fill the GPU, once for each kernel that
      writes into them, finds that there is too little memory, and repeats small kernels in every layer.
    - Sums over several devices belong to the step's one CUDA graph. (They are added to what is in it anyhow.)
    - Of several hosts each times kernels for itself: to share that they would have to compile the same program at the
      same time, and one of them may have it on its disk.

    On a CPU, jax before 0.11 can do without a stage of its compiler that takes nearly half of the time and makes
    nothing here faster.
    """
    old = jax.__version_info__ < (0, 11)
    match platform():
        case "gpu":
            select = "use_raft_select_k" if old else "enable_raft_for_stable_topk"
            options: dict[str, bool | str] = {
                "xla_gpu_deterministic_ops": deterministic,
                "xla_gpu_enable_triton_gemm": False,
                f"xla_gpu_experimental_{select}": True,
                "xla_disable_hlo_passes": "rematerialization",
            }
            if num_devices > 1:
                options["xla_gpu_enable_command_buffer"] = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES"
                options["xla_gpu_shard_autotuning"] = False
            return options
        case "cpu" if old:
            return {"xla_cpu_use_fusion_emitters": False}
    return None


def row_tiles(num_rows: Int[Array, ""], *, deterministic: bool) -> InTiles:
    """How the model's row-wise parts are computed."""
    if not deterministic:
        return directly
    return tiles_of(CPU_ROWS if platform() == "cpu" else GPU_ROWS, num_rows)
