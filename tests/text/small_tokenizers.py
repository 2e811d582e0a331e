"""Tokenizers small enough to build in a test: one of each kind that decodes differently."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxcb.text import Tokenizer

SPECIAL = ["<s>", "</s>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% if not loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """GPT-2 style: every byte is a token, a few merges, two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("ðŁ", "¦"), ("Ġ", "a")]
    tokens = SPECIAL + alphabet + [left + right for left, right in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """Llama 2 style: words begin with a marked space, unknown characters become byte tokens <0xXX>."""
    letters = list("▁abcdefghijklmnopqrstuvwxyz.\n")
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    tokens += [left + right for left, right in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return backend


def with_bos_and_eos(backend: tokenizers.Tokenizer, *, eos: bool = False) -> tokenizers.Tokenizer:
    """The same tokenizer, adding <s> in front of every text, and </s> behind it if ``eos``."""
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"] if eos else ["<s>", "$A"],
        special_tokens=[(token, backend.token_to_id(token)) for token in SPECIAL],
    )
    return backend


def byte_level() -> Tokenizer:
    return Tokenizer(byte_level_backend())


def byte_fallback() -> Tokenizer:
    return Tokenizer(byte_fallback_backend())


def write_dir(
    path: Path, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None, template: str | None = TEMPLATE
) -> Path:
    """A directory that both jaxcb and transformers can read the tokenizer from."""
    backend.save(str(path / "tokenizer.json"))
    full = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"} | (config or {})
    (path / "tokenizer_config.json").write_text(json.dumps(full), encoding="utf-8")
    if template is not None:
        (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    return path
