"""Writes tests/golden/beams.json: what transformers' beam search finds with the tiny llama of make_tiny.py.

Run by hand, in an environment of its own (the tests need neither torch nor this script)::

    pip install torch==2.13.0 transformers==5.24.0 safetensors
    python tests/golden/make_beams.py

The end tokens are ones that the random model likes, so that beams end early and late.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
PROMPTS = [[5, 6, 7], list(range(40, 70)), [200, 3, 90, 14, 14]]
MAX_TOKENS = 8


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(HERE / "tiny" / "llama", dtype=torch.float32).eval()
    cases = []
    options = itertools.product(PROMPTS, (2, 5), (0.0, 1.0, 2.0, -1.0), (False, True, "never"))
    for number, (prompt, width, length_penalty, early_stopping) in enumerate(options):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            logits = model(ids).logits[0, -1]
        likely = torch.topk(logits, 6).indices.tolist()
        end_ids = [likely[1 + number % 3], likely[4]]
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            do_sample=False,
            eos_token_id=end_ids,
            pad_token_id=255,
            return_dict_in_generate=True,
            output_scores=True,
        )
        answers = []
        for row in found.sequences[:, len(prompt) :].tolist():
            ends = [index for index, token in enumerate(row) if token in end_ids]
            answers.append(row[: ends[0] + 1] if ends else row)
        cases.append(
            {
                "prompt": prompt,
                "width": width,
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
                "end_ids": end_ids,
                "answers": answers,
                "scores": [round(score, 6) for score in found.sequences_scores.tolist()],
            }
        )
    lines = ",\n".join(json.dumps(case) for case in cases)
    (HERE / "beams.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    print(
        len(cases),
        "cases;",
        sum(len(answer) < MAX_TOKENS for case in cases for answer in case["answers"]),
        "ended early",
    )


if __name__ == "__main__":
    main()
