"""``python -m jaxcb.weights convert SRC DST``: a model in another format, ready to be loaded with ``--model DST``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp

from jaxcb import cache
from jaxcb.errors import JaxcbError, ModelError
from jaxcb.models.spec import ModelSpec
from jaxcb.weights import checkpoint
from jaxcb.weights.loader import load_params
from jaxcb.weights.resolve import resolve


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if it worked, 1 after printing one line that says why it didn't."""
    parser = argparse.ArgumentParser(prog="python -m jaxcb.weights", description=__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("convert", help="write a model as an Orbax or a safetensors directory")
    command.add_argument("source", metavar="SRC", help="what --model takes, or 'builtin' for the built-in model")
    command.add_argument("target", metavar="DST", type=Path, help="a new or empty directory")
    command.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="auto: as in SRC")
    command.add_argument("--format", choices=["orbax", "safetensors"], default="orbax")
    command.add_argument("--revision", help="branch, tag or commit of a hub id")
    options = parser.parse_args(arguments)
    try:
        convert(None if options.source == "builtin" else options.source, options)
    except (JaxcbError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def convert(model: str | None, options: argparse.Namespace) -> None:
    """Write ``model`` to ``options.target``; an interrupted conversion leaves nothing there.

    Raises:
        ModelError: the model can't be read, or the target is taken.
    """
    target: Path = options.target
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty directory; nothing was written")
    files = resolve(model, options.revision)
    spec = files.read_spec()
    dtype = _stored_dtype(spec) if options.dtype == "auto" else jnp.dtype(options.dtype)
    params = load_params(files, spec, dtype)
    target.parent.mkdir(parents=True, exist_ok=True)
    with cache.scratch_dir(target.parent.resolve(), f".{target.name}-") as scratch:
        if options.format == "orbax":
            checkpoint.save_orbax(files, params, dtype, scratch)
        else:
            checkpoint.save_safetensors(files, spec, params, dtype, scratch)
        scratch.rename(target)
    print(f"wrote {files.name} to {target} ({options.format}, {dtype.name})")


def _stored_dtype(spec: ModelSpec) -> jnp.dtype:
    """bfloat16 if that is what the checkpoint says; float32 holds everything else without loss."""
    return jnp.dtype("bfloat16" if spec.dtype == "bfloat16" else "float32")


if __name__ == "__main__":
    sys.exit(main())
