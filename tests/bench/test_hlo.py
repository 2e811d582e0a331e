"""Bytes of kernels, out of a text like those that XLA:GPU leaves."""

from __future__ import annotations

import pytest

from bench.common import BenchError
from bench.hlo import Kernel, Shape, Traffic, layers, parse

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_gather (table: bf16[1000,64], ids: s32[4]) -> bf16[4,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %ids = s32[4]{0} parameter(1)
  %column = s32[4,1]{1,0} bitcast(%ids)
  ROOT %rows = bf16[4,64]{1,0} gather(%table, %column), offset_dims={1}
}

%fused_scatter (state: s32[100], at: s32[4], rows: s32[8]) -> s32[100] {
  %state = s32[100]{0} parameter(0)
  %at = s32[4]{0} parameter(1)
  %rows = s32[8]{0} parameter(2)
  %half = s32[4]{0} slice(%rows), slice={[0:4]}
  ROOT %new = s32[100]{0} scatter(%state, %at, %half), to_apply=%second
}

%body (carry: f32[4]) -> f32[4] {
  %carry = f32[4]{0} parameter(0)
  ROOT %wide = f32[4]{0} copy(%carry)
}

ENTRY %main (weights: bf16[64,64], pool: bf16[10,64], q: bf16[4,64]) -> bf16[4,64] {
  %weights = bf16[64,64]{1,0} parameter(0)
  %pool = bf16[10,64]{1,0} parameter(1)
  %q = bf16[4,64]{1,0} parameter(2)
  %ids = s32[4]{0} constant({...})
  %x = bf16[4,64]{1,0} fusion(%table, %ids), kind=kLoop, calls=%fused_gather
  %s = s32[100]{0} fusion(%state, %ids, %rows), kind=kInput, calls=%fused_scatter
  %ours = (bf16[10,64]{1,0}, bf16[4,64]{1,0}) custom-call(%pool, %x), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{0}: (0, {})}, metadata={op_name="jit(step)/write_kv/pallas_call"}
  %gte = bf16[4,64]{1,0} get-tuple-element(%ours), index=1
  %product = (bf16[4,64]{1,0}, s8[4194304]{0}) custom-call(%gte, %weights, %x), custom_call_target="__cublas$lt$matmul", output_to_operand_aliasing={{0}: (2, {})}
  %loop = f32[4]{0} while(%f), condition=%cond, body=%body
  %again = (bf16[10,64]{1,0}, bf16[4,64]{1,0}) custom-call(%pool, %x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/write_kv/pallas_call"}
  ROOT %out = bf16[4,64]{1,0} get-tuple-element(%product), index=0
}
"""  # noqa: E501
POOL = Traffic("write_kv", (10, 64), 0, 512)


def named(name: str) -> Kernel:
    return next(kernel for kernel in parse(PROGRAM, [POOL]).kernels if kernel.name == name)


def test_a_gather_reads_what_it_takes_and_a_scatter_writes_its_update_alone():
    gather = named("fusion gather")
    assert (gather.read, gather.written) == (4 * 64 * 2 + 4 * 4, 4 * 64 * 2)
    scatter = named("fusion scatter")
    assert (scatter.read, scatter.written) == (4 * 4 + 4 * 4, 4 * 4), "half of the rows, the indices; no state"


def test_pages_count_what_the_caller_says_and_others_by_their_shape():
    ours = named("write_kv")
    assert (ours.read, ours.written) == (512, 512 + 512), "x read; its rows of pages and q written"
    plain = next(kernel for kernel in parse(PROGRAM).kernels if kernel.name == "write_kv")
    assert (plain.read, plain.written) == (10 * 128 + 512, 10 * 128 + 512)


def test_a_product_reads_what_it_adds_to_and_has_a_workspace_for_nothing():
    product = named("__cublas$lt$matmul")
    assert (product.read, product.written) == (512 + 64 * 128 + 512, 512)


def test_loops_are_named_and_their_bodies_counted_once():
    program = parse(PROGRAM)
    assert program.control_flow == ["loop"]
    assert [kernel.name for kernel in program.kernels].count("copy") == 1


def test_a_layer_is_what_stands_between_two_anchors():
    (layer,) = layers(parse(PROGRAM).kernels, "write_kv")
    assert [kernel.name for kernel in layer] == ["write_kv", "__cublas$lt$matmul", "copy"]


def test_what_it_does_not_know_is_an_error():
    with pytest.raises(BenchError, match="no entry computation"):
        parse("HloModule nothing")
    with pytest.raises(BenchError, match="f8e3m4"):
        _ = Shape("f8e3m4", (4,)).nbytes
