"""What grammars cost: steps of N sequences that are held to a JSON schema against steps of N that are free, in turn.

Both decode greedily, on the same engine. Masks are filled while the forward runs; their time shows where the device
would have been waiting for nothing else. Forced tokens are computed several at a time, so constrained steps bring more
tokens than rows; ``--one-by-one`` asks for log-probabilities, with which every token is sampled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tqdm import tqdm

from bench.common import (
    BenchError,
    Result,
    describe,
    make_parser,
    markdown_table,
    paired_ratio,
    percentile,
    positive,
    run,
    save,
    show_progress,
)
from bench.inprocess import InProcess, add_engine_options, engine_config
from jaxcb.engine.core import EngineCore
from jaxcb.grammar import Grammar, GrammarCompiler
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.sampling_params import StructuredOutputs
from jaxcb.scheduler import Scheduler

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": ["string", "null"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 50}
_WARM_UP_STEPS = 4


def main(argv: Sequence[str] | None = None) -> Result:
    """The command line."""
    parser = make_parser("grammar", __doc__, seed=None, seed_help="of nothing: decoding is greedy")
    add_engine_options(parser, max_num_seqs=64, max_model_len=512)
    parser.add_argument("--sequences", type=positive, default=64, metavar="N", help="default 64")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="default 5")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="counted of each round; default 20")
    parser.add_argument("--one-by-one", action="store_true", help="sample forced tokens too")
    args = parser.parse_args(argv)
    process = InProcess.load(engine_config(args, enable_prefix_caching=True))
    if args.sequences > process.limits.max_num_seqs:
        raise BenchError(
            f"{args.sequences} sequences don't run at once: --max-num-seqs is {process.limits.max_num_seqs}"
        )
    spec = process.runner.spec
    compiler = GrammarCompiler(process.tokenizer, spec.vocab_size, spec.eos_token_ids)
    grammar = compiler.compile(StructuredOutputs(json=SCHEMA))
    compiler.close()
    times: dict[bool, list[float]] = {False: [], True: []}
    tokens: dict[bool, list[float]] = {False: [], True: []}
    for _ in tqdm(range(args.rounds), desc="rounds", disable=not show_progress()):
        for constrained in (False, True):
            steps = _steps(process, grammar if constrained else None, args.sequences, args.steps, args.one_by_one)
            times[constrained].append(percentile([seconds for seconds, _ in steps], 50))
            tokens[constrained].append(sum(count for _, count in steps) / sum(seconds for seconds, _ in steps))
    result = {
        "bench": "grammar",
        "machine": process.facts,
        "sequences": args.sequences,
        "free_ms": percentile(times[False], 50) * 1e3,
        "constrained_ms": percentile(times[True], 50) * 1e3,
        "times": paired_ratio(times[True], times[False]),
        "free_tok_s": percentile(tokens[False], 50),
        "constrained_tok_s": percentile(tokens[True], 50),
    }
    print(f"machine: {describe(process.facts)}")
    cells = [
        args.sequences,
        *(f"{result[name]:.2f}" for name in ("free_ms", "constrained_ms", "times")),
        *(f"{result[name]:,.0f}" for name in ("free_tok_s", "constrained_tok_s")),
    ]
    print(markdown_table(["sequences", "ms a step", "constrained", "times", "tok/s", "constrained"], [cells]))
    save(args.json, result)
    return result


def _steps(
    process: InProcess, grammar: Grammar | None, num_sequences: int, num_steps: int, one_by_one: bool
) -> list[tuple[float, int]]:
    """Seconds and tokens of each step in which all sequences decode."""
    scheduler = Scheduler(process.limits)
    core = EngineCore(scheduler, process.runner, run_ahead=process.config.run_ahead)
    sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, logprobs=0 if one_by_one else None)
    for number in range(num_sequences):
        prompt = process.tokenizer.encode(f"Person {number}, as JSON: ")
        core.add_choices([Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)], grammar)
    while scheduler.num_waiting:
        core.step()
    for _ in range(_WARM_UP_STEPS):
        core.step()
    steps = []
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        events = core.step()
        steps.append((time.perf_counter() - begun_s, len(events)))
    for number in range(num_sequences):
        scheduler.finish(str(number), FinishReason.ABORT)
    while core.has_work:
        core.step()
    return steps


if __name__ == "__main__":
    raise SystemExit(run(main))
