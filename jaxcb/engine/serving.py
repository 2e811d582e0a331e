"""ServingEngine: what the server and the offline API ask of an engine, whether one answers or several do.

:class:`jaxcb.engine.Engine` is one, on devices of its own; :class:`jaxcb.cluster.Replicas` puts several behind one
queue; engines that share the work on a request are one too. Whoever takes a ServingEngine knows no more than this.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from jaxtyping import Float

from jaxcb.config import EngineConfig
from jaxcb.engine import prepare, scoring
from jaxcb.engine.stats import EngineStats
from jaxcb.engine.stream import OutputStream
from jaxcb.models import ModelSpec
from jaxcb.request import Pooling, Request
from jaxcb.structured_outputs import StructuredOutputs
from jaxcb.text import Tokenizer

Self = TypeVar("Self", bound="ServingEngine")


class ServingEngine(abc.ABC):
    """Answers requests until :meth:`shutdown`. Every method may be called from any thread.

    What is abstract is an implementation's own; the rest follows from it, as in :mod:`collections.abc`.
    """

    name: str
    """Of the model."""
    spec: ModelSpec
    tokenizer: Tokenizer
    """One for all that answer: a chat template that is set here holds for every request."""
    asked_for: EngineConfig
    """The config as given."""
    config: EngineConfig
    """The same with every None resolved. What is of one engine (``max_num_seqs``, ``num_kv_pages``) is that of each;
    ``max_waiting`` is of all together."""
    sampling_defaults: dict[str, Any]
    """Fields of SamplingParams for what an HTTP request, or a call without SamplingParams, leaves out."""

    # ------------------------------------------------------------------ requests

    @abc.abstractmethod
    def check_request(self, request: Request) -> None:
        """Raise RequestError if the request can never run. Keeps nothing."""

    @abc.abstractmethod
    def submit_choices(self, request: Request, *, blocking: bool = False) -> list[OutputStream]:
        """Queue a request for all its answers (``n``, or ``best_of``), a stream for each. They share the prompt's KV
        and draw by seeds of their own. The streams belong to the asyncio loop that runs here, if one does; with
        ``blocking``, to threads even then (a notebook cell, say).

        Raises:
            RequestError: the request is impossible; nothing is kept of it.
            QueueFullError: ``max_waiting`` requests wait already.
            EngineStoppedError: nobody is left to answer: shut down, or failed.
        """

    @abc.abstractmethod
    def fork(
        self, parents: Sequence[OutputStream], children: Sequence[tuple[Request, int]], *, blocking: bool = False
    ) -> list[OutputStream]:
        """Put requests in the place of running ones of one answer: beam search. ``parents`` end when the next step is
        planned; each child is given with the index of the parent whose beginning it shares, pages included, if both
        find room in that step (else it is computed, or found in the prefix cache).

        Errors as for :meth:`submit`; nothing is kept of any child. The queue's limit doesn't hold for them.
        """

    @abc.abstractmethod
    def compile_grammar(self, structured: StructuredOutputs) -> None:
        """Compile what a request to come asks for, and keep it: ``submit`` then finds it. ``submit`` does it too, where
        it is called; this is for callers who must not block there, such as an asyncio loop. Takes milliseconds as a
        rule, a second for the first one of all, and never more than ``jaxcb.grammar.compiler.TIMEOUT_S``.

        Raises:
            RequestError: it can't be compiled, or not be held to exactly; ``.param`` names the field.
        """

    @abc.abstractmethod
    def abort(self, request_id: str) -> None:
        """Drop a request. Its stream ends with ``FinishReason.ABORT``. Harmless if it has ended."""

    # ------------------------------------------------------------------ what it is doing

    @abc.abstractmethod
    def stats_by_engine(self) -> dict[str, EngineStats]:
        """A snapshot of gauges and totals of each engine, by the ``engine`` label that its metrics carry."""

    def stats(self) -> EngineStats:
        """A snapshot of gauges and totals, of all engines together that answer: what computes prompts for them neither
        has room for a request nor keeps one waiting."""
        return EngineStats.total([stats for stats in self.stats_by_engine().values() if stats.answers])

    @property
    def peers(self) -> dict[str, bool]:
        """Engines of other processes that compute prompts for this one, by address, and whether each is there."""
        return {}

    @property
    @abc.abstractmethod
    def healthy(self) -> bool:
        """Requests can be answered. Where several engines can answer, one that has failed doesn't change that: each
        one's own state is in :meth:`stats_by_engine`."""

    @property
    @abc.abstractmethod
    def accepting(self) -> bool:
        """False once a shutdown has begun: requests are refused."""

    @property
    @abc.abstractmethod
    def paused(self) -> bool:
        """Between :meth:`pause` and :meth:`resume`."""

    @property
    def max_choices(self) -> int:
        """Most answers of one request, which run side by side on one engine."""
        limit = self.config.max_num_seqs
        assert limit is not None  # the config is resolved
        return limit

    # ------------------------------------------------------------------ control, of all engines

    @abc.abstractmethod
    def pause(self) -> None:
        """Make no more steps until :meth:`resume`: what runs keeps its pages, what comes waits."""

    @abc.abstractmethod
    def resume(self) -> None:
        """End a pause. Harmless without one."""

    @abc.abstractmethod
    def sleep(self) -> None:
        """Give the memory of the KV cache back until :meth:`wake`, to a training step, say. Requests wait meanwhile;
        those that run compute the KV of their tokens so far again afterwards. Harmless while asleep.

        Raises:
            EngineStoppedError: the engine has stopped.
        """

    @abc.abstractmethod
    def wake(self) -> None:
        """Take the memory of the KV cache again and go on. Harmless while awake.

        Raises:
            EngineStoppedError: the engine has stopped.
        """

    @abc.abstractmethod
    def update_params(self, params: Any, *, running: Literal["keep", "restart"] = "restart") -> None:
        """Compute with other weights of the same model from the next step on; every prefix is forgotten. The arrays are
        shared, not copied, where they lie on the engine's devices, but by the native CPU kernels, which have a layout
        of their own.

        Arguments:
            params: as for :class:`jaxcb.held_model.HeldModel`.
            running: what becomes of requests that run. "restart": they keep their tokens so far, whose KV is computed
                again with the new weights; "keep": they go on from the KV that they have.

        Raises:
            ModelError: the parameters are not those of this model.
            EngineStoppedError: the engine has stopped.
        """

    @abc.abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every prefix. What runs goes on.

        Raises:
            EngineStoppedError: the engine has stopped.
        """

    @abc.abstractmethod
    def shutdown(self, *, drain_s: float = 0.0) -> None:
        """Refuse new requests, give the open ones up to ``drain_s`` seconds, abort the rest, end the threads."""

    # ------------------------------------------------------------------ what follows

    def submit(self, request: Request) -> OutputStream:
        """Queue a request for one answer; its results come out of the stream, which belongs to the running asyncio
        loop if there is one, else to threads. Errors as for :meth:`submit_choices`, and:

        Raises:
            RequestError: it asks for several answers.
        """
        prepare.check_single(request)
        return self.submit_choices(request)[0]

    def submit_blocking(self, request: Request) -> OutputStream:
        """As :meth:`submit`, for a caller that blocks even where an asyncio loop runs (a notebook cell, say)."""
        prepare.check_single(request)
        return self.submit_choices(request, blocking=True)[0]

    def embed(
        self, texts: Sequence[scoring.Text], *, pooling: Pooling = "last", normalize: bool = True
    ) -> Float[np.ndarray, "n E"]:
        """Embeddings of texts (or token ids): the last token's final hidden state, or the mean of all, divided by its
        length if ``normalize``. Blocks; :meth:`embed_async` is for coroutines.

        Raises:
            RequestError: one is empty or too long; nothing was started.
            EngineStoppedError: the engine stopped meanwhile.
        """
        requests = scoring.embed_requests(self, texts, pooling)
        return scoring.embeddings(self, scoring.complete(self, requests), normalize=normalize)

    async def embed_async(
        self, texts: Sequence[scoring.Text], *, pooling: Pooling = "last", normalize: bool = True
    ) -> Float[np.ndarray, "n E"]:
        """See :meth:`embed`."""
        requests = scoring.embed_requests(self, texts, pooling)
        return scoring.embeddings(self, await scoring.complete_async(self, requests), normalize=normalize)

    def score(self, pairs: Sequence[tuple[scoring.Text, scoring.Text]]) -> list[scoring.Score]:
        """How likely each continuation is after its context: pairs of two texts, or of two lists of token ids. Contexts
        that begin alike are computed once (prefix cache). Blocks; :meth:`score_async` is for coroutines.

        Raises:
            RequestError: a pair is too long or its context empty; nothing was started.
            EngineStoppedError: the engine stopped meanwhile.
        """
        requests = scoring.score_requests(self, pairs)
        return scoring.scores(requests, scoring.complete(self, requests))

    async def score_async(self, pairs: Sequence[tuple[scoring.Text, scoring.Text]]) -> list[scoring.Score]:
        """See :meth:`score`."""
        requests = scoring.score_requests(self, pairs)
        return scoring.scores(requests, await scoring.complete_async(self, requests))

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()
