"""Whose text a token is part of: log-probabilities of an answer's messages, without those of reasoning and calls."""

from __future__ import annotations

import codecs
import copy
from typing import NamedTuple

from jaxcb.logprobs import Logprobs
from jaxcb.parsing import AnswerParser, Event, Text
from jaxcb.serve.call import Call
from jaxcb.serve.logprobs import TokenLogprob, chat_logprobs


class MessageToken(NamedTuple):
    message: int
    """Number of the message that it is part of, from 0."""
    logprob: TokenLogprob


class MessageLogprobs:
    """Reads the tokens of one answer, one by one and with a parser of its own, so that it does not matter in which
    pieces they come. A token belongs to a message if some of its characters do."""

    def __init__(self, call: Call):
        self._tokenizer = call.tokenizer
        self._skips_special = call.prompts[0].sampling.skip_special_tokens
        self._parser = AnswerParser(call.reading)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending: list[tuple[TokenLogprob, int]] = []
        """Tokens of which nothing is known yet, and how many characters each completes."""
        self._message = -1
        self._in_message = False

    def take(self, values: Logprobs | None) -> list[MessageToken]:
        """The next tokens of the answer; those are returned that are certain now to be part of a message."""
        found: list[MessageToken] = []
        answer = chat_logprobs(values, self._tokenizer)
        for token in () if answer is None else answer.content:
            text = self._decoder.decode(bytes(token.bytes))
            if self._skips_special and self._tokenizer.is_special(token.token):
                text = ""
            self._pending.append((token, len(text)))
            found += self._judge(self._parser.feed(text))
        return found

    def finish(self) -> list[MessageToken]:
        """The last ones; no more tokens will come."""
        return self._judge(self._parser.finish(), held=0)

    def _judge(self, events: list[Event], held: int | None = None) -> list[MessageToken]:
        """What ``events``, which the last token has led to, say of the pending ones. ``held``: characters that the
        parser has not told of yet, where that is known."""
        found: list[MessageToken] = []
        for event in events:
            if not isinstance(event, Text):
                self._in_message = False
                continue
            self._message += not self._in_message
            self._in_message = True
            start = 0  # behind it, in the same token, begins something else
            if event is events[-1]:
                held = self._held() if held is None else held
                start = sum(count for _, count in self._pending) - held - len(event.text)
            found += [MessageToken(self._message, token) for token in self._take(start, start + len(event.text))]
        if events and not isinstance(events[-1], Text):
            self._pending.clear()
        return found

    def _held(self) -> int:
        """How many characters of text the parser holds back until it knows what they are."""
        if len(self._pending) == 1:
            return 0  # held characters come from tokens that led to nothing
        rest = copy.deepcopy(self._parser).finish()
        return sum(len(event.text) for event in rest if isinstance(event, Text))

    def _take(self, start: int, end: int) -> list[TokenLogprob]:
        """The pending tokens with characters in [start, end), of all pending ones' text, and those that begin such a
        character. What comes before them belongs to no message; what comes behind them stays pending."""
        taken, left, at = [], [], 0
        for token, count in self._pending:
            if at >= end:
                left.append((token, count))
            elif at + count > start or (not count and at >= start):
                taken.append(token)
            at += count
        self._pending = left
        return taken
