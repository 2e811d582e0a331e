"""transformers on the weights and requests that ``bench.gpu_model`` left: its generate, and its continuous batching.

``python bench/torch_side/peer.py FOLDER --json FILE``, in any Python that has torch and transformers. A file by itself
in a folder by itself: no module of ``bench`` must pass for one that they import.

Both get --seconds, half each, and are counted by the useful tokens that they made until then: those that a request
asked for. All requests are there from the start. ``generate`` takes them in batches of --batch-size as they come: a
batch runs until its longest answer is done.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

Requests = list[dict[str, Any]]


class Deadline(StoppingCriteria):
    """Ends all rows when the time is over."""

    def __init__(self, until_s: float):
        self.until_s = until_s

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        over = time.monotonic() > self.until_s
        return torch.full((input_ids.shape[0],), over, dtype=torch.bool, device=input_ids.device)


def static(model: Any, requests: Requests, batch_size: int, seconds: float) -> tuple[int, float]:
    """Useful tokens of ``model.generate``, and the seconds that it took, at most about as many as given."""
    for _ in range(2):
        _generate(
            model, [{**request, "output_len": 2} for request in requests[:batch_size]], time.monotonic() + seconds
        )
    useful, begun_s = 0, time.monotonic()
    for start in range(0, len(requests), batch_size):
        useful += _generate(model, requests[start : start + batch_size], begun_s + seconds)
        if time.monotonic() > begun_s + seconds:
            break
    return useful, time.monotonic() - begun_s


def _generate(model: Any, batch: Requests, until_s: float) -> int:
    width = max(len(request["prompt_ids"]) for request in batch)
    rows = [[0] * (width - len(request["prompt_ids"])) + request["prompt_ids"] for request in batch]
    mask = [[0] * (width - len(request["prompt_ids"])) + [1] * len(request["prompt_ids"]) for request in batch]
    longest = max(request["output_len"] for request in batch)
    ids = model.generate(
        torch.tensor(rows, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=GenerationConfig(
            do_sample=False, max_new_tokens=longest, min_new_tokens=longest, pad_token_id=0
        ),
        stopping_criteria=StoppingCriteriaList([Deadline(until_s)]),
    )
    made = ids.shape[1] - width
    return sum(min(made, request["output_len"]) for request in batch)


def continuous(model: Any, requests: Requests, batch_size: int, seconds: float) -> tuple[int, float]:
    """The same of transformers' continuous batching, which chooses the size of its batches itself.

    Raises:
        RuntimeError: a request failed, or the manager did.
    """
    limits: dict[str, Any] = {}
    if model.device.type == "cpu":  # where it would take nearly all of the memory
        from transformers import ContinuousBatchingConfig

        limits["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)
    config = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
    manager = model.init_continuous_batching(generation_config=config, **limits)
    if hasattr(manager, "warmup") and model.device.type != "cpu":
        manager.warmup()
    manager.start()
    finished = False
    try:
        _complete(
            manager, [{**request, "output_len": 2} for request in requests[:8]], "warm", time.monotonic() + seconds
        )
        begun_s = time.monotonic()
        useful, finished = _complete(manager, requests, "timed", begun_s + seconds)
        return useful, time.monotonic() - begun_s
    finally:
        manager.stop(block=True, timeout=5, **({} if finished else {"hard_stop": True}))


def _complete(manager: Any, requests: Requests, name: str, until_s: float) -> tuple[int, bool]:
    """Tokens made until then, and whether that is all of them."""
    made = dict.fromkeys((f"{name}-{number}" for number in range(len(requests))), 0)
    for request_id, request in zip(made, requests, strict=True):
        manager.add_request(
            request["prompt_ids"],
            request_id=request_id,
            max_new_tokens=request["output_len"],
            streaming=True,
            eos_token_id=-1,
        )
    left = len(requests)
    while left and time.monotonic() < until_s:
        result = manager.get_result(timeout=0.2)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching ended by itself")
            continue
        if result.error:
            raise RuntimeError(f"a request failed: {result.error}")
        if result.request_id in made:
            made[result.request_id] = len(result.generated_tokens)
            left -= result.is_finished()
    return sum(made.values()), not left


def timed(
    call: Callable[[Any, Requests, int, float], tuple[int, float]],
    model: Any,
    requests: Requests,
    batch_size: int,
    seconds: float,
) -> dict[str, Any]:
    """Useful output tokens a second, or the reason for which there is no number."""
    try:
        useful, took_s = call(model, requests, batch_size, seconds)
    except Exception as error:  # whatever a release of transformers raises: the other way is wanted all the same
        return {"left_out": f"{type(error).__name__}: {error}"[:500]}
    if not useful:
        return {"left_out": f"no token in {took_s:.0f} s; what it logged says why"}
    wanted = sum(request["output_len"] for request in requests)
    return {"output_tok_s": useful / took_s, "wall_s": took_s, "tokens": useful, "part_of_workload": useful / wanted}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="weights, config.json and requests.json")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the result goes there")
    parser.add_argument("--seconds", type=float, default=60.0, help="for both ways together; default 60")
    parser.add_argument("--batch-size", type=int, default=64, help="of generate; default 64")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "batch_size": args.batch_size,
    }
    requests = json.loads((args.folder / "requests.json").read_text(encoding="utf-8"))
    begun_s = time.monotonic()
    model: Any = AutoModelForCausalLM.from_pretrained(str(args.folder), dtype=torch.bfloat16)
    model = model.to(device).eval()
    result["attention"] = model.config._attn_implementation
    left_s = args.seconds - (time.monotonic() - begun_s)
    for name, call in {"generate": static, "continuous batching": continuous}.items():
        with torch.inference_mode():
            # a fifth is for warming up
            result[name] = timed(call, model, requests, args.batch_size, max(left_s, 1.0) * 0.4)
        if device == "cuda":
            torch.cuda.empty_cache()
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
