from __future__ import annotations

import json

from bench import determinism
from bench.inprocess import InProcess


def test_the_command_compares_every_bucket(process, monkeypatch, tmp_path, capsys):
    """Both engines are the same one here, so that a test compiles nothing more."""
    asked = []
    monkeypatch.setattr(InProcess, "load", lambda config: asked.append(config.deterministic) or process)
    flags = ["--rounds", "2", "--steps", "2", "--context", "24", "--json", str(tmp_path / "d.json")]
    result = determinism.main(flags)
    assert asked == [False, True]
    assert json.loads((tmp_path / "d.json").read_text()) == result
    assert [row["bucket"] for row in result["rows"]] == ["decode 1", "decode 2", "mixed 16"]
    for row in result["rows"]:
        assert 0.05 < row["greedy"]["times"] < 20 and row["sampled"]["deterministic_ms"] > 0
    assert "deterministic" in capsys.readouterr().out
