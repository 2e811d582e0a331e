"""The kernel bench runs dry on a CPU, and counts bytes and FLOPs as by hand."""

from __future__ import annotations

import json

import pytest

from bench.kernel_cases import Shape
from bench.kernels import main


def test_bytes_and_flops():
    shape = Shape(((1, 10), (3, 5)), 4, 2, 8)
    assert shape.kv_bytes == (10 + 5) * 2 * 8 * 2 * 2
    assert shape.flops == 2 * 2 * (10 + 3 + 4 + 5) * 4 * 8
    assert not shape.decode_only and Shape(((1, 10),), 4, 2, 8).decode_only


@pytest.mark.slow
def test_dry_run(tmp_path, capsys):
    main(["--dry", "--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")])
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["dry"] and max(check["error"] for check in result["checks"]) < 1e-2
    assert [row["case"] for row in result["timed"]] == ["decode 2 x 100", "prefill 1 x 64"]
    assert "| of copy |" in (tmp_path / "out.md").read_text()
    assert all("us" in rows[0] for rows in result["sweep"])
