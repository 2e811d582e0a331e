import json

import pytest

from jaxcb.config import EngineConfig
from jaxcb.engine.trace import LANES, EngineTrace
from jaxcb.errors import ConfigError
from jaxcb.request import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.run import complete


def spans_of(file) -> dict[str, list[dict]]:
    """Spans by lane, in the order they were written."""
    events = json.loads(file.read_text())
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == list(LANES)
    lanes = {name: [] for name in LANES}
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            lanes[names[event["tid"]]].append(event)
    return lanes


@pytest.mark.parametrize("run_ahead", [True, False])
def test_every_step_has_a_span_in_each_lane(make_engine: MakeEngine, tmp_path, run_ahead):
    file = tmp_path / "trace.json"
    engine = make_engine(trace=file, run_ahead=run_ahead)
    complete(engine, [(1, 2, 3), (4, 5)], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    engine.shutdown()
    lanes = spans_of(file)
    assert [event["name"] for event in lanes["plan"]] == [f"plan {i}" for i in range(engine.stats().steps)]
    assert len(lanes["launch"]) == len(lanes["device"]) == len(lanes["commit"]) == len(lanes["plan"])
    assert [event["args"]["step"] for event in lanes["device"]] == list(range(engine.stats().steps))
    assert sum(event["args"]["tokens"] for event in lanes["text"]) >= 12
    ends = [event["ts"] + event["dur"] for event in lanes["device"]]
    overlaps = [
        launch["ts"] < end for launch, end in zip(lanes["launch"][1:], ends, strict=False)
    ]  # launch k + 1 begins before the device is done with k
    assert all(overlaps) if run_ahead else not any(overlaps)
    for before, after in zip(ends, lanes["device"][1:], strict=False):
        assert after["ts"] >= before - 0.01, "the device does one step at a time"


def test_the_trace_of_a_killed_process_lacks_only_its_end(tmp_path):
    file = tmp_path / "trace.json"
    trace = EngineTrace(file)
    trace.span("plan", "plan 0", 1.0, 1.5, sequences=3)
    trace._out.flush()
    spans = json.loads(file.read_text() + "]")
    assert spans[-1]["ts"] == 1e6 and spans[-1]["dur"] == 5e5 and spans[-1]["args"] == {"sequences": 3}
    trace.close()
    trace.span("plan", "too late", 2.0, 2.5)
    trace.close()
    assert json.loads(file.read_text()) == spans


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"trace: can't write .*no-such") as raised:
        EngineTrace(tmp_path / "no-such" / "trace.json")
    assert raised.value.param == "trace"
    with pytest.raises(ConfigError, match="trace must be a string"):
        EngineConfig(trace=3)
