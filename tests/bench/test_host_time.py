import json

from bench.host_time import PARTS, main
from bench.inprocess import InProcess


def test_every_part_of_a_step_is_timed(process, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(InProcess, "load", lambda config: process)
    main(["--steps", "3", "--json", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["running"] for row in rows] == [1]
    assert all(rows[0][f"{part}_us"] > 0 for part in PARTS)
    assert rows[0]["us"]["median"] >= max(rows[0][f"{part}_us"] for part in PARTS)
    assert "launch us" in capsys.readouterr().out
    assert "launch" not in vars(process.runner), "the runner is as it was"


def test_a_small_model_shows_what_the_host_does_by_itself(tmp_path, capsys):
    flags = ["--max-num-seqs", "1", "--max-num-batched-tokens", "16", "--max-model-len", "64", "--num-kv-pages", "8"]
    main(["--small", "--steps", "3", "--json", str(tmp_path / "out.json"), *flags])
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["machine"]["model"] == "small"
    assert [row["running"] for row in result["rows"]] == [1] and result["rows"][0]["launch_us"] > 0
