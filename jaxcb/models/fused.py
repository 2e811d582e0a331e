"""The decoder for GPUs, in nine kernels a layer: what stands between two products is one kernel of our own.

Norm, product, rotation with the KV write, attention, product, norm, product, SiLU x up, product; the library's products
add the residual stream and biases as they store. Left to XLA, that is 11 to 17 kernels and more traffic between them.
Layers are unrolled: a step has no control flow and becomes one CUDA graph. ``python -m bench.audit`` holds all of that.

With ``fast_norm`` a layer has no kernel for its two norms: their scales are in the weights (:func:`fold_norms`), and
the kernels after the products divide by the root mean square. Other numbers are rounded then: the norm's rows, which
:func:`pallas_kernels.rms_norm` rounds to the weights' dtype, are not, and the weights are once more.

On a CPU the kernels run in Pallas's interpreter, which is for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from jaxcb.models.experts import by_token, choose, expert_scores, mixed, tokens_of
from jaxcb.models.parallel import ALONE, TensorParallel
from jaxcb.models.params import Params
from jaxcb.models.product import rounded_product
from jaxcb.models.rope import rope_tables
from jaxcb.models.spec import ModelSpec
from pallas_kernels import (
    HeadNorm,
    LateNorm,
    RawQueries,
    add_rms_norm,
    group_rows,
    grouped_product,
    rms_norm,
    rope_and_write_kv,
    silu_mul,
)
from pallas_kernels.platform import platform

Pages = Shaped[Array, "F page_size K D"]
"""The pool, seen flat."""


class Places(NamedTuple):
    """Where each token lies."""

    positions: Int[Array, "T"]
    pages: Int[Array, "T"]
    """Page 0 for padding."""
    offsets: Int[Array, "T"]


@runtime_checkable
class AttendPages(Protocol):
    """Attention of one layer to what lies in the pages, this step's keys and values included.

    ``q`` is raw in a step of decodes alone; ``arrivals`` are zeros that its programs count in.
    """

    def __call__(
        self, layer: int, kv: Array, q: Float[Array, "T H D"] | RawQueries, arrivals: Int[Array, "T K"] | None
    ) -> Float[Array, "T H D"]: ...


def apply_layers(
    spec: ModelSpec,
    params: Params,
    token_ids: Int[Array, "T"],
    places: Places,
    kv: Pages,
    attend: AttendPages,
    *,
    decode_only: bool,
    fast_norm: bool,
    parallel: TensorParallel = ALONE,
) -> tuple[Float[Array, "T E"], Pages]:
    """As :func:`jaxcb.models.decoder.apply_layers`: the residual stream after the last layer, and the pages.

    Arguments:
        decode_only: every token is a decode: attention rotates its query itself.
        fast_norm: ``params`` went through :func:`fold_norms`.
    """
    angles = rope_tables(spec.rope, spec.head_dim, places.positions)
    x = parallel.embed(params["embed"]["embedding"], token_ids)
    layer = _Layer(spec, places, angles, attend, decode_only, fast_norm, parallel)
    y = None
    for index in range(spec.num_layers):
        x, y, kv = layer(params["layers"][index], index, x, y, kv)
    return x if y is None else x + y, kv


class _Layer(NamedTuple):
    """What all layers share.

    The stream is x + y, where y is what the last product adds. The library adds it as it stores, but not always for a
    single row, whose product XLA writes itself where the weight is small, and it can't where the devices of a cut model
    add theirs up first: so there the next norm adds it, and y isn't None.
    """

    spec: ModelSpec
    places: Places
    angles: tuple[Array, ...]
    attend: AttendPages
    decode_only: bool
    fast_norm: bool
    parallel: TensorParallel

    def __call__(
        self, layer: Mapping[str, Any], index: int, x: Float[Array, "T E"], y: Float[Array, "T E"] | None, kv: Pages
    ) -> tuple[Float[Array, "T E"], Float[Array, "T E"] | None, Pages]:
        spec, (cos, sin) = self.spec, self.angles
        x, qkv, late_norm = self._normed_product(layer, "input_norm", "qkv", x, y)
        heads, head_norm = qkv.reshape(x.shape[0], -1, spec.head_dim), self._head_norm(layer)
        rotated, kv, arrivals = rope_and_write_kv(
            kv,
            heads,
            cos,
            sin,
            self.places.pages,
            self.places.offsets,
            layer=index,
            num_layers=spec.num_layers,
            head_norm=head_norm,
            late_norm=late_norm,
            queries=not self.decode_only,
            **_kernels(),
        )
        q = RawQueries(heads, spec.num_heads, cos, sin, head_norm, late_norm) if rotated is None else rotated
        attended = self.attend(index, kv, q, arrivals).reshape(x.shape[0], spec.q_size)
        x, y = self._added(x, _linear(layer["o"], attended))
        if spec.num_experts:
            x, normed = self._normed(layer["post_norm"]["scale"], x, y)
            return *self._added(x, self._experts(layer, normed)), kv
        x, gate_up, late_norm = self._normed_product(layer, "post_norm", "gate_up", x, y)
        return *self._added(x, _linear(layer["down"], silu_mul(gate_up, late_norm=late_norm, **_kernels()))), kv

    def _added(
        self, x: Float[Array, "T E"], y: Float[Array, "T E"]
    ) -> tuple[Float[Array, "T E"], Float[Array, "T E"] | None]:
        apart = x.shape[0] == 1 or self.parallel.size > 1
        return (x, self.parallel.sum(y)) if apart and not self.fast_norm else (x + y, None)

    def _normed_product(
        self, layer: Mapping[str, Any], norm: str, linear: str, x: Float[Array, "T E"], y: Float[Array, "T E"] | None
    ) -> tuple[Float[Array, "T E"], Float[Array, "T O"], LateNorm | None]:
        """The stream, the product of its norm, and what is left to do to that."""
        part, eps = layer[linear], self.spec.rms_norm_eps
        if self.fast_norm:
            return x, rounded_product(x, part["kernel"]), LateNorm(x, eps, part.get("bias"))
        x, normed = self._normed(layer[norm]["scale"], x, y)
        return x, _linear(part, normed), None

    def _normed(
        self, scale: Float[Array, "E"], x: Float[Array, "T E"], y: Float[Array, "T E"] | None
    ) -> tuple[Float[Array, "T E"], Float[Array, "T E"]]:
        """The stream, and its norm."""
        eps = self.spec.rms_norm_eps
        if y is None:
            return x, rms_norm(x, scale, eps=eps, **_kernels())
        return add_rms_norm(x, y, scale, eps=eps, **_kernels())

    def _experts(self, layer: Mapping[str, Any], x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        """Those that each token takes; padding takes none."""
        choice = self.parallel.agreed(choose(self.spec, expert_scores(x, layer["router"]["kernel"])))
        experts, num_experts = self.parallel.own_experts(choice.experts, self.spec.num_experts)
        groups = group_rows(jnp.where((self.places.pages > 0)[:, None], experts, num_experts), num_experts)
        tokens = tokens_of(groups, choice)
        gate_up = grouped_product(x, layer["gate_up"]["kernel"], groups.starts, tokens, **_kernels())
        inner = silu_mul(gate_up, **_kernels())
        rows = grouped_product(inner, layer["down"]["kernel"], groups.starts, **_kernels())
        return mixed(by_token(rows, groups, choice), choice.weights).astype(x.dtype)

    def _head_norm(self, layer: Mapping[str, Any]) -> HeadNorm | None:
        if not self.spec.qk_norm:
            return None
        return HeadNorm(layer["q_norm"]["scale"], layer["k_norm"]["scale"], self.spec.rms_norm_eps)


def _kernels() -> dict[str, Any]:
    return {"backend": "triton", "interpret": platform() == "cpu"}


def _linear(part: Mapping[str, Array], x: Float[Array, "T I"]) -> Float[Array, "T O"]:
    y = rounded_product(x, part["kernel"])
    return y + part["bias"] if "bias" in part else y


def fold_norms(params: Params) -> Params:
    """Parameters for ``fast_norm``: the scales of a layer's two norms go into the weights after them, in float32, and
    are gone. Layers that have none any more stay as they are."""

    def folded(layer: Mapping[str, Any]) -> dict[str, Any]:
        out = dict(layer)
        for norm, linear in (("input_norm", "qkv"), ("post_norm", "gate_up")):
            if norm in out:
                scale, kernel = out.pop(norm)["scale"], layer[linear]["kernel"]
                out[linear] = {**layer[linear], "kernel": (kernel.astype(jnp.float32) * scale).astype(kernel.dtype)}
        return out

    return {**params, "layers": {index: folded(layer) for index, layer in params["layers"].items()}}
