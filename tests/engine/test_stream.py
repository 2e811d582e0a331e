from __future__ import annotations

import asyncio
import threading
import time

import pytest

from jaxcb.engine.stream import OutputStream, deliver
from jaxcb.request import FinishReason, Request
from jaxcb.text.worker import TextUpdate

REQUEST = Request(request_id="a", prompt_token_ids=[7])


def update(token: int, text: str, reason: FinishReason | None = None) -> TextUpdate:
    return TextUpdate(
        token_ids=[token],
        text=text,
        finish_reason=reason,
        stop_reason=None,
        error=None,
        engine_failed=False,
        num_cached_tokens=token,
        num_preemptions=0,
        first_token_s=1.0,
        finished_s=None if reason is None else 2.0,
        logprobs=[],
        prompt_logprobs=None,
        embedding=None,
    )


def thread_stream(aborted: list[bool]) -> OutputStream:
    return OutputStream(REQUEST, lambda: aborted.append(True), None)


def test_an_output_that_was_read_never_changes_any_more():
    stream = thread_stream([])
    stream.put(update(1, "a"))
    first = next(stream)
    stream.put(update(2, "b"))
    second = next(stream)
    assert (first.token_ids, first.text, first.new_token_ids) == ([1], "a", [1])
    assert (second.token_ids, second.text, second.new_token_ids, second.new_text) == ([1, 2], "ab", [2], "b")
    second.token_ids.clear()
    stream.put(update(3, "c", FinishReason.LENGTH))
    assert first.token_ids == [1], "a reader's change stays with the reader's output"


def test_updates_that_nobody_reads_become_one_output():
    stream = thread_stream([])
    for token in range(1000):
        stream.put(update(token, "x", FinishReason.LENGTH if token == 999 else None))
    [output] = list(stream)
    assert output.token_ids == output.new_token_ids == list(range(1000))
    assert output.text == output.new_text == "x" * 1000
    assert output.finish_reason is FinishReason.LENGTH and output.finished_s == 2.0 and output.num_cached_tokens == 999


def test_a_thread_that_waits_is_woken():
    stream = thread_stream([])
    outputs: list[str] = []
    thread = threading.Thread(target=lambda: outputs.extend(output.new_text for output in stream))
    thread.start()
    for text, reason in (("a", None), ("b", None), ("c", FinishReason.STOP)):
        stream.put(update(0, text, reason))
        time.sleep(0.01)
    thread.join(10)
    assert "".join(outputs) == "abc" and not thread.is_alive()


def test_leaving_a_with_block_early_aborts_and_after_the_end_does_not():
    aborted: list[bool] = []
    with thread_stream(aborted) as stream:
        stream.put(update(0, "a"))
        next(stream)
    assert aborted == [True]
    aborted.clear()
    with thread_stream(aborted) as stream:
        stream.put(update(0, "a", FinishReason.STOP))
        assert len(list(stream)) == 1
    assert aborted == []


def test_cancelling_the_reader_aborts_the_request():
    aborted: list[bool] = []

    async def main() -> None:
        stream = OutputStream(REQUEST, lambda: aborted.append(True), asyncio.get_running_loop())
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(main())
    assert aborted == [True]


def test_an_asyncio_stream_merges_too_and_leaving_its_block_aborts():
    aborted: list[bool] = []

    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        async with OutputStream(REQUEST, lambda: aborted.append(True), loop) as stream:
            await asyncio.to_thread(deliver, [(stream, update(1, "a")), (stream, update(2, "b"))])
            output = await anext(stream)
        return list(output.token_ids)

    assert asyncio.run(main()) == [1, 2]
    assert aborted == [True]


def test_a_stream_is_read_the_way_it_was_opened():
    with pytest.raises(RuntimeError, match="use 'for'"):
        asyncio.run(anext(thread_stream([])))

    async def main() -> None:
        next(OutputStream(REQUEST, lambda: None, asyncio.get_running_loop()))

    with pytest.raises(RuntimeError, match="use 'async for'"):
        asyncio.run(main())


def test_a_closed_loop_drops_its_requests():
    aborted: list[bool] = []

    async def main() -> OutputStream:
        return OutputStream(REQUEST, lambda: aborted.append(True), asyncio.get_running_loop())

    deliver([(asyncio.run(main()), update(1, "a"))])
    assert aborted == [True]
