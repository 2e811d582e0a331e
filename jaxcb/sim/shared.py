"""Traces whose prompts share beginnings, for cache policies: system prompts, chats, trees of few-shot examples."""

from __future__ import annotations

import itertools

import numpy as np

from jaxcb.sim.trace import WORKLOADS, Lognormal, TraceRequest, arrivals

# SGLang's benchmark "generated-shared-prefix": groups of 16 prompts with one system prompt.
GROUP_SIZE = 16
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 2048, 128, 256

NUM_TURNS = 5
CHAT_SYSTEM_TOKENS = 200
MESSAGE = Lognormal.from_percentiles(40, 200)
"""A user's message in a chat; the answers are ShareGPT-like."""
THINK_S = 10.0
"""Mean time between an answer and the next message."""

TREE_TOKENS = (300, 500, 1000)
"""Instruction, task, examples: the levels of a few-shot tree."""
TREE_WIDTHS = (1, 4, 16)
"""Children of a node on each level: 64 sets of examples."""
TREE_QUESTION, TREE_ANSWER = Lognormal.from_percentiles(60, 150), Lognormal.from_percentiles(12, 40)

BURST_SIZE = 32


def shared_prefix(num_requests: int, *, rate: float, gap_cv: float, random: np.random.Generator) -> list[TraceRequest]:
    """Groups of 16 requests with one system prompt of 2,048 tokens, in random order."""
    num_groups = -(-num_requests // GROUP_SIZE)
    groups = random.permutation(np.repeat(np.arange(num_groups), GROUP_SIZE))[:num_requests].tolist()
    times = arrivals(num_requests, rate=rate, gap_cv=gap_cv, random=random)
    return [
        TraceRequest(time, SYSTEM_TOKENS + QUESTION_TOKENS, ANSWER_TOKENS, ((group, SYSTEM_TOKENS),))
        for time, group in zip(times, groups, strict=True)
    ]


def multi_turn(num_requests: int, *, rate: float, gap_cv: float, random: np.random.Generator) -> list[TraceRequest]:
    """Chats of five turns: each prompt is all that was said before and a new message, sent some time after the answer.

    ``rate`` is that of requests, so chats begin at a fifth of it.
    """
    num_chats = -(-num_requests // NUM_TURNS)
    starts = arrivals(num_chats, rate=rate / NUM_TURNS, gap_cv=gap_cv, random=random)
    count = num_chats * NUM_TURNS
    messages, answers = MESSAGE.draw(count, random), WORKLOADS["sharegpt"].output.draw(count, random)
    thinks_s = random.exponential(THINK_S, count).tolist()
    runs = itertools.count(1)  # run 0 is the system prompt
    content: list[tuple[tuple[int, int], ...]] = [((0, CHAT_SYSTEM_TOKENS),)] * num_chats
    trace: list[TraceRequest] = []
    for number in range(num_requests):
        turn, chat = divmod(number, num_chats)
        message, answer = (next(runs), messages[number]), (next(runs), answers[number])
        content[chat] = said = (*content[chat], message)
        first = turn == 0
        trace.append(
            TraceRequest(
                starts[chat] if first else thinks_s[number],
                sum(length for _, length in said),
                answer[1],
                said,
                answer=answer[0],
                after=None if first else number - num_chats,
            )
        )
        content[chat] = (*said, answer)
    return trace


def few_shot_tree(num_requests: int, *, rate: float, gap_cv: float, random: np.random.Generator) -> list[TraceRequest]:
    """Short questions behind one of 64 sets of examples, 16 to a task, under one instruction; in random order."""
    num_leaves = int(np.prod(TREE_WIDTHS))
    leaves = random.integers(num_leaves, size=num_requests).tolist()
    questions, answers = TREE_QUESTION.draw(num_requests, random), TREE_ANSWER.draw(num_requests, random)
    times = arrivals(num_requests, rate=rate, gap_cv=gap_cv, random=random)
    shared = sum(TREE_TOKENS)
    return [
        TraceRequest(time, shared + question, answer, _path(leaf))
        for time, leaf, question, answer in zip(times, leaves, questions, answers, strict=True)
    ]


def bursts(num_requests: int, *, rate: float, gap_cv: float, random: np.random.Generator) -> list[TraceRequest]:
    """ShareGPT-like requests that come 32 at a time."""
    starts = arrivals(-(-num_requests // BURST_SIZE), rate=rate / BURST_SIZE, gap_cv=gap_cv, random=random)
    workload = WORKLOADS["sharegpt"]
    prompts, outputs = workload.prompt.draw(num_requests, random), workload.output.draw(num_requests, random)
    return [
        TraceRequest(starts[number // BURST_SIZE], prompt, output)
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def _path(leaf: int) -> tuple[tuple[int, int], ...]:
    """Runs from the root to a leaf; a node's id is unlike that of every other, on any level."""
    runs: list[tuple[int, int]] = []
    num_below, num_nodes, first_id = int(np.prod(TREE_WIDTHS)), 1, 0
    for width, length in zip(TREE_WIDTHS, TREE_TOKENS, strict=True):
        num_nodes, num_below = num_nodes * width, num_below // width
        runs.append((first_id + leaf // num_below, length))
        first_id += num_nodes
    return tuple(runs)
