from __future__ import annotations

import json

from bench import grammar
from bench.inprocess import InProcess


def test_the_command_compares_steps_with_and_without_a_grammar(process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(InProcess, "load", lambda config: process)
    flags = ["--sequences", "2", "--rounds", "2", "--steps", "4", "--json", str(tmp_path / "g.json")]
    result = grammar.main(flags)
    assert json.loads((tmp_path / "g.json").read_text()) == result
    assert result["free_ms"] > 0 and result["constrained_tok_s"] > 0 and 0.01 < result["times"] < 100
    assert "constrained" in capsys.readouterr().out
