"""``python -m jaxcb.native``: which backend an engine takes on this machine, and why. It builds what is missing."""

from __future__ import annotations

import sys

import jax

from jaxcb import native
from jaxcb.cache import cache_dir
from jaxcb.errors import ConfigError
from pallas_kernels import default_backend
from pallas_kernels.native import build, loaded


def main() -> int:
    """Print it; the exit status is 0 if the native kernels would be used."""
    try:
        asked = native.asked_for(None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{native.VARIABLE}: {asked or 'not set'}")
    print(f"CPU: {', '.join(build.cpu_variants()) or 'no instructions that the kernels know'}")
    print(f"compiler: {build.compiler() or 'none (g++ or clang++)'}")
    print(f"libraries: {cache_dir() / 'native'}")
    reason = native.why_not_loaded()
    library = loaded()
    if library is not None:
        made = "prebuilt" if library.prebuilt else "compiled here"
        print(f"loaded and tested: {library.variant}, {library.path}, {made}")
    if asked not in (None, "native"):
        print(f"backend: {asked}, because {native.VARIABLE} says so")
        return 1
    if reason is not None:
        print(f"backend: {default_backend()} on {jax.default_backend()}, because {reason}")
        return 1
    print("backend: native; weights and KV cache are bfloat16 unless --dtype says otherwise")
    return 0


if __name__ == "__main__":
    sys.exit(main())
