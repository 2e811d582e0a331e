"""A server process of its own, ended when the test is done."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAKE = (str(Path(__file__).parent / "fake_engine.py"),)
"""What to run for the server around the fake engine."""
REAL = ("-m", "jaxcb.serve")


class ServerProcess:
    """``with ServerProcess(FAKE, "--flag", ...) as server``: ready to be asked at ``server.url``."""

    def __init__(self, program: Sequence[str], *flags: str):
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115  # closed in __exit__
        self.process = subprocess.Popen(
            [sys.executable, *program, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.url = ""
        self.banner = ""

    def __enter__(self) -> ServerProcess:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # ends when the process does
            self.banner += line
            if match := re.search(r"endpoint +(http://\S+)/v1", line):
                self.url = match[1]
            if line.startswith("curl"):
                return self
        raise AssertionError(f"the server ended with status {self.process.wait()}:\n{self.log()}")

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def log(self) -> str:
        """Everything written to stderr so far."""
        return Path(self._log.name).read_text()

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 25.0) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)


def run_to_end(program: Sequence[str], *flags: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Run a server that is expected to give up at once."""
    return subprocess.run(
        [sys.executable, *program, *flags],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=timeout_s,
    )
