"""ModelSpec: everything the engine knows about a decoder, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxcb.errors import ModelError

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Values of ``model_type`` that the decoder covers."""
_WITH_EXPERTS = ("mixtral", "qwen3_moe")
_THETA = {"mixtral": 1_000_000.0}
_EPS = {"mixtral": 1e-5}
_KV_HEADS = {"mixtral": 8, "qwen3_moe": 4}
"""What transformers takes where a config of the family leaves it out, and others differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding: base and the way long contexts are reached.

    ``kind`` and the fields below it follow the ``rope_parameters`` (older: ``rope_scaling``) of Hugging Face configs.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shapes and switches of one decoder. Letters as in the map (jaxcb/README.md): L layers, H query heads, ...

    ``windows`` has one entry a layer: None for full attention, else the number of positions a query may look back
    on, itself included.

    With ``num_experts`` every layer has so many MLPs of ``intermediate_size`` features in the place of one, of which a
    token takes the ``num_experts_per_token`` that its router scores highest, weighed by their probabilities;
    ``norm_expert_weights``: divided by their sum.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope: RopeSpec = RopeSpec()
    rms_norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    norm_expert_weights: bool = True
    tie_word_embeddings: bool = False
    windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    """dtype the checkpoint says it was stored in."""

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ModelError(f"config.json: {name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"config.json: num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )
        if len(self.windows) != self.num_layers:
            raise ModelError(f"config.json: layer_types names {len(self.windows)} layers, not {self.num_layers}")
        if not 0 <= self.num_experts_per_token <= self.num_experts or bool(self.num_experts) != bool(
            self.num_experts_per_token
        ):
            raise ModelError(
                f"config.json: num_experts_per_tok must be from 1 to the number of experts ({self.num_experts}), got "
                f"{self.num_experts_per_token}"
            )
        if self.num_experts and self.family not in _WITH_EXPERTS:
            raise ModelError(f"experts are of the families {', '.join(_WITH_EXPERTS)}, not of {self.family}")
        if self.num_experts and self.mlp_bias:
            raise ModelError("config.json: mlp_bias is not supported where there are experts")
        if self.head_dim % 2:
            raise ModelError(f"config.json: head_dim must be even, got {self.head_dim}")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_params(self) -> int:
        """Weights of the model, biases and norms left out."""
        return self._num_params(max(1, self.num_experts))

    @property
    def num_active_params(self) -> int:
        """Those of them that a token meets: all, but for the experts that it doesn't take."""
        return self._num_params(max(1, self.num_experts_per_token))

    @property
    def num_expert_params(self) -> int:
        """Those of them that are the experts'; 0 without."""
        return self.num_layers * self.num_experts * self._mlp_params

    @property
    def expert_share(self) -> float:
        """The part of the experts that a token takes; 1 without."""
        return self.num_experts_per_token / self.num_experts if self.num_experts else 1.0

    @property
    def _mlp_params(self) -> int:
        return 3 * self.hidden_size * self.intermediate_size

    def _num_params(self, num_mlps: int) -> int:
        layer = self.hidden_size * (2 * self.q_size + 2 * self.kv_size + self.num_experts) + num_mlps * self._mlp_params
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size

    def kv_bytes_per_token(self, itemsize: int, scale_bytes: int = 0) -> int:
        """Bytes of KV cache that one position takes in all layers, at ``itemsize`` bytes an element and ``scale_bytes``
        for a key or a value of a head."""
        return self.num_layers * 2 * (self.kv_size * itemsize + self.num_kv_heads * scale_bytes)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelSpec:
        """Read a ``config.json`` (and ``generation_config.json``, whose end tokens win).

        Raises:
            ModelError: the architecture, the activation or the rope scaling is not supported, or a key is missing;
                the message names the key.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"config.json: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
        if config.get("quantization_config"):
            method = dict(config["quantization_config"]).get("quant_method")
            raise ModelError(f"config.json: quantization_config ({method}) is not supported")
        activation = config.get("hidden_act", "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"config.json: hidden_act {activation!r} is not supported; supported: silu")
        num_layers = _get(config, "num_hidden_layers", int)
        num_heads = _get(config, "num_attention_heads", int)
        hidden_size = _get(config, "hidden_size", int)
        eos = (generation_config or {}).get("eos_token_id")
        attention_bias = bool(config.get("attention_bias", False))
        experts = _experts(config, num_layers) if family in _WITH_EXPERTS else {}
        size = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
        return cls(
            family=family,
            vocab_size=_get(config, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=_get(config, size, int),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_optional(config, "num_key_value_heads", _KV_HEADS.get(family, num_heads)),
            head_dim=_optional(config, "head_dim", 128 if family == "qwen3" else hidden_size // max(num_heads, 1)),
            max_position=_get(config, "max_position_embeddings", int),
            rope=_rope(config, _THETA.get(family, 10_000.0)),
            rms_norm_eps=_number(config, "rms_norm_eps", _EPS.get(family, 1e-6)),
            qkv_bias=family == "qwen2" or (attention_bias and family not in ("mistral", "mixtral")),
            o_bias=attention_bias and family in ("llama", "qwen3", "qwen3_moe"),
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family in ("qwen3", "qwen3_moe"),
            **experts,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=_windows(config, family, num_layers),
            eos_token_ids=_id_tuple(config.get("eos_token_id"), "config.json")
            if eos is None
            else _id_tuple(eos, "generation_config.json"),
            bos_token_id=config.get("bos_token_id"),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        )


def _get(config: Mapping[str, Any], key: str, kind: type) -> Any:
    value = config.get(key)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be {kind.__name__}, got {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"config.json: {key} must be a number, got {value!r}")
    return float(value)


def _optional(config: Mapping[str, Any], key: str, default: int) -> int:
    return default if config.get(key) is None else _get(config, key, int)


def _id_tuple(value: object, file: str) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ModelError(f"{file}: eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(ids)


def _experts(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Fields of the spec. Every layer has experts: none is left out by its number.

    transformers writes the number of experts under Mixtral's name for both families.
    """
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step != 1:
        raise ModelError(f"config.json: decoder_sparse_step other than 1 is not supported, got {step!r}")
    if not isinstance(dense, list) or any(layer in range(num_layers) for layer in dense):
        raise ModelError(f"config.json: mlp_only_layers is not supported, got {dense!r}")
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    normed = config.get("norm_topk_prob", False) if config["model_type"] == "qwen3_moe" else True
    if not isinstance(normed, bool):
        raise ModelError(f"config.json: norm_topk_prob must be true or false, got {normed!r}")
    num_experts = _get(config, name, int)
    if num_experts < 1:
        raise ModelError(f"config.json: {name} must be positive, got {num_experts}")
    return {
        "num_experts": num_experts,
        "num_experts_per_token": _get(config, "num_experts_per_tok", int),
        "norm_expert_weights": normed,
    }


def _windows(config: Mapping[str, Any], family: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral and Mixtral window every layer; Qwen only if ``use_sliding_window``, and of the dense ones only the
    layers that are named.

    A config without ``sliding_window`` means 4096 (transformers' default; of Mixtral none), one with null no window.
    """
    window = config.get("sliding_window", None if family == "mixtral" else 4096)
    every = family in ("mistral", "mixtral", "qwen3_moe")
    used = family in ("mistral", "mixtral") or (family != "llama" and bool(config.get("use_sliding_window", False)))
    if window is None or not used:
        return (None,) * num_layers
    if not isinstance(window, int) or window < 1:
        raise ModelError(f"config.json: sliding_window must be a positive integer, got {window!r}")
    if every:
        return (window,) * num_layers
    if types := config.get("layer_types"):
        unknown = set(types) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelError(f"config.json: layer_types holds {sorted(unknown)}, which is not supported")
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = config.get("max_window_layers", 28)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _rope(config: Mapping[str, Any], default_theta: float) -> RopeSpec:
    params: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"config.json: {key} must be an object, got {value!r}")
        params |= value
    theta = _number(params if params.get("rope_theta") else config, "rope_theta", default_theta)
    kind = params.get("rope_type") or params.get("type") or "default"
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(
            f"config.json: rope_scaling type {kind!r} is not supported; supported: default, linear, llama3, yarn"
        )
    for key in ("mscale", "mscale_all_dim"):
        if params.get(key) is not None:
            raise ModelError(f"config.json: rope_scaling key {key!r} is not supported")
    if params.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        raise ModelError("config.json: partial_rotary_factor other than 1 is not supported")
    if kind != "default" and not isinstance(params.get("factor"), int | float):
        raise ModelError(
            f"config.json: rope_scaling of type {kind!r} needs a number 'factor', got {params.get('factor')!r}"
        )
    optional = {
        key: params[key]
        for key in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "truncate")
        if params.get(key) is not None
    }
    original = params.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind == "llama3" and not original:
        raise ModelError("config.json: rope_scaling of type 'llama3' needs original_max_position_embeddings")
    return RopeSpec(
        theta=theta,
        kind=kind,  # type: ignore[arg-type]  # one of the four literals, see above
        factor=float(params.get("factor") or 1.0),
        original_max_position=int(original or config["max_position_embeddings"]),
        **optional,
    )
