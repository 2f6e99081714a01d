"""docs/nodes.md says what sending a token once to each rank of a node is predicted to take."""

import re
from pathlib import Path

import pytest

from benchmarks.planner.once_per_rank import PROFILES, predict

PAGE = (Path(__file__).parents[2] / "docs" / "nodes.md").read_text()


@pytest.mark.slow
def test_a_token_once_to_each_rank_of_a_node_is_nowhere_worth_a_hundredth():
    table = {
        name: [float(cell) for cell in cells.split("|")]
        for name, cells in re.findall(r"^\| (\w+) \| ([\d. |]+) \|$", PAGE, re.MULTILINE)
        if name in PROFILES
    }
    for one in predict():
        best = min(one.flat_us.values())
        shown = [one.flat_us[1], best]
        for nodes in ("exact", "rounded"):
            shown += [one.hops_us[nodes], one.least_us[nodes]]
            assert one.least_us[nodes] > 0.99 * best
            assert one.hops_us[nodes] > best
        assert table.pop(one.profile) == pytest.approx([us / 1e3 for us in shown], abs=0.0051)
    assert not table
