"""The model's tokenizer: ``tokenizer.json`` through the ``tokenizers`` library, read the way transformers reads it."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jaxcb.errors import ModelError, RequestError
from jaxcb.text import chat

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back, and the chat template.

    Arguments:
        backend: the tokenizer itself.
        config: contents of ``tokenizer_config.json``, for its names of special tokens. Whether BOS and EOS are added
            to a text is written in ``tokenizer.json``; as in transformers, the config has no say in it.
        chat_template: Jinja source, or None if the model has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ):
        config = config or {}
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = {name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))}
        """Names (``bos_token``, ...) to texts; chat templates see them under these names."""
        backend.no_truncation()
        backend.no_padding()
        _add_special_tokens(backend, config, self.special_tokens)

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a model directory.

        Raises:
            ModelError: there is no ``tokenizer.json``, or a file is damaged.
        """
        path = Path(path)
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json. Make one with transformers: "
                f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the Rust library raises plain Exception
            raise ModelError(f"{file} can't be read: {error}") from error
        config = _read_config(path / "tokenizer_config.json")
        template_file = path / "chat_template.jinja"
        if template_file.is_file():
            template: str | None = template_file.read_text(encoding="utf-8")
        else:
            template = _default_template(config.get("chat_template"))
        return cls(backend, config, template)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows, added tokens included. The model's vocabulary may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: so many times the context length is more than any text that fits."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Ids of ``text``; ``add_special_tokens`` adds what the model wants around a text, such as its BOS token.

        Raises:
            RequestError: ``text`` holds half a surrogate pair, which is no character; or it is so long that it must
                have more than ``max_tokens`` tokens, which is found out before megabytes are tokenized in vain.
        """
        return self._encode(text, "prompt", max_tokens, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary have none."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for, which may be a part of a character; nothing for an id without a token."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if fallback := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(fallback[1], 16)])
        if self._is_byte_level and all(char in _BYTE_OF for char in token):
            return bytes(_BYTE_OF[char] for char in token)
        return token.replace("▁", " ").encode()

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        return '"ByteLevel"' in str(json.loads(self.backend.to_str())["decoder"]).replace("'", '"')

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text that the model's chat template makes of ``messages``.

        Arguments:
            messages: list of dicts with "role", "content" and what else the template reads; checked here.
            tools: JSON schemas of functions, for templates that present them.
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: leave the last message open, to be continued; excludes ``add_generation_prompt``.
            template_kwargs: more that the template reads, of ``jaxcb.text.chat.SAFE_KWARGS``.

        Raises:
            RequestError: there is no template, the messages are malformed, or the template refuses them.
        """
        if self.chat_template is None:
            raise _no_template()
        return chat.render(
            self.chat_template,
            messages,
            tools=tools,
            special_tokens=self.special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )

    def encode_chat(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Ids of what :meth:`render_chat` gave. The template writes the BOS token if the model wants one; none is
        added.

        Raises:
            RequestError: as for :meth:`encode`.
        """
        return self._encode(text, "messages", max_tokens, add_special_tokens=False)

    def reads(self, name: str) -> bool:
        """Whether the chat template reads a variable.

        Raises:
            RequestError: there is no template, or it can't be compiled.
        """
        if self.chat_template is None:
            raise _no_template()
        return name in chat.variables(self.chat_template)

    def is_special(self, text: str) -> bool:
        """Whether ``text`` is a special token, which ``decode`` leaves out by default."""
        return text in self._special_texts

    @functools.cached_property
    def _special_texts(self) -> frozenset[str]:
        return frozenset(token.content for token in self.backend.get_added_tokens_decoder().values() if token.special)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of ``render_chat(...)``.

        Raises:
            RequestError: as for :meth:`render_chat` and :meth:`encode_chat`.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode_chat(text, max_tokens=max_tokens)

    def warm_up(self) -> None:
        """Import what chat needs (about two seconds) and compile the template, so that no request waits for it."""
        if self.chat_template is not None:
            chat.warm_up(self.chat_template)

    def _encode(self, text: str, param: str, max_tokens: int | None, *, add_special_tokens: bool) -> list[int]:
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            raise RequestError(
                f"the text has {len(text)} characters, which can't be {max_tokens} tokens or less, the model's context "
                "length",
                param=param,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds {text[error.start]!r} at character {error.start}, half of a surrogate pair",
                param=param,
            ) from error
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids


def _no_template() -> RequestError:
    return RequestError("the model has no chat template; send a plain prompt (completions) instead", param="messages")


def _token_text(token: object) -> str | None:
    """Configs name a token by its text or by {"content": text, "lstrip": ...}."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _add_special_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Mark the tokens that the config calls special, as transformers does, unless their text is no token at all."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    names = extra.values() if isinstance(extra, Mapping) else extra
    texts = [*special_tokens.values(), *(text for token in names if (text := _token_text(token)))]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(texts) if text not in known and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _read_config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config


def _default_template(value: object) -> str | None:
    """``chat_template`` of a config: Jinja source, or a list of {"name", "template"} of which "default" counts."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, Mapping)}
        template = named.get("default")
        return template if isinstance(template, str) else None
    return None


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable Latin-1 as themselves, the rest from U+0100 on
    (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_BYTE_OF = _byte_alphabet()
