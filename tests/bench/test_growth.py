import pytest

from bench.growth import Cell, _table, fitted_ms, measure


def test_linear_costs_are_fitted_exactly_and_a_bend_is_seen():
    cells = [Cell(n, context, 5 + 0.5 * n + 0.001 * n * context) for n in (1, 8, 64) for context in (128, 2048)]
    assert fitted_ms(cells) == pytest.approx([cell.ms for cell in cells])
    bent = [*cells[:-1], cells[-1]._replace(ms=3 * cells[-1].ms)]
    assert bent[-1].ms / fitted_ms(bent)[-1] > 1.5


def test_cells_that_fit_are_measured(process):
    cells = measure(process, (20, 100, 4096), 2, progress=False)
    assert [(cell.sequences, cell.context) for cell in cells] == [(1, 20), (1, 100), (2, 20), (2, 100)]
    assert all(cell.ms > 0 for cell in cells)


def test_what_was_not_measured_is_a_dash():
    text = _table([Cell(1, 128, 10.0), Cell(4, 128, 11.0), Cell(1, 512, 12.0)], [10.0, 22.0, 12.0])
    assert "| 1         | 10.0 (1.00) | 12.0 (1.00) |" in text
    assert "| 4         | 11.0 (0.50) |           - |" in text
