"""setuptools' own backend, which for wheels asks for jaxlib too: with its headers the native CPU kernels are compiled
(setup.py). Editable installs, which compile nothing, don't wait for it."""

from __future__ import annotations

import os
import shutil
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
JAXLIB = "jaxlib>=0.10.2,<0.13"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """jaxlib where a compiler can use its headers."""
    compilers = (os.environ.get("CXX", ""), "g++", "clang++")
    wanted = [JAXLIB] if any(map(shutil.which, compilers)) else []
    return [*build_meta.get_requires_for_build_wheel(config_settings), *wanted]
