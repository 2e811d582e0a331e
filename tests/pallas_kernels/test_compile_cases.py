"""What the compile report compiles leaves nothing of the tile tables out. Compiling it: test_compile_report.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import compile_worker
from pallas_kernels.compile_attention import CHUNKS, DECODES, Attention, attention_cases
from pallas_kernels.compile_case import Case
from pallas_kernels.compile_cases import EXPERTS, kernel_cases, product_tile
from pallas_kernels.triton import tiles
from pallas_kernels.triton.targets import TARGETS

LARGEST_GROUP = 128
KINDS = [
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("float32", "float8_e4m3fn"),
]
"""What products run in, over which pages. (float16 as bfloat16.)"""


def entries_of(cases: Iterable[Attention], target: str) -> set[tuple[Any, ...]]:
    """The tiles that some cases compile, and for what."""
    return {
        (kernel, case.head_dim, tile, case.products, case.pages)
        for case in cases
        for kernel, tile in case.tiles(target).items()
    }


def entries_of_the_tables(target: str) -> set[tuple[Any, ...]]:
    """Those that any batch can meet."""
    found = set()
    for kernel, table in ((CHUNKS, tiles.CHUNK_TILES), (DECODES, tiles.DECODE_TILES)):
        for head_dim, group, (products, pages) in itertools.product(table[target], range(1, LARGEST_GROUP + 1), KINDS):
            if TARGETS[target].has_float8 or pages != "float8_e4m3fn":
                shapes = tiles.tile_shapes(TARGETS[target], head_dim, group, decode=kernel == DECODES)
                found.add((kernel, head_dim, shapes.of(products), products, pages))
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_over_every_kind_of_pages_has_a_case(target):
    cases = attention_cases(target)
    assert len({case.name for case in cases}) == len(cases), "names tell them apart"
    assert kernel_cases(target).keys() >= {case.name for case in cases}
    assert entries_of_the_tables(target) - entries_of(cases, target) == set()


@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_of_products_has_a_case_and_fits_its_target(target):
    assert {product_tile(target, *each) for each in EXPERTS} == set(tiles.PRODUCT_TILES[target])
    for num_tokens, dtype in EXPERTS:
        tiles.require_product_fits(product_tile(target, num_tokens, dtype), TARGETS[target], dtype)
        promised = kernel_cases(target)[f"experts of {num_tokens} {dtype}"].promised_bytes
        assert 0 < promised["grouped_product"] <= TARGETS[target].shared_memory_bytes


def test_groups_beyond_those_that_are_looked_at_have_no_tile_of_their_own():
    for head_dim in tiles.DECODES:
        for products in ("bfloat16", "float32"):
            known, larger = (
                {tiles.tile_shapes(TARGETS["h200"], head_dim, group, decode=True).of(products) for group in groups}
                for groups in (range(1, LARGEST_GROUP + 1), (129, 200, 1000))
            )
            assert larger <= known


def test_decodes_of_a_group_compile_one_kernel_and_promise_its_shared_memory():
    case = Attention(head_dim=64, heads=(24, 1), decode_only=True)
    assert case.name == "decodes d64 bfloat16 24:1" and list(case.case("l4").promised_bytes) == ["decode_attention_d64"]
    for name in ("raw queries d64", "attention d64 bfloat16"):
        assert kernel_cases("l4")[name].promised_bytes["decode_attention_d64"] > 0


def test_a_promise_about_a_kernel_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel may have got another name; the bound must not be left out in silence."""

    def compile_for(*_: Any) -> None:
        (tmp_path / "a.ptx").write_text(".entry decode_attention_d64_1(")
        (tmp_path / "thunk_sequence.txt").write_text(" decode_attention_d64_1 grid: [1] shared_memory: 9 bytes")

    monkeypatch.setattr(compile_worker, "compile_for", compile_for)
    facts = {"registers": 1, "spill_bytes": 0, "static_shared_bytes": 0}
    monkeypatch.setattr(compile_worker, "assemble", lambda *_: dict(facts))
    case = Case(jnp.sin, (jax.ShapeDtypeStruct((1,), jnp.float32),))
    assert compile_worker.compile_kernels(case, "l4", tmp_path, tmp_path)["kernels"]["decode_attention_d64_1"]
    (tmp_path / "a.ptx").unlink()
    case = case._replace(promised_bytes={"decode_attention_d64": 9})
    with pytest.raises(
        RuntimeError, match=r"\['decode_attention_d64_1'\] in .*, 1 kernels, \['decode_attention_d64'\] am"
    ):
        compile_worker.compile_kernels(case, "l4", tmp_path, tmp_path)
