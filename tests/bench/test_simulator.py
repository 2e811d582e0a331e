import json

from bench import simulator


def test_it_counts_what_a_run_simulated(capsys, tmp_path):
    simulator.main(["--num-requests", "3", "--json", str(tmp_path / "out.json")])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| long", "| mixed"))]
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert len(rows) == len(runs) == 2
    assert runs[0]["output_tokens"] == 3 * 1000 and runs[0]["step_tokens"] == 3 * (100 + 999)
    assert 0 < runs[0]["running"] <= 3 and all(run["cpu_s"] > 0 for run in runs)
