from __future__ import annotations

import json

from bench import detokenizer
from bench.inprocess import InProcess


def test_the_command_prints_steps_with_text_and_without(process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(InProcess, "load", lambda config: process)
    result = detokenizer.main(["--rounds", "2", "--steps", "3", "--json", str(tmp_path / "d.json")])
    assert json.loads((tmp_path / "d.json").read_text()) == result
    step = result["step"]
    assert min(step["ids_only_ms"], step["with_text_ms"], step["ratio"], result["token_us"]) > 0
    assert [row["ids"] for row in result["undecodable"]] == [500, 1000, 2000, 4000]
    assert "with text over ids only" in capsys.readouterr().out
