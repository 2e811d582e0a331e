"""Modules of this folder run in a process of their own, whose CPU counts as several devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def on_devices(count: int, module: str, *arguments: str) -> Any:
    """What ``python -m tests.parallel.MODULE`` prints, as JSON, with so many devices."""
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", f"tests.parallel.{module}", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stderr[-6000:]
    return json.loads(result.stdout.splitlines()[-1])
