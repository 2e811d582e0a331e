"""Builds a ``tokenizers.Tokenizer`` from the metadata of a GGUF file, equal to llama.cpp's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxcb.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4
"""Token types of GGUF: special tokens, and tokens that are matched before the text is split."""
_SPM_MERGEABLE = (1, _USER_DEFINED)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
"""``tokenizer.ggml.pre`` to the patterns that split the text into words, one after the other."""
_ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "starcoder": "smollm",
    "deepseek-r1-qwen": "qwen2",
}
_ADDS_BOS = ("llama-bpe", "tekken")
"""Splits whose models begin every text with BOS unless the file says otherwise."""


def build(get: Callable[..., Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer, and the ``tokenizer_config.json`` that goes with it.

    Arguments:
        get: ``get(key, default=None)`` of the file's metadata.

    Raises:
        ModelError: the kind of tokenizer isn't supported, or its vocabulary is missing.
    """
    tokens = get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("the GGUF file holds no vocabulary (tokenizer.ggml.tokens)")
    model = get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, adds_bos = _byte_level_bpe(get, tokens)
    elif model == "llama":
        tokenizer, adds_bos = _sentencepiece_bpe(get, tokens), True
    else:
        raise ModelError(f"tokenizer.ggml.model {model!r} is not supported; supported: gpt2, llama")
    _add_tokens(tokenizer, tokens, get("tokenizer.ggml.token_type", ()))
    names = _special_names(get, tokens)
    before = [names["bos_token"]] if get("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in names else []
    after = [names["eos_token"]] if get("tokenizer.ggml.add_eos_token", False) and "eos_token" in names else []
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, tokens.index(token)) for token in {*before, *after}],
        )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "clean_up_tokenization_spaces": False,
    }


def _byte_level_bpe(get: Callable[..., Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    name = get("tokenizer.ggml.pre", "default")
    name = _ALIASES.get(name, name)
    if name not in _SPLITS:
        known = ", ".join(sorted([*_SPLITS, *_ALIASES]))
        raise ModelError(f"tokenizer.ggml.pre {name!r} is not supported; supported: {known}")
    merges = get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("the GGUF file holds no merges (tokenizer.ggml.merges) for its gpt2 tokenizer")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    vocab = {token: index for index, token in enumerate(tokens)}
    # llama.cpp skips merges of parts the vocabulary lacks; the library would refuse them.
    pairs = [(left, right) for left, right in pairs if left in vocab and right in vocab and left + right in vocab]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=name in _ADDS_BOS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in _ADDS_BOS


def _sentencepiece_bpe(get: Callable[..., Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE has scores instead of merges: the pair whose union has the best score is merged first."""
    types, scores = get("tokenizer.ggml.token_type"), get("tokenizer.ggml.scores")
    if types is None or scores is None or min(len(types), len(scores)) < len(tokens):
        raise ModelError("the GGUF file's llama tokenizer needs a score and a type for every token")
    vocab = {token: index for index, token in enumerate(tokens)}
    ranked = []
    for index, token in enumerate(tokens):
        if types[index] not in _SPM_MERGEABLE:
            continue
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in pairs if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        ranked += [(-float(scores[index]), pair) for pair in known]
    ranked.sort(key=lambda entry: entry[0])
    unknown = tokens[int(get("tokenizer.ggml.unknown_token_id", 0))]
    merges = [pair for _, pair in ranked]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space = normalizers.Replace(" ", "▁")
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = space
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], types: Any) -> None:
    marked = list(zip(tokens, types, strict=False))
    special = [AddedToken(token, special=True, normalized=False) for token, kind in marked if kind == _CONTROL]
    matched = [AddedToken(token, special=False, normalized=False) for token, kind in marked if kind == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(matched)


def _special_names(get: Callable[..., Any], tokens: list[str]) -> dict[str, str]:
    """{"bos_token": "<s>", ...} of the tokens that the file names."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[index] for name, index in ids.items() if isinstance(index, int) and 0 <= index < len(tokens)}
