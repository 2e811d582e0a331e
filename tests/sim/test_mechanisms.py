"""Each idea in its direction, with the multiple that this simulator measures: `python -m jaxcb.sim mechanisms`."""

import pytest

from jaxcb.sim import mechanisms
from jaxcb.sim.__main__ import main


@pytest.mark.parametrize(
    ("mechanism", "measured"),
    [
        (mechanisms.iteration_level, 3.48),
        (mechanisms.paged, 3.49),
        (mechanisms.chunked_prefill, 16.5),
        (mechanisms.disaggregation, 3.61),
        (mechanisms.early_rejection, 5.04),
        (mechanisms.prefix_aware, 1.42),
        (mechanisms.shortest_first, 4.92),
        (mechanisms.watermark, 7.21),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_the_idea_helps_by_the_measured_multiple(mechanism, measured):
    effect = mechanism()
    print(effect)
    assert effect.multiple > 1
    assert effect.multiple == pytest.approx(measured, rel=0.15)


def test_every_mechanism_of_the_list_is_printed(capsys, monkeypatch):
    shown = (mechanisms.chunked_prefill, mechanisms.watermark)
    monkeypatch.setattr("jaxcb.sim.commands.MECHANISMS", shown)
    assert main(["mechanisms"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("chunked prefill beside decodes") and lines[1].endswith("x") and len(lines) == 3
    assert len(mechanisms.MECHANISMS) == 8
