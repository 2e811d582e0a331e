"""Where converted models are kept, and how a directory appears there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import filelock

from jaxcb.errors import ModelError


def cache_dir() -> Path:
    """``$JAXCB_CACHE``, else ``jaxcb`` under ``$XDG_CACHE_HOME``, else ``~/.cache/jaxcb``."""
    if own := os.environ.get("JAXCB_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "jaxcb"


def cached_dir(name: str, build: Callable[[Path], None]) -> Path:
    """The directory ``name`` of the cache; if it isn't there yet, ``build(path)`` fills it.

    ``build`` works in a scratch directory that is renamed when it is done: a directory in the cache is complete, and
    an interrupted build leaves nothing that counts. Processes that want the same name wait for the first one.

    Raises:
        ModelError: the cache can't be written.
    """
    target = cache_dir() / name
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(target.parent / f".{name}.lock"):
            if not target.is_dir():
                for abandoned in target.parent.glob(f".{name}-*"):  # by a process that was killed
                    shutil.rmtree(abandoned)
                with scratch_dir(target.parent, f".{name}-") as scratch:
                    build(scratch)
                    scratch.rename(target)
    except OSError as error:
        raise ModelError(
            f"can't write the model cache {target.parent}: {error}. Set JAXCB_CACHE to a writable directory"
        ) from error
    return target


@contextlib.contextmanager
def scratch_dir(parent: Path, prefix: str) -> Iterator[Path]:
    """A new directory under ``parent`` that is gone afterwards, unless it was renamed."""
    path = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
