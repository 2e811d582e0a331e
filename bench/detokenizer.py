"""What text costs the engine's step, and what it costs by itself.

Many sequences decode. In turns, some steps hand their tokens to the text thread (detokenizer, and stop strings that
never come), and some don't: "with text over ids only" is the median over the rounds of the ratio of a step's time.
What the thread still has to do when its steps are over is the backlog. Then the thread's own time a token, and the
time of a detokenizer over ids that never become characters, by their number: linear if the last column stays the
same.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from bench.common import (
    Result,
    describe,
    make_parser,
    markdown_table,
    paired_ratio,
    percentile,
    positive,
    run,
    save,
)
from bench.inprocess import InProcess, add_engine_options, engine_config, exact_length
from bench.workload import Item
from jaxcb.engine.core import EngineCore
from jaxcb.scheduler import TokenEvent
from jaxcb.text import Tokenizer
from jaxcb.text.detokenizer import Detokenizer
from jaxcb.text.worker import TextEvent, TextWorker

STOPS = ("\x00never", "</answer>\x00", "\n\n\n\n\x00", "the end\x00")
"""Their beginnings come up in text, they don't."""
UNDECODABLE = (500, 1_000, 2_000, 4_000)
LAST_BYTE = 0x80
"""A byte that only goes on what another one began."""


class Text:
    """A text thread for the sequences of a core; nobody reads what it finds."""

    def __init__(self, tokenizer: Tokenizer):
        self.worker = TextWorker(tokenizer, self._done, lambda key: None)
        self._num_put = self._num_done = 0

    def put(self, events: Sequence[TokenEvent]) -> None:
        """As the engine does after a step."""
        self.put_text([TextEvent(event.sequence.request.request_id, event.token_id) for event in events])

    def put_text(self, events: list[TextEvent]) -> None:
        self._num_put += 1
        self.worker.put(events)

    def wait(self) -> float:
        """Seconds until what was put so far is worked off."""
        started_s = time.perf_counter()
        while self._num_done < self._num_put:
            time.sleep(1e-4)
        return time.perf_counter() - started_s

    def _done(self, updates: object) -> None:
        self._num_done += 1


def time_steps(core: EngineCore, num_steps: int, text: Text | None) -> list[float]:
    """Milliseconds of each step; its tokens go to ``text``, if any."""
    times = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        events = core.step()
        if text is not None:
            text.put(events)
        times.append((time.perf_counter() - started_s) * 1e3)
    return times


def compare(process: InProcess, num_seqs: int, num_rounds: int, num_steps: int) -> dict[str, float]:
    """Step times in turns, with text and without."""
    core, _ = process.new_core()
    text = Text(process.tokenizer)
    num_tokens = 2 * num_rounds * num_steps + num_seqs + 16
    prompt = process.tokenizer.encode("The quick brown fox")
    for number in range(num_seqs):
        request = exact_length(str(number), Item([*prompt, number % 1000], num_tokens))
        request = dataclasses.replace(
            request, sampling=dataclasses.replace(request.sampling, temperature=1.0, seed=number)
        )
        core.add(request)
        open_to = dataclasses.replace(request.sampling, stop=STOPS, min_tokens=0)
        text.worker.open(str(number), dataclasses.replace(request, sampling=open_to))
    while len(core.step()) < num_seqs:  # prompts
        pass
    ids_only, with_text, backlogs = [], [], []
    for _ in range(num_rounds):
        ids_only.append(percentile(time_steps(core, num_steps, None), 50))
        with_text.append(percentile(time_steps(core, num_steps, text), 50))
        backlogs.append(text.wait() * 1e3)
    text.worker.close()
    return {
        "ids_only_ms": percentile(ids_only, 50),
        "with_text_ms": percentile(with_text, 50),
        "ratio": paired_ratio(with_text, ids_only),
        "backlog_ms": max(backlogs),
    }


def token_us(tokenizer: Tokenizer, num_seqs: int) -> float:
    """Microseconds a token of the text thread, all of it: detokenizer and stop strings of ``num_seqs`` sequences."""
    ids = tokenizer.encode("It was the best of times, it was the worst of times. 12 Emoji: \U0001f600, and 漢字. ") * 4
    text = Text(tokenizer)
    request = exact_length("0", Item(ids[:8], 1))
    request = dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, stop=STOPS, min_tokens=0))
    for number in range(num_seqs):
        text.worker.open(str(number), request)
    text.put_text([])
    text.wait()
    started_s = time.perf_counter()
    for token_id in ids:
        text.put_text([TextEvent(str(number), token_id) for number in range(num_seqs)])
    text.wait()
    seconds = time.perf_counter() - started_s
    text.worker.close()
    return seconds / len(ids) / num_seqs * 1e6


def undecodable_us(tokenizer: Tokenizer, count: int) -> float:
    """Microseconds an id of ``count`` ids that never become a character."""
    token_id = next(token for token in range(1 << 20) if tokenizer.token_bytes(token) == bytes([LAST_BYTE]))
    detokenizer = Detokenizer(tokenizer)
    started_s = time.perf_counter()
    text = "".join([detokenizer.add([token_id]) for _ in range(count)]) + detokenizer.flush()
    seconds = time.perf_counter() - started_s
    assert len(text) == count, "each is one replacement character"
    return seconds / count * 1e6


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("detokenizer", __doc__, seed=0, seed_help="not used: prompts are fixed")
    add_engine_options(parser, max_num_seqs=256, max_num_batched_tokens=512, max_model_len=512)
    parser.add_argument("--rounds", type=positive, default=8, metavar="N", help="default 8")
    parser.add_argument("--steps", type=positive, default=5, metavar="N", help="of each kind a round; default 5")
    args = parser.parse_args(argv)

    config = engine_config(args, enable_prefix_caching=False)
    config = dataclasses.replace(config, decode_buckets=config.decode_buckets or (), mixed_buckets=())
    process = InProcess.load(config)
    num_seqs = process.limits.max_num_seqs
    result = {
        "bench": "detokenizer",
        "machine": process.facts,
        "num_seqs": num_seqs,
        "step": compare(process, num_seqs, args.rounds, args.steps),
        "token_us": token_us(process.tokenizer, num_seqs),
        "undecodable": [{"ids": count, "us": undecodable_us(process.tokenizer, count)} for count in UNDECODABLE],
    }
    _print(result)
    save(args.json, result)
    return result


def _print(result: Result) -> None:
    step = result["step"]
    print(f"machine: {describe(result['machine'])}")
    cells = [f"{step[name]:.1f}" for name in ("ids_only_ms", "with_text_ms", "backlog_ms")]
    headers = ["sequences", "step, ids only, ms", "step with text, ms", "backlog, ms", "with text over ids only"]
    print(markdown_table(headers, [[result["num_seqs"], *cells, f"{step['ratio']:.3f}"]]))
    print(f"the text thread: {result['token_us']:.1f} us a token")
    lines = [[row["ids"], f"{row['us']:.1f}"] for row in result["undecodable"]]
    print(markdown_table(["undecodable ids", "us an id"], lines))


if __name__ == "__main__":
    raise SystemExit(run(main))
