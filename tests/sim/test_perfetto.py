import itertools
import json
from collections import defaultdict

from jaxcb.sim import TraceRequest, one_engine
from jaxcb.sim.perfetto import PerfettoTrace
from tests.scheduler.fake_device import limits
from tests.sim.runs import MS


def written(tmp_path, trace, *, replicas=1, run_ahead=False, **changes):
    perfetto = PerfettoTrace()
    for replica in range(replicas):
        on_plan = lambda *step, replica=replica: perfetto.add(replica, *step)  # noqa: E731  # it is short
        simulation = one_engine(limits(**changes), trace, MS, run_ahead=run_ahead, on_plan=on_plan)
        while simulation.step():
            pass
    perfetto.write(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_the_file_keeps_to_the_trace_event_format(tmp_path):
    """What "Trace Event Format" (Google, 2016) asks of each kind of event; more requests than places, so that slots
    change hands, under a pool that is too small for them."""
    trace = [TraceRequest(1e-3 * i, 5 + i, 12) for i in range(9)]
    events = written(tmp_path, trace, replicas=2, run_ahead=True, num_kv_pages=8, page_size=8, max_model_len=64)
    phases = defaultdict(list)
    for event in events:
        phases[event["ph"]].append(event)
        assert isinstance(event["name"], str) and event["name"]
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] == "M" or (isinstance(event["ts"], float) and event["ts"] >= 0)
    assert set(phases) == {"X", "C", "M", "b", "e"}

    tracks = defaultdict(list)
    for event in phases["X"]:
        tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        assert all(event["dur"] > 0 for event in slices)
        for before, after in itertools.pairwise(slices):
            assert after["ts"] >= before["ts"] + before["dur"] - 0.1, "slices of a track follow on each other"

    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in phases["M"] if e["name"] == "thread_name"}
    assert names == {(pid, tid): "steps" if tid == 0 else f"slot {tid - 1}" for pid, tid in tracks}
    assert {e["pid"]: e["args"]["name"] for e in phases["M"] if e["name"] == "process_name"} == {
        0: "engine 0",
        1: "engine 1",
    }
    assert {e["name"] for e in phases["M"]} == {"thread_name", "process_name", "thread_sort_index"}

    for name in ("tokens", "sequences"):
        for pid in (0, 1):
            counts = [e for e in phases["C"] if (e["pid"], e["name"]) == (pid, name)]
            times = [e["ts"] for e in counts]
            assert times == sorted(times) and all(e["args"][name] > 0 for e in counts)

    begun = {(e["cat"], e["pid"], e["id"]): e["ts"] for e in phases["b"]}
    ended = {(e["cat"], e["pid"], e["id"]): e["ts"] for e in phases["e"]}
    assert begun.keys() == ended.keys() and len(begun) == len(phases["b"]) == 2 * len(trace)
    assert all(begun[key] <= ended[key] for key in begun)


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
