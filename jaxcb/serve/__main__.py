"""``python -m jaxcb.serve``."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from jaxcb.config import EngineConfig
from jaxcb.errors import JaxcbError
from jaxcb.parsing import reasoning_markers, tool_format
from jaxcb.serve.cli import ServeOptions, parse

logger = logging.getLogger("jaxcb.serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal comes; returns the exit status. Whatever can't work is one line on stderr and status 1."""
    try:
        config, options = parse(argv)
        _set_up_logging(options)
        return _follow(config) if config.node_rank else _serve(config, options)
    except JaxcbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        gc.enable()  # _serve() does without until it is ready


def _serve(config: EngineConfig, options: ServeOptions) -> int:
    """The socket comes first: a port in use is known at once, not after minutes of loading."""
    from jaxcb.serve import disaggregation, server
    from jaxcb.text import chat

    begun_s = time.monotonic()
    # Names of parsers are checked here, not after minutes of loading.
    tool_format(options.tool_call_parser, None)
    reasoning_markers(options.reasoning_parser, None)
    sock = server.bind(options.host, options.port)
    gc.disable()  # while imports make a million objects that stay, searches for garbage would take a tenth of the time
    # jax takes seconds to import: not for --help, and not before the port is known to be free
    from jaxcb.serve.app import make_app
    from jaxcb.serve.banner import banner

    # After jax: two threads that import its extension and numpy at once can fail.
    threading.Thread(target=chat.preload, name="jaxcb-preload", daemon=True).start()
    engine, stop = disaggregation.start(config, options.disaggregation)
    try:
        if options.chat_template is not None:
            engine.tokenizer.chat_template = options.chat_template
        engine.tokenizer.warm_up()
        app = make_app(
            engine,
            model_names=options.served_model_names,
            api_key=options.api_key,
            admin_api_key=options.admin_api_key,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            allowed_origins=options.allowed_origins,
        )
        service = app.state.service
        # Nearly all that is there lives as long as the server, and is left out of the searches for garbage.
        gc.freeze()
        gc.enable()
        url = server.listen(sock)
        print(
            banner(
                service,
                url=url,
                has_api_key=options.api_key is not None,
                has_admin_key=options.admin_api_key is not None,
                took_s=time.monotonic() - begun_s,
            ),
            flush=True,
        )
        with _profiled(options.profile):
            server.run(app, service, sock, drain_timeout_s=options.drain_timeout_s)
    finally:
        stop()
        engine.shutdown()
    return 0


def _follow(config: EngineConfig) -> int:
    """A host that answers no requests. The first host drains and then stops the others, so a signal that reaches all
    of them must not end these; a second one does."""
    from jaxcb.hosts import follow

    def on_signal(number: int, _: object) -> None:
        logger.info("%s: host 0 says when to stop; a second signal exits at once", signal.Signals(number).name)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    follow(config)
    return 0


def _profiled(directory: str | None) -> AbstractContextManager[object]:
    """Under jax's profiler, if a directory is given."""
    if directory is None:
        return contextlib.nullcontext()
    import jax

    return jax.profiler.trace(directory)


def _set_up_logging(options: ServeOptions) -> None:
    level = options.log_level.upper()
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("jaxcb").setLevel(level)


if __name__ == "__main__":
    sys.exit(main())
