"""The bench that the README's attach times come from measures what it says."""

import runpy
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "attach.py"


def test_a_figure_is_of_the_shard_that_was_asked_for() -> None:
    figure = runpy.run_path(str(BENCH))["measure"](16, 1 / 256, 2)
    assert (figure.tensors, figure.gib, figure.slabs) == (16, 1 / 256, 1)
    parts = figure.read_layout_ms + figure.map_ms + figure.assign_ms
    assert 0 < figure.total_ms < 2 * parts
