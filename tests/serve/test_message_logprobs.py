"""Which tokens of an answer are its messages', whatever the tokens are."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jaxcb.logprobs import Logprobs
from jaxcb.parsing import REASONING_PARSERS, TOOL_PARSERS, Reading
from jaxcb.request import SamplingParams
from jaxcb.serve.logprobs import text_logprobs
from jaxcb.serve.message_logprobs import MessageLogprobs

from .serving import CALLS

THOUGHTS = f"<think>Hm, Let.</think>\n\n{CALLS}\nPärıs 🙂 < <tool"


class Tokens:
    """A tokenizer of the pieces of one text."""

    def __init__(self, pieces: list[bytes]):
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, text: str) -> bool:
        return text == "<eos>"


def logprobs_of(ids: list[int]) -> Logprobs:
    own = np.asarray(ids, np.int32)
    return Logprobs(own, -own.astype(np.float32), np.ones_like(own), own[:, None][:, :0], np.zeros((len(ids), 0)))


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_of_a_message_are_those_that_hold_its_text(seed: int) -> None:
    """Tokens may hold any bytes: parts of characters, of markers, of two things at once."""
    rng, text = random.Random(seed), THOUGHTS.encode()
    cuts = sorted(rng.sample(range(1, len(text)), rng.choice([5, 30, len(text) - 1])))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)] + [b"<eos>"]
    reading = Reading(
        names=frozenset({"weather", "add"}),
        tools=TOOL_PARSERS["hermes"].parser,
        reasoning=REASONING_PARSERS["qwen3"],
    )
    prompt = SimpleNamespace(sampling=SamplingParams())
    call = cast(Any, SimpleNamespace(tokenizer=Tokens(pieces), prompts=[prompt], reading=reading))
    reader = MessageLogprobs(call)
    found = [token for index in range(len(pieces)) for token in reader.take(logprobs_of([index]))] + reader.finish()
    at_once = MessageLogprobs(call)
    assert [*at_once.take(logprobs_of(list(range(len(pieces))))), *at_once.finish()] == found
    ends = np.cumsum([len(piece) for piece in pieces])
    for number, part in enumerate(("Let me see.", "Pärıs 🙂 < <tool")):
        begin = text.rindex(part.encode())
        end = begin + len(part.encode())
        held = [i for i, piece in enumerate(pieces[:-1]) if ends[i] > begin and ends[i] - len(piece) < end]
        assert [-token.logprob.logprob for token in found if token.message == number] == held, f"{seed=} {pieces}"


def test_the_likeliest_of_tokens_that_read_alike_is_kept() -> None:
    """Halves of characters all read as U+FFFD, and lm-eval takes the largest value for the greedy token's."""
    ids, top = np.asarray([0], np.int32), np.asarray([[0, 1, 2]], np.int32)
    values = Logprobs(ids, np.float32([-1]), np.ones_like(ids), top, np.float32([[-1, -2, -3]]))
    found = text_logprobs(values, cast(Any, Tokens([b"\xf0", b"a", b"\x9f"])))
    assert found is not None and found.top_logprobs == [{"�": -1.0, "a": -2.0}]
