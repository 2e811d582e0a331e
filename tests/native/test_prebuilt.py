"""Libraries that came with a wheel: taken before anything is compiled, reported and left alone where they are bad."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxcb.cache import cache_dir
from pallas_kernels.native import build

pytestmark = pytest.mark.native
ROOT = Path(__file__).parents[2]


def installed(directory: Path) -> Path:
    """The packages as a wheel lays them out, in a directory of their own."""
    for name in ("jaxcb", "pallas_kernels"):
        leave_out = shutil.ignore_patterns("__pycache__", "prebuilt", "*.md")
        shutil.copytree(ROOT / name, directory / name, ignore=leave_out)
    return directory


def report(site: Path, tmp_path: Path, **environment: str) -> tuple[int, str]:
    """Of ``python -m jaxcb.native`` with an empty cache: status and output."""
    cache = tmp_path / "cache"
    settings = {"PYTHONPATH": str(site), "JAXCB_CACHE": str(cache), "JAX_PLATFORMS": "cpu", "JAXCB_BACKEND": ""}
    command = [sys.executable, "-m", "jaxcb.native"]
    environment = {**os.environ, **settings, **environment}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300)
    return ran.returncode, ran.stdout + ran.stderr


@pytest.fixture
def carried(tmp_path, library) -> tuple[Path, Path]:
    """An install whose kernels are there already, and the file."""
    site = installed(tmp_path / "site")
    of_cache = build.library(cache_dir() / "native", library.variant)
    name = build.library(Path(), library.variant, version="")
    file = site / "pallas_kernels" / "native" / "prebuilt" / name
    file.parent.mkdir(parents=True)
    shutil.copy(of_cache, file)
    return site, file


def test_a_library_that_came_with_the_package_is_used(carried, tmp_path):
    site, file = carried
    status, text = report(site, tmp_path, CXX="/no/compiler")
    assert (status, f"{file}, prebuilt" in text) == (0, True), text
    assert not (tmp_path / "cache" / "native").exists(), "nothing is compiled"


def test_one_that_can_not_be_loaded_is_reported_and_not_used(carried, tmp_path):
    site, file = carried
    file.write_bytes(b"\x7fELF of another machine")
    status, text = report(site, tmp_path, CXX="/no/compiler")
    assert status == 1
    assert f"{file} can't be loaded" in text and "no C++ compiler" in text


def test_one_of_other_handlers_is_reported_and_not_used(carried, tmp_path):
    site, file = carried
    source = tmp_path / "empty.cc"
    source.write_text('extern "C" int jaxcb_product() { return 0; }\n')
    subprocess.run([str(build.compiler()), "-shared", "-fPIC", str(source), "-o", str(file)], check=True)
    status, text = report(site, tmp_path, CXX="/no/compiler")
    assert status == 1 and f"{file} can't be loaded" in text, text


@pytest.mark.slow
@pytest.mark.network  # what the build requires
def test_a_wheel_carries_every_variant_and_an_install_of_it_compiles_nothing(tmp_path):
    pytest.importorskip("pip")
    source, wheels, site = tmp_path / "source", tmp_path / "wheels", tmp_path / "site"
    tracked = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("needs the repository")
    for name in tracked.stdout.splitlines():
        if name.startswith(("jaxcb/", "pallas_kernels/", "bench/")) or "/" not in name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(wheels), str(source)], check=True)
    (wheel,) = wheels.iterdir()
    assert wheel.name.startswith("jaxcb-") and "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names = [name.split("/")[-2].split("-")[0] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert sorted(names) == sorted(build.variants_of(os.uname().machine))
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)], check=True)
    status, text = report(site, tmp_path, CXX="/no/compiler")
    assert (status, "prebuilt" in text) == (0, True), text
    assert not (tmp_path / "cache" / "native").exists()
