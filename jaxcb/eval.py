"""An engine as a model of lm-eval (``pip install 'jaxcb[eval]'``): the harness's requests run through it as one batch.

    import lm_eval
    from jaxcb.eval import JaxcbLM

    results = lm_eval.simple_evaluate(JaxcbLM(), tasks=["arc_easy"])

or on the command line, with lm-eval's own flags:

    python -m jaxcb.eval --model jaxcb --model_args model=DIR --tasks arc_easy
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxcb import cluster
from jaxcb.config import EngineConfig
from jaxcb.engine import ServingEngine
from jaxcb.errors import ConfigError, RequestError
from jaxcb.generate import generate
from jaxcb.request import FinishReason, SamplingParams

MAX_GEN_TOKENS = 256
"""lm-eval's default."""
_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}


@register_model("jaxcb")
class JaxcbLM(LM):
    """Either over a running engine, or over one that is started with fields of :class:`EngineConfig` (``model=...``).

    Arguments:
        engine: a running one; it stays up.
        progress: show progress bars.
        batch_size, max_batch_size, device: lm-eval gives them to every model; the engine batches by itself, on the
            device that jax has.
        config: fields of EngineConfig.
    """

    def __init__(
        self,
        engine: ServingEngine | None = None,
        *,
        progress: bool = True,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: Any = None,
        **config: Any,
    ):
        super().__init__()
        if engine is not None and config:
            raise ConfigError(f"give either an engine or its settings ({', '.join(config)})", param="config")
        self.engine = cluster.start(EngineConfig(**config), progress=progress) if engine is None else engine
        self._progress = progress

    @property
    def max_length(self) -> int:
        """Tokens of a text that can be scored: one more is kept free for the token that nobody reads."""
        limit = self.engine.config.max_model_len
        assert limit is not None  # the engine has resolved it
        return limit - 1

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        spec = self.engine.spec
        if spec.bos_token_id is not None:
            return spec.bos_token_id
        if not spec.eos_token_ids:
            raise RequestError("the model has neither a BOS nor an EOS token to put before a text", param="prompt")
        return spec.eos_token_ids[0]

    @property
    def tokenizer_name(self) -> str:
        """lm-eval keeps requests by it."""
        return self.engine.name

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's own, for lm-eval's records."""
        return self.engine.tokenizer.chat_template or ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation."""
        return self.engine.tokenizer.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """How likely each continuation is, and whether greedy decoding would have written it."""
        pairs = [self._pair(*request.args) for request in requests]
        return [(score.logprob, score.is_greedy) for score in self.engine.score(pairs)]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """How likely each text is; longer ones in windows, each token once."""
        pairs, counts = [], []
        for request in requests:
            [text] = request.args
            ids = self.engine.tokenizer.encode(text, add_special_tokens=False)
            windows = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length - 1, 1)
            ]
            pairs += windows
            counts.append(len(windows))
        scores = iter(self.engine.score(pairs))
        return [sum(next(scores).logprob for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answers, each up to the first of its stop strings."""
        prompts, sampling = [], []
        for request in requests:
            context, wanted = request.args
            params = sampling_of(wanted)
            assert params.max_tokens is not None
            ids = self.engine.tokenizer.encode(context)
            prompts.append(ids[-max(self.max_length - params.max_tokens, 1) :])
            sampling.append(params)
        outputs = generate(prompts, sampling, engine=self.engine, progress=self._progress and not disable_tqdm)
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise RequestError(str(output.error), param="prompts")
        return [output.text for output in outputs]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As lm-eval's own models read them: spaces at the end of the context belong to the continuation; what is too
        long loses its beginning."""
        tokenizer = self.engine.tokenizer
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        if context:
            before = tokenizer.encode(context)
            after = tokenizer.encode(context + continuation)[len(before) :]
        else:
            before, after = [self.prefix_token_id], tokenizer.encode(continuation, add_special_tokens=False)
            if after[:1] == before:
                after = after[1:]
        after = after[-(self.max_length - 1) :]
        return before[-(self.max_length - len(after)) :], after


def sampling_of(wanted: dict[str, Any]) -> SamplingParams:
    """What a task's ``generation_kwargs`` ask for: those of Hugging Face's ``generate``, and fields of SamplingParams.

    Raises:
        RequestError: one of them is not known here; it is never ignored.
    """
    fields = dict(wanted)
    until = fields.pop("until", None) or ()
    limits = [fields.pop(name) for name in ("max_gen_toks", "max_new_tokens", "max_tokens") if name in fields]
    draws = fields.pop("do_sample", None)
    temperature = fields.pop("temperature", 1.0 if draws else 0.0)
    if unknown := fields.keys() - _SAMPLING:
        raise RequestError(f"generation_kwargs has {', '.join(sorted(unknown))}, which is not known", param="sampling")
    return SamplingParams(
        stop=(until,) if isinstance(until, str) else tuple(text for text in until if text),
        max_tokens=int(limits[0]) if limits else MAX_GEN_TOKENS,
        temperature=temperature if draws or draws is None else 0.0,
        **fields,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """lm-eval's command line, which now knows the model "jaxcb"."""
    import sys

    from lm_eval.__main__ import cli_evaluate

    if argv is not None:
        sys.argv[1:] = argv
    cli_evaluate()


if __name__ == "__main__":
    from jaxcb.eval import main as registered  # the model is registered from the module, not from __main__

    registered()
