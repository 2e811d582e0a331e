"""The audit: what it promises of the engine's step, and that it sees when that is broken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bench import audit
from bench.audit import Audited, promises
from bench.audit_cases import Case, Experts, experts_of, floor_of, spec_of, splits_of, traffic_of
from bench.hlo import Kernel, Shape
from jaxcb.step.buckets import Bucket

SPEC = spec_of("llama-3.1-8b", 4)
DECODE = Case(Bucket(32, 32, True), 1024)
MIXED = Case(Bucket(2048, 256, False), 1024)


def kernel(name: str, *outputs: Shape, read: float = 0.0, written: float = 0.0) -> Kernel:
    return Kernel(name, outputs, read, written)


TEN = [kernel("rope_and_write_kv"), *[kernel("other")] * 9, kernel("rope_and_write_kv")]
"""A layer of ten kernels, and the beginning of another."""


def step(extra: list[Kernel] | None = None, *, case: Case = DECODE, **changes: Any) -> Audited:
    """A step whose kernels move its floor, nine a layer."""
    floor = floor_of(SPEC, case, fast_norm=False).total
    layer = [kernel("rope_and_write_kv"), *[kernel("other") for _ in range(8)]]
    forward = [*layer * SPEC.num_layers, kernel("head", read=floor), *(extra or [])]
    facts = {"launches": ["kCommandBuffer"], "control_flow": [], "alias_bytes": 100, "temp_bytes": 10**6} | changes
    return Audited(
        SPEC,
        case,
        "h200",
        False,
        forward,
        [],
        {"pool_bytes": 100, "most_temp_bytes": 10**8, "forward": facts, "sampler": facts, "truncated": facts},
    )


def broken(audited: Audited) -> list[str]:
    return [what for what, wrong in promises(audited).items() if wrong]


@pytest.mark.parametrize(
    ("audited", "what"),
    [
        (step([kernel("copy", read=1e9)]), "bytes at most 1.05 of the floor"),
        (
            step([kernel("rope_and_write_kv"), *[kernel("x")] * 9, kernel("rope_and_write_kv")]),
            "at most 9 kernels a layer",
        ),
        (step(alias_bytes=99), "the pages are updated in place"),
        (step(temp_bytes=10**9), "temporary memory within what is reserved: two layers' activations"),
        (step(launches=["kGemm", "kCommandBuffer"]), "one CUDA graph a program"),
        (step(control_flow=["while.1"]), "no control flow that the host waits for"),
        (step([kernel("convert", Shape("f32", (4096, 14336)))]), "no weight is copied to float32"),
        (step([kernel("head", Shape("f32", (32, 128256)))]), "logits of sampled rows alone, in bfloat16"),
        (step([kernel("head", Shape("bf16", (33, 128256)))]), "logits of sampled rows alone, in bfloat16"),
    ],
)
def test_each_promise_can_be_broken(audited, what):
    assert broken(step()) == []
    assert broken(audited) == [what]


def test_a_mixed_step_may_have_one_kernel_more():
    assert broken(step(TEN, case=MIXED)) == []
    assert broken(step([TEN[0], TEN[1], *TEN], case=MIXED)) == []
    assert broken(step([TEN[0], TEN[1], *TEN[1:]], case=MIXED)) == ["at most 10 kernels a layer"]


def test_the_floor_is_what_is_known_of_the_model():
    floor = floor_of(spec_of("llama-3.1-8b", None), DECODE, fast_norm=False)
    assert floor.weights == 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096), "all but the embedding and the norms"
    assert floor.kv_read == 32 * 1024 * 32 * 2 * 1024 * 2
    assert floor.logits == 2 * 2 * 32 * 128256 and floor.activations == 0
    exact, fast = (floor_of(SPEC, MIXED, fast_norm=fast).activations for fast in (False, True))
    assert fast == exact - 2 * 2048 * 4 * 2 * 4096, "two norms write a row less; what reads x for them still reads it"


def test_splits_are_those_that_the_kernel_makes():
    """Of pallas_kernels.triton.work.decode_splits, for contexts of one length."""
    jax = pytest.importorskip("jax")
    from pallas_kernels.triton.work import decode_splits

    for rows, context in ((1, 1024), (32, 1024), (256, 1024), (8, 100)):
        case = Case(Bucket(rows, rows, True), context)
        made = decode_splits(
            jax.numpy.arange(rows),
            jax.numpy.ones(rows, bool),
            jax.numpy.full(rows, context),
            None,
            num_splits=splits_of(SPEC, case, "h200").entries - rows,
        )
        assert made.sequence.shape == (splits_of(SPEC, case, "h200").entries,)
        assert int(made.counts[made.counts > 1].sum()) == splits_of(SPEC, case, "h200").written


def test_a_decode_moves_its_contexts_and_a_prompt_itself():
    moved = {(entry.kernel, entry.dims): entry for entry in traffic_of(SPEC, MIXED, "h200", 1000, 16, 64)}
    pool = (1000 * 4 * 2, 16, 8, 128)
    assert moved["decode_attention", pool].read == 128 * 1024 * 4096
    assert moved["ragged_paged_attention", pool].read == 1920 * 4096
    assert moved["rope_and_write_kv", pool].written == 2048 * 4096
    assert moved["rope_and_write_kv", (2048, 48, 128)].read == 2048 * 48 * 256
    decodes = {(entry.kernel, entry.dims): entry for entry in traffic_of(SPEC, DECODE, "h200", 1000, 16, 64)}
    assert decodes["rope_and_write_kv", (32, 48, 128)].read == 32 * 16 * 256, "keys and values"
    assert decodes["decode_attention", (32, 48, 128)].read == 32 * 32 * 256, "queries"


def request(model: str, **changes: Any) -> dict[str, Any]:
    asked = {"target": "h200", "model": model, "num_layers": 3, "rows": (1, 32, 256), "tokens": 2048, "context": 1024}
    return asked | {"fast_norm": False} | changes


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("fast_norm", [False, True])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-0.6b"])
def test_the_engines_step_keeps_every_promise(plugin, model, fast_norm):
    """Three layers of each model: with so few the head and the sampler weigh more than in the whole model."""
    steps = list(audit.compile_steps(request(model, fast_norm=fast_norm), plugin))
    assert [str(step.case.bucket) for step in steps] == ["decode 1", "decode 32", "decode 256", "mixed 2048"]
    for audited in steps:
        assert broken(audited) == []
        if audited.case.bucket.num_tokens > 1:
            assert audited.kernels_a_layer == (7 if fast_norm else 9) + (not audited.case.bucket.decode_only)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("size", [2, 4])
def test_a_cut_models_step_adds_up_twice_a_layer_in_one_graph(plugin, size):
    asked = request("llama-3.1-8b", num_layers=6, rows=(32,), tensor_parallel_size=size)
    for audited in audit.compile_steps(asked, plugin):
        assert audited.sums == 13, "two a layer and the embedding's"
        bytes_of_few_layers = {what for what in broken(audited) if what.startswith("bytes at most")}
        assert set(broken(audited)) == bytes_of_few_layers


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_with_whole_experts_keeps_every_promise(plugin, size):
    """A budget of other sizes than the model has."""
    changes = {"rows": (32,), "tokens": 1536, "tensor_parallel_size": size, "enable_expert_parallel": size > 1}
    for audited in audit.compile_steps(request("qwen3-30b-a3b", **changes), plugin):
        assert audited.sums == (0 if size == 1 else 7)
        bytes_of_few_layers = {what for what in broken(audited) if what.startswith("bytes at most") and size == 4}
        assert set(broken(audited)) == bytes_of_few_layers


def test_a_device_reads_the_experts_that_are_taken_of_its_own():
    spec = spec_of("qwen3-30b-a3b", 4)
    assert experts_of(spec, 1) == Experts(128, pytest.approx(8), pytest.approx(8))
    own = experts_of(spec, 32, 4, expert_parallel=True)
    assert own == Experts(32, pytest.approx(32 * (1 - (15 / 16) ** 32)), 2)
    assert experts_of(SPEC, 32) == Experts(1, 1, 1)
    one, many = (floor_of(spec, Case(Bucket(n, n, True), 1024), fast_norm=False).weights for n in (1, 10_000))
    assert many - one == pytest.approx(2 * 4 * 120 * 3 * 2048 * 768)
    moved = {entry.dims: entry for entry in traffic_of(spec, DECODE, "h200", 1000, 16, 64, own)}
    assert moved[32, 2 * 768, 2048].read == own.taken * 2 * 768 * 2048 * 2
    assert moved[32 * 8, 2048].written == 32 * 2 * 2048 * 2, "a quarter of the rows"


def test_a_missing_or_extra_sum_over_devices_is_seen():
    layer = [kernel("rope_and_write_kv"), *[kernel("other")] * 8, *[kernel("all-reduce-start")] * 2]
    whole = step()
    cut = dataclasses.replace(whole, num_devices=2, forward=[kernel("all-reduce-start"), *layer * 4, layer[0]])
    assert "9 all-reduces, two a layer and the embedding's" not in broken(cut)
    assert cut.kernels_a_layer == 11
    fewer = dataclasses.replace(cut, forward=cut.forward[1:])
    assert "9 all-reduces, two a layer and the embedding's" in broken(fewer)


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("undonated", "the pages are updated in place"),
        ("logits", "logits of sampled rows alone, in bfloat16"),
        ("loop", "no control flow that the host waits for"),
    ],
)
def test_a_step_that_is_broken_on_purpose_is_seen(plugin, monkeypatch, how, what):
    monkeypatch.setenv("BROKEN", how)
    asked = request("qwen3-0.6b", rows=(32,))
    steps = audit.compile_steps(asked, plugin, module="tests.bench.broken_audit")
    assert what in broken(next(iter(steps)))
