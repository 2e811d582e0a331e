"""What a person wants to check when the server starts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxcb.engine import Engine

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def banner(engine: Engine, *, model_name: str, url: str, has_api_key: bool, took_s: float) -> str:
    """The start-up text: one fact a line, a curl to paste at the end."""
    config, pages = engine.config, engine.stats().kv_pages_total
    weights_gb = engine.spec.num_params * _ITEM_BYTES[config.dtype] / 1e9
    lines = (
        ("model", f"{model_name} ({engine.spec.family}, {engine.spec.num_params / 1e6:.0f} M parameters)"),
        ("weights", f"{weights_gb:.2f} GB in {config.dtype}"),
        ("KV cache", f"{pages} pages of {config.page_size} tokens: {pages * config.page_size} tokens"),
        ("limits", f"{config.max_model_len} tokens a sequence"),
        ("a step", f"at most {config.max_num_batched_tokens} tokens of {config.max_num_seqs} sequences"),
        ("buckets", f"decode {_sizes(config.decode_buckets, config.max_num_seqs)} sequences"),
        ("", f"with prompts {_sizes(config.mixed_buckets, config.max_num_batched_tokens)} tokens"),
        ("prefix cache", "on" if config.enable_prefix_caching else "off"),
        ("attention", str(config.backend)),
        ("endpoint", f"{url}/v1" + (" (with the API key)" if has_api_key else "")),
    )
    facts = "\n".join(f"  {name:<13}{value}" for name, value in lines)
    return f"jaxcb is ready after {took_s:.1f} s\n{facts}\n\n{_curl(engine, url, has_api_key)}\n"


def _sizes(buckets: tuple[int, ...] | None, largest: int | None) -> str:
    return ", ".join(map(str, (*(buckets or ()), largest)))


def _curl(engine: Engine, url: str, has_api_key: bool) -> str:
    body: dict[str, object]
    question = "What is the capital of France?"
    if engine.tokenizer.has_chat_template:
        path, body = "chat/completions", {"messages": [{"role": "user", "content": question}]}
    else:
        path, body = "completions", {"prompt": "The capital of France is"}
    key = " -H 'Authorization: Bearer KEY'" if has_api_key else ""
    body |= {"temperature": 0, "stream": True}
    return f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"
