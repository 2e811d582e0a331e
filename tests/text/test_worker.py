from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest

from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.text.worker import TextEvent, TextUpdate, TextWorker
from tests.text.small_tokenizers import byte_level

TOKENIZER = byte_level()


class Collector:
    """A worker whose outputs are kept; ``run`` feeds ids one event at a time."""

    def __init__(self) -> None:
        self.updates: list[TextUpdate] = []
        self.stopped: list[str] = []
        self.threads: set[str] = set()
        self.worker = TextWorker(TOKENIZER, self._take, self.stopped.append)

    def _take(self, updates: list[tuple[str, TextUpdate]]) -> None:
        self.updates += [update for _, update in updates]
        self.threads.add(threading.current_thread().name)

    def run(self, text: str, sampling: SamplingParams, reason: FinishReason = FinishReason.LENGTH) -> TextUpdate:
        ids = TOKENIZER.encode(text)
        self.worker.open("a", Request(request_id="client", prompt_token_ids=[0], sampling=sampling))
        for i, token in enumerate(ids):
            self.worker.put([TextEvent("a", token, reason if i == len(ids) - 1 else None)])
        return self.whole()

    def whole(self) -> TextUpdate:
        """All updates so far, merged; the worker is closed."""
        self.worker.close()
        first, *later = self.updates
        merged = dataclasses.replace(first)
        for update in later:
            merged.extend(update)
        return merged


@pytest.fixture
def collector() -> Iterator[Collector]:
    yield Collector()


def test_text_is_made_on_a_thread_of_its_own(collector):
    last = collector.run("héllo 🦙 the end", SamplingParams(max_tokens=99))
    assert last.text == "héllo 🦙 the end"
    assert last.token_ids == TOKENIZER.encode("héllo 🦙 the end")
    assert collector.threads == {"jaxcb-text"}
    assert last.finish_reason is FinishReason.LENGTH


def test_a_stop_string_drops_what_follows_and_tells_the_engine_once(collector):
    last = collector.run("one two three", SamplingParams(max_tokens=99, stop="tw"))
    assert last.text == "one " and last.stop_reason == "tw" and last.finish_reason is FinishReason.STOP
    assert collector.stopped == ["a"]
    assert sum(update.finish_reason is not None for update in collector.updates) == 1


def test_a_stop_string_at_the_very_last_token_wins_over_the_length(collector):
    last = collector.run("one two", SamplingParams(max_tokens=7, stop="two"))
    assert (last.text, last.finish_reason, last.stop_reason) == ("one ", FinishReason.STOP, "two")
    assert collector.stopped == [], "the engine has ended the request itself"


def test_text_that_never_became_a_stop_string_is_not_lost(collector):
    last = collector.run("one tw", SamplingParams(max_tokens=99, stop="two"))
    assert last.text == "one tw" and last.finish_reason is FinishReason.LENGTH


def test_an_end_token_has_no_text_unless_stops_are_included():
    for include, text in ((False, "one"), (True, "one!")):
        collector = Collector()
        last = collector.run(
            "one!", SamplingParams(max_tokens=99, include_stop_str_in_output=include), FinishReason.STOP
        )
        assert last.text == text and last.finish_reason is FinishReason.STOP


def test_a_stop_string_is_not_seen_before_min_tokens():
    collector = Collector()
    last = collector.run("xx one xx two", SamplingParams(max_tokens=99, min_tokens=5, stop="xx"))
    assert last.text == "xx one " and last.stop_reason == "xx"


def test_half_a_character_at_the_end_is_shown_as_one_replacement_character(collector):
    ids = TOKENIZER.encode("a🦙")
    collector.worker.open("a", Request(request_id="client", prompt_token_ids=[0], sampling=SamplingParams()))
    for i, token in enumerate(ids[:-1]):
        collector.worker.put([TextEvent("a", token, FinishReason.LENGTH if i == len(ids) - 2 else None)])
    assert collector.whole().text == "a\ufffd"


def test_an_end_without_a_token_flushes_and_keeps_the_reason(collector):
    collector.worker.open("a", Request(request_id="client", prompt_token_ids=[0], sampling=SamplingParams(stop="zzz")))
    collector.worker.put([TextEvent("a", token) for token in TOKENIZER.encode("bzz")])
    collector.worker.put([TextEvent("a", None, FinishReason.ERROR, error="broken")])
    collector.worker.put([TextEvent("a", 5), TextEvent("unknown", 5)])
    last = collector.whole()
    assert (last.text, last.finish_reason, last.error) == ("bzz", FinishReason.ERROR, "broken")


def test_an_abort_stays_an_abort_though_its_last_text_completes_a_stop_string(collector):
    collector.worker.open(
        "a", Request(request_id="client", prompt_token_ids=[0], sampling=SamplingParams(stop="\ufffd"))
    )
    collector.worker.put([TextEvent("a", token) for token in TOKENIZER.encode("a🦙")[:-1]])
    collector.worker.put([TextEvent("a", None, FinishReason.ABORT)])
    assert collector.whole().finish_reason is FinishReason.ABORT
