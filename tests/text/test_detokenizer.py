import random

import pytest

from jaxcb.text import Detokenizer, Tokenizer

from .small_tokenizers import byte_fallback, byte_level

TEXTS = [
    "plain the text",
    "emoji 🦜🦜👩‍👩‍👧 and 🇩🇪 flags",
    "你好，世界。こんにちは 안녕하세요",
    "नमस्ते दुनिया வணக்கம் ਸਤ ਸ੍ਰੀ ಕನ್ನಡ",
    "é ñ ü combining e\u0301 and \u200b zero width",
    "line\nbreaks\n\n  and   spaces  ",
    "a replacement \ufffd character of its own",
]
KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


@pytest.fixture(params=sorted(KINDS))
def tokenizer(request) -> Tokenizer:
    return KINDS[request.param]()


def pieces(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = (), sizes=(1,), skip_special_tokens: bool = True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
    rng, out, start = random.Random(0), [], 0
    while start < len(ids):
        size = rng.choice(sizes)
        out.append(detokenizer.add(ids[start : start + size]))
        start += size
    return [*out, detokenizer.flush()]


def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Ids of the tokens that are one byte each."""
    plain = {tokenizer.encode(chr(byte), add_special_tokens=False)[-1]: byte for byte in range(128)}
    return plain | {index: -1 for index in range(tokenizer.vocab_size) if tokenizer.decode([index]) == "\ufffd"}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3), (5, 40)])
def test_pieces_concatenate_to_the_full_decode(tokenizer, text, sizes):
    ids = tokenizer.encode(text)
    out = pieces(tokenizer, ids, sizes=sizes)
    assert "".join(out) == tokenizer.decode(ids) == text.removeprefix(" ")


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_no_piece_ends_inside_a_character(tokenizer, text):
    ids = tokenizer.encode(text)
    assert not any("\ufffd" in piece for piece in pieces(tokenizer, ids))


def test_piece_appears_with_the_id_that_completes_its_character(tokenizer):
    ids = tokenizer.encode("a🦜b")
    out = pieces(tokenizer, ids)
    assert [piece for piece in out if piece] == ["a", "🦜", "b"]
    assert out[-1] == ""


@pytest.mark.parametrize("text", TEXTS)
def test_answer_continues_the_text_of_every_prompt(tokenizer, text):
    ids = tokenizer.encode(text)
    for split in range(len(ids) + 1):
        shown = tokenizer.decode(ids[:split])
        if text.startswith(shown):
            assert shown + "".join(pieces(tokenizer, ids[split:], prompt=ids[:split])) == text, (split, shown)


@pytest.mark.parametrize("text", ["a🦜b🦜c", "so 你 x", "€ the", "a🦜🦜🦜"])
def test_answer_finishes_the_character_that_the_prompt_began(tokenizer, text):
    ids = tokenizer.encode(text)
    for split in range(len(ids) + 1):
        shown = tokenizer.decode(ids[:split]).rstrip("\ufffd")
        assert shown + "".join(pieces(tokenizer, ids[split:], prompt=ids[:split])) == text, (split, shown)


def test_first_piece_keeps_its_space_after_a_prompt(tokenizer):
    prompt = tokenizer.encode("so")
    the = tokenizer.encode("so the")[len(prompt) :]
    assert "".join(pieces(tokenizer, the, prompt=prompt)) == " the"
    after_special_tokens = [*tokenizer.encode("so"), *[tokenizer.backend.token_to_id("<s>")] * 20]
    assert "".join(pieces(tokenizer, the, prompt=after_special_tokens)) == " the"


def test_special_tokens_are_skipped_or_shown(tokenizer):
    ids = [*tokenizer.encode("abc"), tokenizer.backend.token_to_id("</s>")]
    assert "".join(pieces(tokenizer, ids)) == "abc"
    assert "".join(pieces(tokenizer, ids, skip_special_tokens=False)) == "abc</s>"


def test_ids_outside_the_vocabulary_have_no_text(tokenizer):
    ids = tokenizer.encode("ab")
    assert "".join(pieces(tokenizer, [ids[0], 1_000_000, *ids[1:]])) == "ab"


def test_half_character_is_shown_at_the_end(tokenizer):
    ids = tokenizer.encode("a€")[:-1]
    out = pieces(tokenizer, ids)
    assert out[-1] == tokenizer.decode(ids)[1:]
    assert set(out[-1]) == {"\ufffd"}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 7), (30,)])
def test_random_bytes_equal_the_full_decode(seed, sizes):
    tokenizer = byte_level()
    rng = random.Random(seed)
    for _ in range(20):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(80)]
        assert "".join(pieces(tokenizer, ids, sizes=sizes)) == tokenizer.decode(ids), (seed, ids)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sizes", [(1,), (1, 2, 7), (30,)])
def test_broken_characters_equal_the_full_decode(seed, sizes):
    """Bytes of "€" and "🦜" and a wrong one, in any order: many that begin a character and few that end it."""
    tokenizer = byte_level()
    of_byte = {
        byte: tokenizer.backend.token_to_id(char) for byte, char in zip(b"\xe2\x82\xac\xf0\x9f", "âĤ¬ðŁ", strict=True)
    }
    rng = random.Random(seed)
    for _ in range(50):
        ids = [of_byte[byte] for byte in rng.choices(b"\xe2\x82\xf0\x9f\xac", weights=(8, 8, 8, 8, 1), k=60)]
        assert "".join(pieces(tokenizer, ids, sizes=sizes)) == tokenizer.decode(ids), (seed, ids)


def test_invalid_byte_does_not_take_back_what_was_shown():
    """A full decode rewrites the whole run of byte tokens; a stream can't."""
    tokenizer = byte_fallback()
    euro, bad = tokenizer.encode("€")[1:], tokenizer.backend.token_to_id("<0xFF>")
    letter = tokenizer.backend.token_to_id("a")
    assert tokenizer.decode([*euro, bad, letter]) == "\ufffd\ufffd\ufffd\ufffda"
    assert "".join(pieces(tokenizer, [*euro, bad, letter])) == "€\ufffda"


class CountingTokenizer(Tokenizer):
    """Counts the ids that are decoded: the cost of detokenizing."""

    num_decoded = 0

    def decode(self, ids, *, skip_special_tokens=True):
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("case", ["undecodable bytes", "skipped special tokens", "text"])
def test_cost_is_linear_in_the_ids(tokenizer, case):
    bad = [index for index, byte in byte_ids(tokenizer).items() if byte < 0]
    ids = {
        "undecodable bytes": [bad[0]] * 2000,
        "skipped special tokens": [tokenizer.backend.token_to_id("</s>")] * 2000,
        "text": (tokenizer.encode("the quick 🦜 ") * 200)[:2000],
    }[case]
    counting = CountingTokenizer(tokenizer.backend)
    out = "".join(pieces(counting, ids))
    assert out == tokenizer.decode(ids)
    assert counting.num_decoded < 40 * len(ids)
    held = Detokenizer(tokenizer)
    for token in ids:
        held.add([token])
        assert len(held._window) <= 64


def test_golden_answers_come_out_piece_by_piece(builtin_model, golden):
    tokenizer = Tokenizer.from_dir(builtin_model)
    for prompt in golden["prompts"]:
        out = pieces(tokenizer, prompt["output_ids"], prompt=prompt["prompt_ids"])
        assert "".join(out) == prompt["text"]
