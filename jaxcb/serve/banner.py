"""What a person wants to check when the server starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcb.engine import ServingEngine
    from jaxcb.serve.service import Service

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
TYPICAL_TOKENS = 1456
"""Prompt and answer of a mean request of Azure's conversation trace of 2023: 1,237 + 219 tokens."""


def banner(service: Service, *, url: str, has_api_key: bool, has_admin_key: bool, took_s: float) -> str:
    """The start-up text: one fact a line, a curl to paste at the end."""
    engine = service.engine
    lines = [*_model_lines(service), *_engine_lines(engine)]
    key = " (with the API key)" if has_api_key else ""
    lines.append(("endpoint", f"{url}/v1{key}"))
    lines.append(("clients", f"OPENAI_BASE_URL={url}/v1 ANTHROPIC_BASE_URL={url}"))
    lines.append(("reference", f"{url}/openapi.json"))
    if has_admin_key:
        lines.append(("admin", "/pause /resume /reset_prefix_cache /start_profile /stop_profile /log_level"))
    facts = "\n".join(f"  {name:<13}{value}" for name, value in lines)
    return f"jaxcb is ready after {took_s:.1f} s\n{facts}\n\n{_curl(engine, url, has_api_key)}\n"


def _model_lines(service: Service) -> list[tuple[str, str]]:
    engine = service.engine
    config, spec = engine.config, engine.spec
    quantized = "" if config.quantization is None else f", products in {config.quantization}"
    weights_gb = spec.num_params * _ITEM_BYTES[config.dtype] / 1e9
    names = ", ".join(service.model_names)
    return [
        ("model", f"{names} ({spec.family}, {spec.num_params / 1e6:.0f} M parameters)"),
        ("weights", f"{weights_gb:.2f} GB in {config.dtype}{quantized}"),
        ("chat", _chat(service)),
    ]


def _chat(service: Service) -> str:
    if not service.engine.tokenizer.has_chat_template:
        return "the model has no template: completions only (or give one by --chat-template)"
    tools = "told as text, read as hermes" if service.tool_format is None else service.tool_format.name
    reasoning = "none" if service.reasoning is None else f"until {service.reasoning.end}"
    return f"the model's template; tools: {tools}; reasoning: {reasoning}"


def _engine_lines(engine: ServingEngine) -> list[tuple[str, str]]:
    config = engine.config
    pages = next(stats.kv_pages_total for stats in engine.stats_by_engine().values() if stats.answers)
    capacity = f"{pages * config.page_size:,} tokens" + (" in int8" if config.kv_cache_dtype == "int8" else "")
    cache = "prefixes are reused" if config.enable_prefix_caching else "prefixes are not reused"
    return [
        *_shape_lines(engine),
        (
            "KV cache",
            f"{pages} pages of {config.page_size} tokens: {capacity}; {cache}",
        ),
        ("room for", _room(pages, config.page_size, config.max_model_len or 1)),
        ("limits", f"{config.max_model_len} tokens a sequence{_waiting(config.max_waiting)}"),
        ("a step", f"at most {config.max_num_batched_tokens} tokens of {config.max_num_seqs} sequences"),
        ("buckets", f"decode {_sizes(config.decode_buckets, config.max_num_seqs)} sequences"),
        ("", f"with prompts {_sizes(config.mixed_buckets, config.max_num_batched_tokens)} tokens"),
        ("attention", f"{config.backend}; requests are scheduled by {_name(config.policy)}"),
    ]


def _shape_lines(engine: ServingEngine) -> list[tuple[str, str]]:
    """What there is beside one engine on one device."""
    config, by_engine = engine.config, engine.stats_by_engine()
    answering = sum(stats.answers for stats in by_engine.values())
    engines = f"{answering} behind one queue" if answering > 1 else "1 that answers"
    if prefill := len(by_engine) - answering:
        engines += f", {prefill} that compute{'s' if prefill == 1 else ''} its prompts"
    if engine.peers:
        engines += f", prompts are computed by {', '.join(engine.peers)}"
    lines = []
    if len(by_engine) > 1:
        lines.append(("engines", f"{engines}; what follows is of each"))
    elif engine.peers:
        lines.append(("engines", engines))
    if config.tensor_parallel_size > 1:
        hosts = f" on {config.nnodes} hosts" if config.nnodes > 1 else ""
        lines.append(("devices", f"{config.tensor_parallel_size}{hosts}, over which the model is cut"))
    return lines


def _room(pages: int, page_size: int, max_model_len: int) -> str:
    """Requests whose KV fits at once, of a typical length and of the longest."""

    def fit(tokens: int) -> int:
        return pages // -(-tokens // page_size)

    longest = f"{fit(max_model_len)} requests of {max_model_len:,} tokens"
    if max_model_len <= TYPICAL_TOKENS:
        return longest
    return f"{fit(TYPICAL_TOKENS)} requests of {TYPICAL_TOKENS:,} tokens (a mean chat), or {longest}"


def _waiting(limit: int | None) -> str:
    return "" if limit is None else f", {limit} requests in the queue"


def _name(policy: object) -> str:
    return policy if isinstance(policy, str) else getattr(policy, "__name__", "a function")


def _sizes(buckets: tuple[int, ...] | None, largest: int | None) -> str:
    return ", ".join(map(str, (*(buckets or ()), largest)))


def _curl(engine: ServingEngine, url: str, has_api_key: bool) -> str:
    body: dict[str, object]
    question = "What is the capital of France?"
    if engine.tokenizer.has_chat_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": question}]}
    else:
        path, body = "completions", {"prompt": "The capital of France is"}
    key = " -H 'Authorization: Bearer KEY'" if has_api_key else ""
    body |= {"temperature": 0, "stream": True}
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
