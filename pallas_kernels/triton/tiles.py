"""Tile sizes of the triton kernels that multiply, by target, each with its reason: attention's by head size and kind of
step, those of products of groups of rows by how many rows a group has."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import DTypeLike

from pallas_kernels.triton.targets import Target


class TileShape(NamedTuple):
    """How a kernel cuts its work.

    Arguments:
        rows: token x head rows of a program; a power of two from 16, the least that a tensor core takes.
        block: KV positions of one product.
        num_warps: warps of a program.
        num_stages: KV blocks in flight.
        most_rows: of a decode, whose program has all query heads of a KV head, if they are no more than these; None:
            ``rows``. Programs share the heads of a larger group.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int
    most_rows: int | None = None

    def of_group(self, group: int) -> TileShape:
        """The tile of a decode with ``group`` query heads a KV head."""
        most = self.most_rows or self.rows
        return self._replace(rows=min(max(self.rows, pl.next_power_of_2(group)), most))


class Tiles(NamedTuple):
    """Tiles by what the products run in. ``narrow``: elements of at most 2 bytes."""

    narrow: TileShape
    float32: TileShape

    def of(self, dtype: DTypeLike) -> TileShape:
        """The tile for products in ``dtype``."""
        return self.narrow if jnp.dtype(dtype).itemsize <= 2 else self.float32


Table = dict[int, Tiles]
"""Tiles by the largest head size that they serve."""

FLOAT32_CHUNKS = {
    # A float32 product is three of TF32, whose operands are split in registers. 64 rows of head size 128 took 255 and
    # spilled 116 bytes under jax 0.10.2; 32 take 252. Tiles are cut in 64 rows all the same, for two programs each.
    # Over int8 pages of head size 64, 4 warps spill 28 bytes on an A100; 8 take 198 registers there, 186 on an L4.
    64: TileShape(rows=64, block=16, num_warps=8, num_stages=2),
    128: TileShape(rows=32, block=16, num_warps=4, num_stages=2),
    # 32 rows spill 960 bytes even in 8 warps (226 registers over 8-bit pages, whose products are two).
    256: TileShape(rows=16, block=16, num_warps=8, num_stages=2),
}
HOPPER_CHUNKS: Table = {
    # 64 rows are one wgmma, 16 a warp. bfloat16 compiles to 128 registers at head size 64 and 212 at 128, without
    # spills, and 40 and 80 KB of shared memory: two or more programs a core.
    64: Tiles(TileShape(rows=64, block=64, num_warps=4, num_stages=2), FLOAT32_CHUNKS[64]),
    128: Tiles(TileShape(rows=64, block=64, num_warps=4, num_stages=2), FLOAT32_CHUNKS[128]),
    # Half the block: 64 positions would take 160 KB, one program a core.
    256: Tiles(TileShape(rows=64, block=32, num_warps=4, num_stages=2), FLOAT32_CHUNKS[256]),
}
AMPERE_CHUNKS: Table = {
    # mma takes the queries from registers: at head size 128 a block of 64 takes 255 and spills 28 bytes on an L4, one
    # of 32 takes 184 there and 246 on an A100.
    64: Tiles(TileShape(rows=64, block=32, num_warps=4, num_stages=2), FLOAT32_CHUNKS[64]),
    128: Tiles(TileShape(rows=64, block=32, num_warps=4, num_stages=2), FLOAT32_CHUNKS[128]),
    # 64 rows x 256 features of the result fill the registers of 4 warps, 8 take 172 to 178; a block of 64 asks for
    # 106,496 bytes of shared memory, and an L4 has 101,376.
    256: Tiles(TileShape(rows=64, block=32, num_warps=8, num_stages=2), FLOAT32_CHUNKS[256]),
}
DECODES: Table = {
    # One token a tile: the products are mostly padding and the time goes into loads. Page numbers take a stage of the
    # pipeline, so three stages keep one block in flight: with 4 programs of 38 KB a core that is twice the bytes that a
    # core of an H200 has to have under way (4.8 TB/s x 0.7 us / 132 = 25 KB). 72 and 107 registers for bfloat16 at head
    # sizes 64 and 128, the merge included: 4 programs of 128 threads fit.
    # Larger groups have as many rows as the registers hold (71 query heads a KV head: 128 rows of head size 128 spilled
    # 28 bytes, of 256 4,916): 128 of 64 features take 250 registers on an L4, 64 of 128 take 249; float32 has half.
    64: Tiles(TileShape(16, 64, 4, 3, most_rows=128), TileShape(16, 16, 4, 3, most_rows=64)),
    128: Tiles(TileShape(16, 64, 4, 3, most_rows=64), TileShape(16, 16, 4, 3, most_rows=32)),
    # As many bytes in half the positions. float32 in 4 warps spills 28 bytes, in 8 it takes 249 registers, with no room
    # for another row.
    256: Tiles(TileShape(16, 32, 4, 3, most_rows=32), TileShape(16, 16, 8, 3)),
}

CHUNK_TILES = {"h200": HOPPER_CHUNKS, "h100": HOPPER_CHUNKS, "a100": AMPERE_CHUNKS, "l4": AMPERE_CHUNKS}
"""Tiles of chunks of a prompt, by target."""
DECODE_TILES = {"h200": DECODES, "h100": DECODES, "a100": DECODES, "l4": DECODES}
"""Tiles of single tokens, by target."""


class ProductTile(NamedTuple):
    """What a program of ``grouped_product`` computes: ``rows`` by ``columns`` of the result, in steps of ``block``
    inputs."""

    rows: int
    columns: int
    block: int
    num_warps: int
    num_stages: int


class ProductTiles(NamedTuple):
    """Tiles by what the products run in, and the rows of a group. ``few``, ``many``: elements of at most 2 bytes."""

    few: ProductTile
    many: ProductTile
    float32: ProductTile

    def of(self, dtype: DTypeLike, *, num_rows: int, num_groups: int) -> ProductTile:
        """The tile for so many rows in all. ``few``: no more than its own a group, were they spread evenly."""
        if jnp.dtype(dtype).itemsize > 2:
            return self.float32
        return self.few if num_rows <= self.few.rows * num_groups else self.many


PRODUCTS = ProductTiles(
    # Weights are all that counts: 8 KB of them a step and three steps in flight, and for one token of an 8-expert
    # choice of 1,536 features already 384 programs.
    few=ProductTile(rows=16, columns=32, block=128, num_warps=4, num_stages=4),
    # One wgmma; two programs share a core of an H200.
    many=ProductTile(rows=64, columns=128, block=64, num_warps=4, num_stages=3),
    # Each product is three of TF32 (:class:`pallas_kernels.triton.attend.Geometry`), with operands split in registers.
    float32=ProductTile(rows=16, columns=32, block=32, num_warps=4, num_stages=2),
)
PRODUCT_TILES = {"h200": PRODUCTS, "h100": PRODUCTS, "a100": PRODUCTS, "l4": PRODUCTS}
"""Tiles of products of groups of rows, by target."""


def tile_shapes(target: Target, head_dim: int, group: int, *, decode: bool) -> Tiles:
    """The tiles for heads of ``head_dim``, ``group`` query heads a KV head. A program may have part of a query tile's
    rows, or part of a decode's heads."""
    table = (DECODE_TILES if decode else CHUNK_TILES)[target.name]
    served = [largest for largest in table if head_dim <= largest]
    if not served:
        raise ValueError(f"head_dim must be at most {max(table)} for backend triton, got {head_dim}")
    tiles = table[min(served)]
    if not decode:
        return tiles
    return tiles._replace(narrow=tiles.narrow.of_group(group), float32=tiles.float32.of_group(group))


def require_fits(shape: TileShape, target: Target, *, head_dim: int, dtype: DTypeLike, kv_dtype: DTypeLike) -> None:
    """Refuse what can't run.

    Raises:
        ValueError: the tile asks for more shared memory than the target has, or the target can't read the pages.
    """
    if jnp.dtype(kv_dtype).name == "float8_e4m3fn" and not target.has_float8:
        raise ValueError(
            f"kv_pages must be of dtype int8 on an {target.device}: it has no float8 numbers (compute capability "
            f"{'.'.join(map(str, target.compute_capability))}, 8.9 and later have them), got {kv_dtype}"
        )
    asked = shared_memory_bytes(shape, target, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype)
    _require_room(asked, target, f"{shape} at head size {head_dim}")


def require_product_fits(tile: ProductTile, target: Target, dtype: DTypeLike) -> None:
    """Refuse what can't run.

    Raises:
        ValueError: the tile asks for more shared memory than the target has.
    """
    _require_room(product_shared_memory_bytes(tile, target, dtype), target, f"{tile} in {jnp.dtype(dtype).name}")


def _require_room(asked: int, target: Target, tile: str) -> None:
    if asked > target.shared_memory_bytes:
        raise ValueError(
            f"the tile must fit the {target.shared_memory_bytes:,} bytes of shared memory of an {target.device}, "
            f"got {asked:,} bytes for {tile}: take fewer rows, a shorter block or fewer stages"
        )


def shared_memory_bytes(
    shape: TileShape, target: Target, *, head_dim: int, dtype: DTypeLike, kv_dtype: DTypeLike
) -> int:
    """Most shared memory that Triton asks for, to which the compile report holds it: queries, weights, page numbers,
    and blocks in flight.

    Hopper's wgmma takes the weights from registers and keeps a block more in flight than the mma of other tiles.
    8-bit pages are converted on the way into a product, which holds the converted block beside those in flight.
    Queries and weights of float32 are there twice: as TF32, and what that leaves of them.
    """
    itemsize, kv_bytes = jnp.dtype(dtype).itemsize, jnp.dtype(kv_dtype).itemsize
    width, block = pl.next_power_of_2(head_dim), shape.block
    wgmma = target.compute_capability == (9, 0) and shape.rows >= 64 and itemsize == 2
    queries = shape.rows * (width if wgmma else width + block) * itemsize * (2 if itemsize == 4 else 1)
    in_flight = _in_flight(shape.num_stages, itemsize, wgmma=wgmma)
    converted = 2 * block * width * itemsize if kv_bytes == 1 else 0
    page_numbers = shape.num_stages * block * 4
    return queries + in_flight * 2 * block * width * kv_bytes + converted + page_numbers


def product_shared_memory_bytes(tile: ProductTile, target: Target, dtype: DTypeLike) -> int:
    """Most shared memory that Triton asks for in a product of groups of rows: that of the steps in flight, of which
    wgmma has one more."""
    itemsize = jnp.dtype(dtype).itemsize
    wgmma = target.compute_capability == (9, 0) and tile.rows >= 64 and itemsize == 2
    in_flight = _in_flight(tile.num_stages, itemsize, wgmma=wgmma)
    return in_flight * (tile.rows + tile.columns) * tile.block * itemsize


def _in_flight(num_stages: int, itemsize: int, *, wgmma: bool) -> int:
    """Blocks in shared memory at once."""
    return num_stages if wgmma else max(2 if itemsize == 4 else 1, num_stages - 1)
