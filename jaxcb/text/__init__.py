"""Between strings and token ids: tokenizer, chat template, incremental detokenizer, stop strings.

Plain Python on the host; nothing here imports jax, and only the text thread (``worker.py``) knows what a request is.
"""

from jaxcb.text.detokenizer import Detokenizer
from jaxcb.text.stops import StopMatcher
from jaxcb.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "StopMatcher", "Tokenizer"]
