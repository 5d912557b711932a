from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.clients.bench_stats import RequestRecord, summarize
from headrace.clients.plots import PlotError, draw_bench, require_plots


def record(number: int, error: str | None = None) -> RequestRecord:
    """A request that took two seconds."""
    arrivals = [(number + 1.0, 1), (number + 1.5, 2)]
    return RequestRecord(number, 3, float(number), float(number), 5, arrivals, number + 2.0, error)


def test_a_run_is_drawn_in_both_formats(tmp_path: Path) -> None:
    records = [record(number) for number in range(4)]
    paths = [tmp_path / "run.png", tmp_path / "run.svg"]
    draw_bench(records, summarize(records), "the title", paths)
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    svg = paths[1].read_text()
    assert svg.startswith("<?xml")
    assert svg.rstrip().endswith("</svg>")


def test_nothing_complete_is_nothing_to_draw(tmp_path: Path) -> None:
    failed = [record(0, "INTERNAL")]
    with pytest.raises(PlotError, match="nothing to draw"):
        draw_bench(failed, summarize(failed), "x", [tmp_path / "run.png"])


def test_a_file_of_another_kind_is_refused_before_the_measurement() -> None:
    with pytest.raises(PlotError, match=r"x\.pdf: pictures are \.png or \.svg"):
        require_plots([Path("x.pdf")])


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # What find_spec sees of a package that is not installed.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PlotError, match=r"pip install 'headrace\[bench\]'"):
        require_plots([Path("x.png")])
    require_plots([])
