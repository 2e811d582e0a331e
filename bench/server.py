"""A ``python -m jaxcb.serve`` of our own, for the time of a measurement."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.common import BenchError

_ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def serving(flags: Sequence[str]) -> Iterator[str]:
    """Start the server on a free port, yield its URL when it is ready, end it afterwards. Its log goes to our stderr.

    Raises:
        BenchError: it ended before it was ready; it has said why.
    """
    command = [sys.executable, "-m", "jaxcb.serve", "--port", "0", "--log-level", "warning", *flags]
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _url(process)
        finally:
            process.terminate()


def _url(process: subprocess.Popen[str]) -> str:
    """From the banner, which is all that the server prints to stdout."""
    assert process.stdout is not None
    for line in process.stdout:
        if match := re.search(r"endpoint +(http://\S+)/v1", line):
            return match[1]
    raise BenchError(f"python -m jaxcb.serve ended with status {process.wait()}")
