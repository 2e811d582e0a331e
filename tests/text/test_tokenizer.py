import json

import pytest
import tokenizers

from jaxcb.errors import ModelError, RequestError
from jaxcb.text import Tokenizer

from .small_tokenizers import byte_fallback_backend, byte_level, byte_level_backend, with_bos_and_eos, write_dir

TEXTS = ["", "the text", "  two  spaces", "<s>the</s>", "tab\tand\nline", "🦜 é"]


def transformers_tokenizer(path):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(path)


def assert_same_as_transformers(path):
    ours, theirs = Tokenizer.from_dir(path), transformers_tokenizer(path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("make", [byte_level_backend, byte_fallback_backend])
@pytest.mark.parametrize("eos", [False, True])
def test_ids_equal_those_of_transformers(tmp_path, make, eos):
    """llama-cpp-python#1439: plain text, with a start token and an end token or without."""
    assert_same_as_transformers(write_dir(tmp_path, with_bos_and_eos(make(), eos=eos)))


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True, "add_bos_token": True},
        {"add_bos_token": True, "bos_token": {"content": "<s>", "__type": "AddedToken", "special": True}},
        {"extra_special_tokens": ["he"]},
    ],
)
def test_config_changes_the_ids_only_as_in_transformers(tmp_path, config):
    assert_same_as_transformers(write_dir(tmp_path, with_bos_and_eos(byte_level_backend()), config))


def test_token_named_in_the_config_becomes_special(tmp_path):
    path = write_dir(tmp_path, byte_level_backend(), {"pad_token": "the"})
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.decode(tokenizer.encode("athe", add_special_tokens=False)) == "athe"  # "the" isn't one token here
    path = write_dir(tmp_path, byte_level_backend(), {"pad_token": "he"})
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.decode(tokenizer.encode("ahe", add_special_tokens=False)) == "a"


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_token="</s>")
    tokenizer = Tokenizer.from_dir(write_dir(tmp_path, backend))
    assert len(tokenizer.encode("abcdefghijk")) == 11
    assert len(tokenizer.encode("a")) == 1


def test_vocab_size_counts_added_tokens():
    backend = byte_level_backend()
    before = Tokenizer(backend).vocab_size
    backend.add_tokens(["<tool>"])
    assert Tokenizer(backend).vocab_size == before + 1


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(RequestError, match="surrogate") as caught:
        byte_level().encode("ab\ud83d")
    assert caught.value.param == "prompt"


def test_missing_tokenizer_says_how_to_make_one(tmp_path):
    with pytest.raises(ModelError, match=r"no tokenizer\.json.*save_pretrained"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}'])
def test_damaged_tokenizer_is_a_model_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json can't be read"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_tokenizer_config_is_a_model_error(tmp_path, content):
    write_dir(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    "stored, expected",
    [
        ("from config", "from config"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}], "plain"),
        ([{"name": "tool_use", "template": "tools"}], None),
        (None, None),
    ],
)
def test_chat_template_of_the_config_is_used_when_there_is_no_file(tmp_path, stored, expected):
    path = write_dir(tmp_path, byte_level_backend(), {"chat_template": stored}, template=None)
    tokenizer = Tokenizer.from_dir(path)
    assert tokenizer.chat_template == expected
    assert tokenizer.has_chat_template == (expected is not None)


def test_chat_template_file_wins_over_the_config(tmp_path):
    path = write_dir(tmp_path, byte_level_backend(), {"chat_template": "from config"}, template="from file")
    assert Tokenizer.from_dir(path).chat_template == "from file"


def test_import_of_the_text_room_leaves_transformers_and_jax_out():
    import subprocess
    import sys

    code = "import sys, jaxcb.text; print(sorted({'transformers', 'jax', 'torch', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_built_in_tokenizer_gives_the_golden_ids(builtin_model, golden):
    tokenizer = Tokenizer.from_dir(builtin_model)
    for prompt in golden["prompts"]:
        assert tokenizer.encode(prompt["rendered"]) == prompt["prompt_ids"]
        assert tokenizer.decode(prompt["output_ids"]) == prompt["text"]
    assert tokenizer.encode(golden["nll"]["text"])[: len(golden["nll"]["ids"])] == golden["nll"]["ids"]


def test_built_in_tokenizer_loses_nothing(builtin_model):
    tokenizer = Tokenizer.from_dir(builtin_model)
    for text in ["  a\n\n\tb  ", "1234567890 ４５Ⅷ½²", "I'M it's WE'LL", "🦜नमस्ते你好", "x\u00a0\u2003y", "\r\n"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_built_in_config_is_json_without_a_class_that_needs_code(builtin_model):
    config = json.loads((builtin_model / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert isinstance(Tokenizer.from_dir(builtin_model).backend, tokenizers.Tokenizer)


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(monkeypatch):
    tokenizer = byte_level()
    longest = max(map(len, tokenizer.backend.get_vocab()))
    assert tokenizer.longest_token == longest
    text = "a" * (longest * 10)
    assert len(tokenizer.encode(text, max_tokens=10)) == len(text), "it might fit: tokenizing it must decide"
    with pytest.raises(RequestError, match=f"{len(text) + 1} characters, which can't be 10 tokens") as error:
        tokenizer.encode(text + "a", max_tokens=10)
    assert error.value.param == "prompt"


@pytest.mark.parametrize("text", ["plain words", "héllo 🦙\n\ttab", "日本語"])
def test_the_bytes_of_the_tokens_are_those_of_the_text(text):
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""
