"""Loads a model: its files become the params pytree that the decoder takes, and its tokenizer."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxcb import native
from jaxcb.config import EngineConfig
from jaxcb.devices import Placement
from jaxcb.errors import ConfigError, ModelError
from jaxcb.held_model import HeldModel
from jaxcb.models import families
from jaxcb.models.fused import fold_norms
from jaxcb.models.params import Params, insert
from jaxcb.models.spec import ModelSpec
from jaxcb.text.tokenizer import Tokenizer
from jaxcb.weights.held import held_params, no_tokenizer
from jaxcb.weights.memory import Arena
from jaxcb.weights.panels import Panels, are_panels, in_panels
from jaxcb.weights.placed import placer
from jaxcb.weights.quantize import quantize
from jaxcb.weights.resolve import ModelFiles, resolve
from jaxcb.weights.safetensors_source import SafetensorsSource

logger = logging.getLogger(__name__)

Layout = Literal["rows", "rows apart", "panels"]
Room = Callable[[tuple[int, ...]], np.ndarray]
"""Gives an array of a shape, to fill."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """Everything of a model that the engine needs."""

    name: str
    spec: ModelSpec
    params: Params
    tokenizer: Tokenizer
    sampling_defaults: Mapping[str, Any]
    """Fields of SamplingParams for what a request leaves out."""


def load(config: EngineConfig, *, progress: bool = False, placement: Placement | None = None) -> LoadedModel:
    """Find the model of ``config``, and load it.

    Arguments:
        progress: show a bar if that takes long.
        placement: the devices to load it onto; None: the default device, or where held parameters lie.

    Raises:
        ModelError: the model can't be found, read or understood.
    """
    if isinstance(config.model, HeldModel):
        return _held(config.model, config, placement)
    assert not isinstance(config.model, tuple)  # the config has made a HeldModel of it
    files = resolve(config.model, config.revision)
    spec = files.read_spec()
    defaults = files.read_sampling_defaults(config.generation_config)
    tokenizer = Tokenizer.from_dir(files.directory)
    dtype = config.dtype
    if dtype == "auto":
        dtype = default_dtype(jax.default_backend(), native=_native_usable(config))
    # Else what was read becomes other numbers first, or is cut.
    as_read = config.quantization is None and not config.fast_norm and config.tensor_parallel_size == 1
    panels = as_read and _multiplies_panels(config, spec, jnp.dtype(dtype))
    layout: Layout = "panels" if panels else "rows" if as_read else "rows apart"
    params = load_params(files, spec, jnp.dtype(dtype), progress=progress, layout=layout, placement=placement)
    params = prepared(params, spec, config)
    return LoadedModel(name=files.name, spec=spec, params=params, tokenizer=tokenizer, sampling_defaults=defaults)


def _held(model: HeldModel, config: EngineConfig, placement: Placement | None) -> LoadedModel:
    params = held_params(model.spec, model.params, placement)
    dtype = params["embed"]["embedding"].dtype
    if config.dtype not in ("auto", dtype.name):
        raise ModelError(f"the params are {dtype.name}, and dtype asks for {config.dtype}: leave it out")
    params = prepared(params, model.spec, config)
    tokenizer = no_tokenizer(model.spec) if model.tokenizer is None else model.tokenizer
    return LoadedModel(name=model.name, spec=model.spec, params=params, tokenizer=tokenizer, sampling_defaults={})


def prepared(params: Params, spec: ModelSpec, config: EngineConfig) -> Params:
    """Parameters in the form that the engine computes with; those that have it already stay as they are.

    Raises:
        ConfigError: they are in the form that the native CPU kernels compute with, and the engine takes another.
    """
    dtype = params["embed"]["embedding"].dtype
    multiplies_panels = _multiplies_panels(config, spec, dtype)
    if are_panels(params):
        _check_panels(params, config, multiplies_panels)
        return params
    if config.quantization is not None:
        params = quantize(params)
    if config.fast_norm:
        params = fold_norms(params)
    return in_panels(params) if multiplies_panels else params


def _check_panels(params: Params, config: EngineConfig, multiplies_panels: bool) -> None:
    """Raise ConfigError where parameters in panels can't be computed with as they are: rows are what they come from."""
    param = None if multiplies_panels else "backend"
    if config.quantization is not None and "scale" not in params["layers"]["qkv"]:
        param = "quantization"
    if param is not None:
        raise ConfigError(
            f"the weights are in panels for the native CPU kernels, and {param} {getattr(config, param)!r} takes them "
            "as they were before",
            param=param,
        )


def _multiplies_panels(config: EngineConfig, spec: ModelSpec, dtype: jnp.dtype) -> bool:
    """Whether the native kernels will run the model."""
    return _native_usable(config) and native.why_not(spec, dtype) is None


def _native_usable(config: EngineConfig) -> bool:
    return config.tensor_parallel_size == 1 and native.usable(config.backend)


def default_dtype(platform: str, *, native: bool) -> Literal["float32", "bfloat16"]:
    """What dtype "auto" means: bfloat16 on GPUs, under the native CPU kernels (which read half the bytes for the same
    products) and on CPUs that multiply it natively, else float32.

    Arguments:
        platform: ``jax.default_backend()``: "cpu", "gpu", ...
        native: the native kernels will run the model.
    """
    if platform != "cpu" or native:
        return "bfloat16"
    cpuinfo = Path("/proc/cpuinfo")  # not on macOS and Windows, whose x86 CPUs rarely have the instructions
    return "bfloat16" if cpuinfo.is_file() and "avx512_bf16" in cpuinfo.read_text().split() else "float32"


def load_params(
    files: ModelFiles,
    spec: ModelSpec,
    dtype: jnp.dtype,
    *,
    progress: bool = False,
    layout: Layout = "rows",
    placement: Placement | None = None,
) -> Params:
    """Read the weights into a nested dict of arrays, one parameter at a time.

    Arguments:
        files: where they are.
        spec: what must be there.
        dtype: dtype of the result; norm scales are float32 whatever it is.
        progress: show a bar, after a second.
        layout: "rows" are as the decoder has them. On a CPU they lie in one piece of memory that stays as long as one
            of the arrays does; "rows apart" don't, where some are to be replaced. "panels": in the layout of the
            native kernels, as :func:`jaxcb.weights.panels.in_panels` has it.
        placement: the devices that they go to; None: the default device.

    Raises:
        ModelError: a file is damaged, or a tensor is missing or has the wrong shape.
    """
    if files.format == "orbax":
        from jaxcb.weights import checkpoint

        restored = checkpoint.restore(files.directory, spec, dtype, placement)
        return in_panels(restored) if layout == "panels" else restored
    source = SafetensorsSource(files.directory)
    parameters = list(families.parameters(spec, source.names))
    shown = tqdm(parameters, desc="loading", unit="array", delay=1, disable=not progress)
    if layout == "panels":
        params = _read_panels(shown, source, parameters, dtype, placement, tied=spec.tie_word_embeddings)
    else:
        place = placer(spec, placement)
        room: Room = functools.partial(np.empty, dtype=dtype)
        if layout == "rows" and jax.default_backend() == "cpu":  # which computes with weights where they lie
            room = Arena([parameter.shape for parameter in parameters if parameter.kind == "weight"], dtype).take
        params = {}
        for parameter in shown:
            insert(params, parameter.path, place(parameter.path, _assemble(parameter, source, room)))
    if unused := sorted(source.names - {tensor.name for parameter in parameters for tensor in parameter.sources}):
        logger.debug("%s: %d tensors are not used: %s", files.directory, len(unused), ", ".join(unused[:8]))
    return params


def _read_panels(
    shown: Iterable[families.Parameter],
    source: SafetensorsSource,
    parameters: Sequence[families.Parameter],
    dtype: jnp.dtype,
    placement: Placement | None,
    *,
    tied: bool,
) -> Params:
    looked_up = [] if tied else [("embed", "embedding")]
    rows = {p.path: (p.shape, dtype if p.kind == "weight" else np.dtype("float32")) for p in parameters}
    panels = Panels(rows, owned=looked_up)
    for parameter in shown:
        room = panels.room if parameter.path in looked_up else np.empty
        panels.put(parameter.path, _assemble(parameter, source, functools.partial(room, dtype=dtype)))
    return panels.params(None if placement is None else placement.whole)


def _assemble(parameter: families.Parameter, source: SafetensorsSource, room: Room) -> np.ndarray:
    """One parameter as the decoder wants it: fused, and in the right dtype; ``room`` gives an array to fill."""
    if parameter.kind == "scale":
        return source.read(parameter.sources[0]).astype(np.float32)
    result = room(parameter.shape)
    rows, start = result.reshape(-1, *parameter.sources[0].shape[1:]), 0
    for tensor in parameter.sources:
        end = start + tensor.shape[0]
        rows[start:end] = source.read(tensor)
        start = end
    return result
