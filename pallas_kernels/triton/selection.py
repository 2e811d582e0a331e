"""The triton backend's top-k and top-p: a program a row narrows an interval of float bits down to one number.

A non-negative float orders like its bits read as an integer. A survey counts, for 8 bounds at once, the weights from
each bound on, and sums them. The first survey reads the whole row for bounds 0, 2**-13, 2**-11, ..., 2**-1; what lies
at or above the right one is gathered, usually some hundreds of tokens, and the surveys that take the interval's other
bits, 3 each, read only those. For example, with k = 3:

    weights   1   .4   .3   .3   .01   ...      from 2**-1 on: 1 of them; from 2**-3 on: 4 of them, 3 are wanted
    gathered  1   .4   .3   .3                  then 8 surveys of [2**-3, 2**-1): the third largest is .3, a tie stays

Each lane gathers what it met, into its column of a few rows of scratch memory: no order depends on timing, so sums are
the same in every run. If a column overflows, because the row is flat, surveys read the whole row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.xla.threshold import SMALLEST_NORMAL_BITS, SMALLEST_SHARE

LANES = 1024
"""Neighbouring weights that are read at once, 4 a thread."""
AT_ONCE = 4
"""Such reads in flight: 16 KB a program, of which an H200 runs 2 a core."""
SLOTS = 16
"""Weights that a lane can gather: 16,384 a row in all, 64 KB."""
WAYS = 8
"""Bounds of a survey: 16 would take 3 passes less of the interval's 8 to 10, and 128 registers for its sums."""
ONE_BITS = 127 << 23
TWO_OCTAVES = 24
"""Bits between a bound of the first survey and the next, a factor of 4."""


class Found(NamedTuple):
    """A survey's counts and sums of the weights from each bound on."""

    counts: Int32[Array, " WAYS"]
    sums: Float[Array, " WAYS"]


def least_kept_weight(
    weights: Float[Array, "S V"], top_k: Int32[Array, " S"], top_p: Float[Array, " S"], *, interpret: bool
) -> Float[Array, " S"]:
    """:func:`pallas_kernels.least_kept_weight`, arguments already checked."""
    num_rows = weights.shape[0]
    threshold, _ = pl.pallas_call(
        lambda *refs: _kernel(*refs, interpret=interpret),
        grid=(num_rows,),
        out_shape=(
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, SLOTS, LANES), jnp.float32),
        ),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="least_kept_weight",
    )(weights, top_k, top_p)
    return threshold


class Region(NamedTuple):
    """What surveys read: so many runs of LANES weights of the row itself, or of those gathered. One number is 0."""

    row_runs: Any
    gathered_runs: Any


class Row(NamedTuple):
    """Refs and the number of a row."""

    weights: Any
    scratch: Any
    number: Any

    def run(self, number: Any, lane: Any) -> Any:
        """A run of the row's weights; 0 past its end."""
        index = number * LANES + lane
        return plgpu.load(self.weights.at[self.number, index], mask=index < self.weights.shape[1], other=0.0)

    def gathered(self, slot: Any, lane: Any) -> Any:
        """What the lanes have in a slot."""
        return plgpu.load(self.scratch.at[self.number, slot, lane])


def _kernel(
    weights_ref: Any, top_k_ref: Any, top_p_ref: Any, threshold_ref: Any, scratch_ref: Any, *, interpret: bool
) -> None:
    """One row."""
    number = pl.program_id(0)
    row, size = Row(weights_ref, scratch_ref, number), weights_ref.shape[1]
    k, share = top_k_ref[number], jnp.maximum(top_p_ref[number], SMALLEST_SHARE)
    by_rank, by_mass = (k > 0) & (k < size), share < 1.0
    all_runs, none = jnp.int32(pl.cdiv(size, LANES)), jnp.int32(0)

    def search(region: Region, low: Any, num_bits: Any, active: Any, holds: Any) -> Any:
        """The largest number within ``num_bits`` from ``low`` on that holds; low, which is known to, if not active."""

        def narrow(i: Any, low: Any) -> Any:
            bounds = low + (jnp.arange(WAYS) << (num_bits - 3 * (i + 1)))
            return jnp.max(jnp.where(holds(_survey(row, region, bounds)), bounds, low))

        return lax.fori_loop(0, jnp.where(active, num_bits // 3, 0), narrow, low)

    way = jnp.arange(WAYS)
    octaves = jnp.where(way > 0, ONE_BITS + (way << TWO_OCTAVES) - (15 << (TWO_OCTAVES - 1)), 0)
    first = _survey(row, Region(jnp.where(by_rank | by_mass, all_runs, none), none), octaves)
    total = jnp.max(first.sums)  # from bound 0 on
    reached = jnp.where(by_rank, first.counts >= k, (first.sums >= share * total) & (first.sums > 0.0))
    low = jnp.max(jnp.where(reached, octaves, 0))
    used = _gather(row, low, jnp.where(low > 0, all_runs, none))
    if not interpret:  # which runs a program as one thread
        plgpu.debug_barrier()
    is_gathered = (low > 0) & (used <= SLOTS)
    region = Region(jnp.where(is_gathered, none, all_runs), jnp.where(is_gathered, used, none))
    num_bits = jnp.where(low > 0, jnp.int32(TWO_OCTAVES), jnp.int32(30))
    low = search(region, low, num_bits, by_rank, lambda found: found.counts >= k)

    rank_is_bound = by_rank & by_mass
    kept = _survey(row, Region(*(jnp.where(rank_is_bound, runs, none) for runs in region)), low + 0 * way)
    goal = share * jnp.where(rank_is_bound, jnp.max(kept.sums), total)
    num_bits = jnp.where(rank_is_bound, jnp.int32(30), num_bits)
    low = search(region, low, num_bits, by_mass & (goal > 0.0), lambda found: found.sums >= goal)
    bits = jnp.where(low < SMALLEST_NORMAL_BITS, 0, low)
    threshold_ref[number] = lax.bitcast_convert_type(bits, jnp.float32)


def _survey(row: Row, region: Region, bounds: Int32[Array, " WAYS"]) -> Found:
    """Count and sum the region's weights from each bound on. (Zeros past its end count from bound 0 on.)"""
    lane = jnp.arange(LANES)[None, :]  # with two axes from the start a thread keeps what it has loaded

    def add(values: list[Any], carry: tuple[Any, Any]) -> tuple[Any, Any]:
        counts, sums = carry
        for value in values:
            from_bound = lax.bitcast_convert_type(value, jnp.int32) >= bounds[:, None]
            counts += from_bound.astype(jnp.int32)
            sums += jnp.where(from_bound, value, 0.0)
        return counts, sums

    def add_row(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return add([row.run(i * AT_ONCE + j, lane) for j in range(AT_ONCE)], carry)

    def add_gathered(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        return add([row.gathered(i, lane)], carry)

    nothing = (jnp.zeros((WAYS, LANES), jnp.int32), jnp.zeros((WAYS, LANES), jnp.float32))
    carry = lax.fori_loop(0, pl.cdiv(region.row_runs, AT_ONCE), add_row, nothing)
    counts, sums = lax.fori_loop(0, region.gathered_runs, add_gathered, carry)
    return Found(counts.sum(axis=1), sums.sum(axis=1))


def _gather(row: Row, low: Any, num_runs: Any) -> Any:
    """Store each lane's weights from ``low`` on in its slots, and zeros in the rest of those that any lane uses.

    Returns the slots that are used; more than SLOTS if some lane had too few.
    """
    lane = jnp.arange(LANES)

    def store(slot: Any, value: Any, mask: Any) -> None:
        plgpu.store(row.scratch.at[row.number, jnp.minimum(slot, SLOTS - 1), lane], value, mask=mask & (slot < SLOTS))

    def add(i: Any, count: Any) -> Any:
        for value in [row.run(i * AT_ONCE + j, lane) for j in range(AT_ONCE)]:
            hit = lax.bitcast_convert_type(value, jnp.int32) >= low
            store(count, value, hit)
            count += hit.astype(jnp.int32)
        return count

    count = lax.fori_loop(0, pl.cdiv(num_runs, AT_ONCE), add, jnp.zeros(LANES, jnp.int32))
    used = jnp.max(count)

    def clear(slot: Any, _: Any) -> Any:
        store(slot + jnp.zeros(LANES, jnp.int32), jnp.zeros(LANES, jnp.float32), count <= slot)
        return _

    lax.fori_loop(0, jnp.minimum(used, SLOTS), clear, 0)
    return used
