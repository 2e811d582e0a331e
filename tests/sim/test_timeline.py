from jaxcb.sim import TraceRequest, one_engine
from jaxcb.sim.timeline import Timeline
from tests.scheduler.fake_device import limits
from tests.sim.runs import MS


def draw(trace, max_steps=50, **changes):
    timeline = Timeline(max_steps)
    simulation = one_engine(limits(**changes), trace, MS, run_ahead=False, on_plan=timeline.add)
    while simulation.step():
        pass
    return timeline.text(simulation.result().requests).splitlines()


def test_chunks_and_decodes_of_requests_that_come_and_wait():
    trace = [TraceRequest(0.0, 20, 4), TraceRequest(0.0, 3, 2), TraceRequest(2.5e-3, 2, 3)]
    assert draw(trace, max_num_seqs=2) == [
        "step    1.....",
        "0 20+4  PPddd",
        "1 3+2   Pd",
        "2 2+3      Pdd",
    ]


def test_a_preempted_request_waits_and_computes_its_tokens_again_in_chunks():
    lines = draw(
        [TraceRequest(0.0, 3, 13)] * 2,
        max_num_batched_tokens=4,
        num_kv_pages=5,
        max_model_len=16,
        admission_watermark=0.0,
        enable_prefix_caching=False,
    )
    assert lines == [
        "step    1........10........20.",
        "0 3+13  Pdddddddddddd",
        "1 3+13  PPddddd......PPddddddd",
    ]


def test_the_picture_ends_at_its_last_column_and_says_so():
    lines = draw([TraceRequest(0.0, 4, 30)], max_steps=12)
    assert lines == ["step    1........10.", "0 4+30  Pddddddddddd", "and 18 more steps"]
