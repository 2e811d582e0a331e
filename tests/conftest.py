"""Fixtures that tests of several rooms share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.serve.process import ServerProcess

os.environ.setdefault("JAXCB_COMPILE_GUARD", "raise")  # for servers that tests start, too
if version("jax").startswith("0.10."):  # what the engine's programs are compiled with, for all that tests compile
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()

GOLDEN = Path(__file__).parent / "golden"


ENGINE_MAKERS = {"make_engine", "make_engines", "machine", "cores"}
"""Fixtures that compile."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests that share compiled engines, and skip what can't run here."""
    for item in items:
        if isinstance(item, pytest.Function) and ENGINE_MAKERS & set(item.fixturenames):
            backend = item.callspec.params.get("backend", "") if hasattr(item, "callspec") else ""
            group = f"{item.path.stem} {backend}".strip()  # one worker takes all of a file, or of a backend in it
            item.add_marker(pytest.mark.xdist_group(group))
    _skip_native(items)


def _skip_native(items: list[pytest.Item]) -> None:
    """Skip what needs the native kernels where they can't be had. Only then: a build that should work must work."""
    marked = [item for item in items if item.get_closest_marker("native")]
    if marked:
        from pallas_kernels.native.build import compiler, cpu_variants

        if not cpu_variants() or compiler() is None:
            skip = pytest.mark.skip(reason="no C++ compiler, or a CPU that the native kernels don't know")
            for item in marked:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def plugin() -> Path:
    """Folder of the CUDA plug-in, with which programs are compiled for a GPU without one. ``JAXCB_CUDA_PLUGIN`` names
    one that is there; the test is skipped where there is none and no registry has it."""
    from pallas_kernels.deviceless import NoPluginError, install_plugin

    named = os.environ.get("JAXCB_CUDA_PLUGIN")
    try:
        return install_plugin(Path(named) if named else None)
    except NoPluginError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    """Directory of the built-in model in the cache (JAXCB_CACHE); fetched when it isn't there."""
    from jaxcb.weights import resolve

    return resolve(None).directory


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """What transformers answers with the built-in model in float32: ids, texts, log-probabilities (tests/golden)."""
    return json.loads((GOLDEN / "smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(params=sorted(path.name for path in (GOLDEN / "tiny").iterdir()))
def tiny_model(request: pytest.FixtureRequest) -> Path:
    """Each of the small random checkpoints with stored logits (tests/golden/make_tiny.py)."""
    return GOLDEN / "tiny" / request.param


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the model that the real server serves."""
    from tests.serve.real_server import write_served_model

    return write_served_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def real_server(model_dir: Path) -> Iterator[ServerProcess]:
    """For tests that bear the mark ``SHARED`` of :mod:`tests.serve.real_server`."""
    from tests.serve.process import REAL, ServerProcess
    from tests.serve.real_server import FLAGS

    with ServerProcess(REAL, str(model_dir), *FLAGS) as server:
        yield server
