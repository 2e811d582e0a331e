"""Ragged paged attention in plain XLA: first-class on CPUs, a fallback anywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from pallas_kernels.metadata import AttentionMetadata
from pallas_kernels.xla.work import CHUNK_ROWS, DECODE_BLOCK

DECODE_GROUP = 8
CHUNK_BLOCK = 256
MASKED = -1e30


def attention(q, kv_pages, metadata: AttentionMetadata, *, layer, num_layers, scale, soft_cap):
    q_in = q
    num_tokens, num_heads, head_dim = q.shape
    rows = kv_pages.reshape(-1, kv_pages.shape[2] * kv_pages.shape[3])
    layer_kv = (rows, layer, num_layers, kv_pages.shape[1], kv_pages.shape[2])
    stored = jnp.dtype(jnp.bfloat16) if kv_pages.dtype == jnp.uint16 else kv_pages.dtype
    compute = jnp.promote_types(q.dtype, stored)
    q = (q.astype(jnp.float32) * scale).astype(compute)
    if metadata.chunks is None:
        return _decodes(q, layer_kv, metadata, soft_cap).astype(q_in.dtype)
    out = _chunks(q, layer_kv, metadata, soft_cap)
    token = metadata.query_starts[:-1]
    decoded = _decodes(q.at[token].get(mode="clip"), layer_kv, metadata, soft_cap)
    token = jnp.where(metadata.decodes.is_decode, token, num_tokens)
    return out.at[token].set(decoded, mode="drop").astype(q_in.dtype)


def _take(layer_kv, pages, dtype):
    """[..., n] pages -> k, v [..., n*page_size, K*D]"""
    rows, layer, num_layers, page_size, _ = layer_kv
    first = (pages * (2 * num_layers) + 2 * layer) * page_size
    idx = (first[..., None] + jnp.arange(page_size, dtype=jnp.int32)).reshape(*pages.shape[:-1], -1)
    idx = lax.optimization_barrier(idx)
    k = rows.at[idx].get(mode="promise_in_bounds", wrap_negative_indices=False)
    v = rows.at[idx + page_size].get(mode="promise_in_bounds", wrap_negative_indices=False)
    if rows.dtype == jnp.uint16:
        k, v = (lax.bitcast_convert_type(x, jnp.bfloat16) for x in (k, v))
    return k.astype(dtype), v.astype(dtype)


def _pad_tables(metadata, block):
    per = block // metadata.page_size
    bt = metadata.block_tables
    return jnp.pad(bt, ((0, 0), (0, -bt.shape[1] % per))), per


def _cap(s, soft_cap):
    return s if soft_cap is None else soft_cap * jnp.tanh(s / soft_cap)


def _decodes(q, layer_kv, metadata, soft_cap):
    """q [S, H, D] scaled -> [S, H, D] f32"""
    S, H, D = q.shape
    K = layer_kv[4]
    G = H // K
    work = metadata.decodes
    group, block = DECODE_GROUP, DECODE_BLOCK
    tables, per = _pad_tables(metadata, block)
    tables = tables.reshape(-1, per)
    blocks = tables.shape[0] // S
    pad = lambda x: jnp.pad(x, (0, group))
    w_seq, w_block, w_rank = pad(work.sequence), pad(work.block), pad(work.rank)
    eye = jnp.eye(K, dtype=q.dtype)

    def body(i, carry):
        acc, peak, total = carry
        seq, blk, rank = (lax.dynamic_slice_in_dim(x, i * group, group) for x in (w_seq, w_block, w_rank))
        live = i * group + jnp.arange(group) < work.count
        seq = jnp.where(live, seq, 0)
        blk = jnp.where(live, blk, 0)
        rank0 = rank[0]
        pages = tables[seq * blocks + blk]
        k, v = _take(layer_kv, pages, q.dtype)
        pos = blk[:, None] * block + jnp.arange(block)
        ctx = metadata.context_lens[seq][:, None]
        ok = (pos < ctx) & live[:, None]
        if metadata.window is not None:
            ok &= pos >= ctx - metadata.window
        v = jnp.where(ok[..., None], v, 0)
        qi = q[seq].reshape(group, K, G, 1, D) * eye[:, None, :, None]
        s = lax.dot_general(qi.reshape(group, H, K * D), k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        s = jnp.where(ok[:, None], _cap(s, soft_cap), MASKED)
        m = s.max(-1)
        p = jnp.exp(s - m[..., None])
        l = p.sum(-1)
        o = lax.dot_general(p.astype(v.dtype), v, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        o = o.reshape(group, K, G, K, D)
        o = jnp.stack([o[:, h, :, h] for h in range(K)], 1).reshape(group, H, D)
        own = ((rank - rank0)[None, :] == jnp.arange(group)[:, None]) & live
        cut = lambda x: lax.dynamic_slice_in_dim(x, rank0, group)
        put = lambda x, y: lax.dynamic_update_slice_in_dim(x, y, rank0, 0)
        old = cut(peak)
        new = jnp.maximum(old, jnp.where(own[..., None], m, MASKED).max(1))
        keep = jnp.exp(old - new)
        wt = jnp.where(own[..., None], jnp.exp(m - new[:, None]), 0.0)
        acc = put(acc, cut(acc) * keep[..., None] + (wt[..., None] * o).sum(1))
        total = put(total, cut(total) * keep + (wt * l).sum(1))
        return acc, put(peak, new), total

    R = S + group
    carry = (jnp.zeros((R, H, D)), jnp.full((R, H), MASKED), jnp.zeros((R, H)))
    acc, _, total = lax.fori_loop(0, (work.count + group - 1) // group, body, carry)
    has = work.is_decode
    out = acc / jnp.where(total == 0, 1, total)[..., None]
    return jnp.where(has[:, None, None], out.at[work.rank_of].get(mode="clip"), 0)


def _chunks(q, layer_kv, metadata, soft_cap):
    T, H, D = q.shape
    K = layer_kv[4]
    G = H // K
    bq, block = CHUNK_ROWS, CHUNK_BLOCK
    tables, per = _pad_tables(metadata, block)
    tiles = metadata.chunks
    qp = jnp.pad(q, ((0, bq), (0, 0), (0, 0)))
    dot = lambda a, b, ca, cb: lax.dot_general(a, b, (((ca,), (cb,)), ((0,), (0,))), preferred_element_type=jnp.float32)

    def tile(i, out):
        s, first = tiles.sequence[i], tiles.first[i]
        start, end = metadata.query_starts[s] + first, metadata.query_starts[s + 1]
        ctx = metadata.context_lens[s]
        pos0 = ctx - (end - start)
        qt = lax.dynamic_slice_in_dim(qp, start, bq).reshape(bq, K, G, D).swapaxes(0, 1).reshape(K, bq * G, D)
        qpos = pos0 + jnp.arange(bq * G) // G
        qpos = qpos[:, None]

        def blk(j, carry):
            acc, peak, total = carry
            pages = lax.dynamic_slice(tables, (s, j * per), (1, per))[0]
            k, v = (x.reshape(block, K, D).swapaxes(0, 1) for x in _take(layer_kv, pages, q.dtype))
            pos = j * block + jnp.arange(block)
            real = pos < ctx
            ok = (pos <= qpos) & real
            if metadata.window is not None:
                real &= pos > pos0 - metadata.window
                ok &= pos > qpos - metadata.window
            v = jnp.where(real[:, None], v, 0)
            x = jnp.where(ok, _cap(dot(qt, k, 2, 2), soft_cap), MASKED)
            new = jnp.maximum(peak, x.max(-1))
            keep = jnp.exp(peak - new)
            p = jnp.exp(x - new[..., None])
            return acc * keep[..., None] + dot(p.astype(v.dtype), v, 2, 1), new, total * keep + p.sum(-1)

        lo = 0 if metadata.window is None else jnp.maximum(pos0 - metadata.window + 1, 0) // block
        hi = -(-jnp.minimum(ctx, pos0 + bq) // block)
        carry = (jnp.zeros((K, bq * G, D)), jnp.full((K, bq * G), MASKED), jnp.zeros((K, bq * G)))
        acc, _, total = lax.fori_loop(lo, hi, blk, carry)
        r = acc / jnp.where(total == 0, 1, total)[..., None]
        r = r.reshape(K, bq, G, D).swapaxes(0, 1).reshape(bq, H, D)
        valid = start + jnp.arange(bq) < end
        r = jnp.where(valid[:, None, None], r, lax.dynamic_slice_in_dim(out, start, bq))
        return lax.dynamic_update_slice_in_dim(out, r, start, 0)

    return lax.fori_loop(0, tiles.count, tile, jnp.zeros((T + bq, H, D)))[:T]
