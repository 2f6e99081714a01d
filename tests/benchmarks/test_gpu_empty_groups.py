"""The check of groups without rows passes on a processor, and fails where memory is not written."""

import pytest
import torch

from benchmarks.gpu import empty_groups
from benchmarks.gpu.sizes import SMOKE
from tests.benchmarks.sections import failures


def test_products_of_groups_without_rows_are_right_here(record):
    empty_groups.check_empty_groups(record, SMOKE)
    assert failures(record) == []
    assert len(record.data["rows"]) == 2


@pytest.mark.parametrize(
    ("place", "what"),
    [(2, "groups without rows"), (1, "rows behind the last offset: input")],
)
def test_memory_that_no_product_wrote_fails(record, monkeypatch, place, what):
    """As on a GPU that leaves the gradients of groups without rows, or of rows, unwritten."""
    right = empty_groups.products

    def wrong(rows, weights, grad, ends):
        found = right(rows, weights, grad, ends)
        has_rows_behind = len(rows) > int(ends[-1])
        if place == 2:
            found[2][1] = torch.nan
        elif has_rows_behind:
            found[1][:1] = torch.nan
        return found

    monkeypatch.setattr(empty_groups, "products", wrong)
    empty_groups.check_empty_groups(record, SMOKE)
    assert f"some empty, {what}" in failures(record)
