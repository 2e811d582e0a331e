"""The build step that pyproject.toml has no words for: wheels carry the native CPU kernels, compiled.

A wheel that is built where a C++ compiler is gets a library for each variant of this machine's architecture, and is
named for the platform. Where there is none, or compiling fails, the kernels are compiled at first use; no install fails
of them. An editable install compiles nothing: it reads the sources where they are.
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("pallas_kernels") / "native"


def kernels() -> ModuleType | None:
    """pallas_kernels/native/build.py, without the package around it, which imports jax. None: nothing can be built."""
    spec = importlib.util.spec_from_file_location("jaxcb_native_build", Path(__file__).parent / NATIVE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:  # of jaxlib: without build isolation it may not be there
        print(f"native CPU kernels are left to first use: {error}", file=sys.stderr)
        return None
    return module if module.compiler() is not None else None


class BuildWithKernels(build_py):
    """Python files, then the libraries beside them."""

    def run(self) -> None:
        super().run()
        module = None if self.editable_mode else kernels()
        if module is None:
            return
        prebuilt = Path(self.build_lib) / NATIVE / "prebuilt"
        shutil.rmtree(prebuilt, ignore_errors=True)
        for variant in module.variants_of(platform.machine()):
            try:
                print(f"native CPU kernels: {module.build(prebuilt, variant, version='')}")
            except module.NativeError as error:
                print(f"native CPU kernels ({variant}) are left to first use: {error}", file=sys.stderr)


class PlatformWheel(bdist_wheel):
    """Named py3-none-<platform> if it may carry libraries: they are no extension modules, any Python loads them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = kernels() is None

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        return (python, abi, system) if self.root_is_pure else ("py3", "none", system)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel})
