"""Writes tests/golden/penalties.json: greedy answers under penalties, from transformers' logits of the tiny llama.

Run by hand, in an environment of its own (the tests need neither torch nor this script)::

    pip install torch==2.13.0 transformers==5.24.0 safetensors
    python tests/golden/make_penalties.py

The repetition penalty is transformers' own (prompt and answer). Presence and frequency are OpenAI's: they count the
answer alone. The prompt says one token twenty times, one that the model then likes to say again.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MAX_TOKENS = 32
CASES = (
    {},
    {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.0},
)


def greedy(model: torch.nn.Module, prompt: list[int], presence: float = 0.0, frequency: float = 0.0) -> list[int]:
    answer: list[int] = []
    for _ in range(MAX_TOKENS):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0, -1].double()
        for token, count in Counter(answer).items():
            logits[token] -= count * frequency + presence
        answer.append(int(logits.argmax()))
    return answer


def favourite(model: torch.nn.Module) -> list[int]:
    """A prompt of one token twenty times after which the model says that token once more."""
    for token in range(3, 256):
        prompt = [3, *[token] * 20]
        if greedy(model, prompt)[0] == token:
            return prompt
    return [3, *[7] * 20]


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny" / "llama", dtype=torch.float32).eval()
    prompt = favourite(model)
    results = []
    for case in CASES:
        if penalty := case.get("repetition_penalty"):
            ids = torch.tensor([prompt])
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
                repetition_penalty=penalty,
                eos_token_id=None,
                pad_token_id=255,
            )
            answer = found[0, len(prompt) :].tolist()
        else:
            answer = greedy(model, prompt, case.get("presence_penalty", 0.0), case.get("frequency_penalty", 0.0))
        results.append({"prompt": prompt, "params": case, "answer": answer})
    lines = ",\n".join(json.dumps(result) for result in results)
    (HERE / "penalties.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
