import json
import os
from pathlib import Path

import pytest

from bench import startup
from bench.startup import COMPILED, main
from jaxcb.cache import cache_dir


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """Which entries each start found in its cache; nothing is started."""
    monkeypatch.setenv("JAXCB_CACHE", str(tmp_path / "cache"))
    for name in ("model", *COMPILED):
        (tmp_path / "cache" / name).mkdir(parents=True)
    found = []

    def measure(flags):
        found.append({path.name for path in cache_dir().iterdir()})
        return {"ready_s": float(len(found)), "first_token_s": 0.25}

    monkeypatch.setattr(startup, "measure", measure)
    return found


def test_a_cold_start_finds_the_model_and_nothing_compiled(starts, tmp_path, capsys):
    main(["--rounds", "2", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    everything = {"model", *COMPILED}
    assert starts == [everything, {"model"}, everything, everything]
    assert Path(os.environ["JAXCB_CACHE"]) == tmp_path / "cache"
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["spread"]["cold"]["ready_s"]["median"] == 2.0
    assert result["spread"]["warm"]["ready_s"]["median"] == 3.5
    assert "| warm  |             3.50 |" in capsys.readouterr().out
