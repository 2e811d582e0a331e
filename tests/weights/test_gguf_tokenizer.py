import pytest

from jaxcb.errors import ModelError
from jaxcb.text import Tokenizer
from jaxcb.weights import gguf_tokenizer

ALPHABET = [chr(code) for code in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©"]


def byte_level(pre: str | None = "smollm", **extra):
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["<s>", "</s>", "<tool>", *ALPHABET, "he", "12", "123", "the"],
        "tokenizer.ggml.token_type": [3, 3, 4, *[1] * (len(ALPHABET) + 4)],
        "tokenizer.ggml.merges": ["h e", "1 2", "12 3"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    if pre is not None:
        values["tokenizer.ggml.pre"] = pre
    values |= {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return gguf_tokenizer.build(lambda key, default=None: values.get(key, default))


def words(pre: str | None, text: str) -> list[str]:
    """The words that ``text`` is split into before merging, as text again."""
    backend, _ = byte_level(pre)
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("smollm", "it's 1234  x", ["it", "'s", " ", "1", "2", "3", "4", " ", " x"]),
        ("gpt-2", "it's 1234  x", ["it", "'s", " 1234", " ", " x"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", " ", "123", "45", "\n\n", " x"]),
        ("llama3", "a 1234", ["a", " ", "123", "4"]),
        ("qwen2", "IT'S 123\n x", ["IT", "'S", " ", "1", "2", "3", "\n", " x"]),
        ("qwen2", "(abc) .\n\n", ["(abc", ")", " .\n\n"]),
        ("tekken", "camelCase 12/\n", ["camel", "Case", " ", "1", "2", "/\n"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
        (None, "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_words_are_split_as_the_model_was_trained(pre, text, expected):
    assert words(pre, text) == expected


def test_merges_stay_inside_words():
    tokenizer = Tokenizer(*byte_level("gpt-2"))
    ids = tokenizer.encode("123")
    assert [tokenizer.backend.id_to_token(token) for token in ids] == ["123"]
    tokenizer = Tokenizer(*byte_level("smollm"))
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.encode("123")] == ["1", "2", "3"]


def test_llama_3_takes_whole_words_before_merging():
    """ "the" is a token that no merge leads to."""
    with_merges, without = Tokenizer(*byte_level("gpt-2")), Tokenizer(*byte_level("llama-bpe"))
    assert [with_merges.backend.id_to_token(token) for token in with_merges.encode("the")] == ["t", "he"]
    assert [without.backend.id_to_token(token) for token in without.encode("the")] == ["<s>", "the"]


@pytest.mark.parametrize(
    "pre, extra, expected",
    [
        ("smollm", {}, ["he"]),
        ("smollm", {"add_bos_token": True}, ["<s>", "he"]),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "he", "</s>"]),
        ("llama-bpe", {}, ["<s>", "he"]),
        ("llama-bpe", {"add_bos_token": False}, ["he"]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(pre, extra, expected):
    tokenizer = Tokenizer(*byte_level(pre, **extra))
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.encode("he")] == expected
    assert [tokenizer.backend.id_to_token(token) for token in tokenizer.encode("he", add_special_tokens=False)] == [
        "he"
    ]


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    tokenizer = Tokenizer(*byte_level())
    ids = tokenizer.encode("<s>a<tool>b</s>")
    assert [tokenizer.backend.id_to_token(token) for token in ids] == ["<s>", "a", "<tool>", "b", "</s>"]
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def sentencepiece(**extra):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scored = {"▁": -1.0, "a": -2.0, "b": -3.0, "c": -4.0, "ab": -10.0, "bc": -9.0, "▁a": -11.0, "▁ab": -12.0}
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + list(scored),
        "tokenizer.ggml.token_type": types + [1] * len(scored),
        "tokenizer.ggml.scores": [0.0] * len(tokens) + list(scored.values()),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    values |= {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    return Tokenizer(*gguf_tokenizer.build(lambda key, default=None: values.get(key, default)))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text)]


def test_sentencepiece_merges_the_pair_with_the_best_score_first():
    assert pieces(sentencepiece(), "abc") == ["<s>", "▁a", "bc"]
    assert pieces(sentencepiece(), "ab ab") == ["<s>", "▁ab", "▁ab"]


def test_sentencepiece_writes_unknown_characters_as_bytes():
    tokenizer = sentencepiece()
    assert pieces(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a é\nb")) == "a é\nb"


def test_sentencepiece_space_prefix_can_be_off():
    tokenizer = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert pieces(tokenizer, "ab") == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize(
    "extra, reason",
    [
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre 'kimi-k2' is not supported; supported: .*smollm"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"tokens": None}, "no vocabulary"),
        ({"merges": None}, "no merges"),
        ({"model": "llama"}, "needs a score and a type"),
    ],
)
def test_what_is_missing_or_not_supported_is_named(extra, reason):
    with pytest.raises(ModelError, match=reason):
        byte_level(**extra)
