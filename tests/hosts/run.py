"""Processes that are hosts of one engine, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tests.serve.process import ROOT


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


class Host:
    """One of them."""

    def __init__(self, *arguments: str, devices: int = 1):
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115  # closed by end()
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        )

    def read(self) -> dict[str, Any]:
        """The next line that is JSON."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError(f"it ended with status {self.process.wait()}:\n{self.log()}")

    def wait(self, timeout_s: float) -> int:
        return self.process.wait(timeout_s)

    def log(self) -> str:
        with open(self._log.name, encoding="utf-8", errors="replace") as file:
            return file.read()[-6000:]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._log.close()


@contextlib.contextmanager
def hosts(commands: Sequence[Sequence[str]], *, devices: int = 1) -> Iterator[list[Host]]:
    started = [Host(*command, devices=devices) for command in commands]
    try:
        yield started
    finally:
        for host in started:
            host.end()
