import json

from jaxcb.sim import TraceRequest, one_engine
from jaxcb.sim.perfetto import PerfettoTrace
from tests.sim.runs import MS, limits


def written(tmp_path, trace, **changes):
    perfetto = PerfettoTrace()
    simulation = one_engine(limits(**changes), trace, MS, run_ahead=False, on_plan=lambda *step: perfetto.add(0, *step))
    while simulation.step():
        pass
    perfetto.write(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_steps_chunks_stretches_of_decodes_and_waits_have_their_rows(tmp_path):
    events = written(tmp_path, [TraceRequest(0.0, 20, 4), TraceRequest(0.5e-3, 3, 2)], max_num_seqs=2)
    slices = [(e["tid"], e["name"], round(e["ts"]), round(e["dur"])) for e in events if e["ph"] == "X"]
    assert [s for s in slices if s[0] == 0] == [
        (0, "mixed 16", 0, 1000),
        (0, "mixed 7", 1000, 1000),
        (0, "decode 2", 2000, 1000),
        (0, "decode 1", 3000, 1000),
        (0, "decode 1", 4000, 1000),
    ]
    by_request = sorted(s[1:] for s in slices if s[0] > 0)
    assert by_request == [
        ("0 P 16", 0, 1000),
        ("0 P 4", 1000, 1000),
        ("0 d 3", 2000, 3000),
        ("1 P 3", 1000, 1000),
        ("1 d 1", 2000, 1000),
    ]
    waits = [(e["ph"], e["id"], round(e["ts"])) for e in events if e["name"] == "waiting"]
    assert waits == [("b", "0", 0), ("e", "0", 0), ("b", "1", 500), ("e", "1", 1000)]


def test_a_pause_ends_a_stretch_of_decodes(tmp_path):
    events = written(tmp_path, [TraceRequest(0.0, 3, 3), TraceRequest(1.0, 3, 3)])
    decodes = [e["name"] for e in events if e["ph"] == "X" and " d " in e["name"]]
    assert decodes == ["0 d 2", "1 d 2"]
