"""A directory that the real server can serve: a tiny random checkpoint with a byte-level tokenizer and a template."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

CHECKPOINT = Path(__file__).parents[1] / "golden" / "tiny" / "llama"
VOCAB_SIZE = 256
EOS_ID = 2
FIRST_ORDINARY_ID = 3
_SPECIAL = ["<pad>", "<s>", "</s>"]
_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tiny_model(path: Path) -> Path:
    """Copy the checkpoint to ``path`` and add a tokenizer: one id a byte, as far as the vocabulary goes."""
    shutil.copytree(CHECKPOINT, path)
    tokens = _SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(tokens[:VOCAB_SIZE])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    return path
