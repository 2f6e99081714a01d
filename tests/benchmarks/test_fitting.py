"""Fits of the constants that profiles carry."""

import dataclasses

import pytest

from benchmarks.paper import fitting
from moe_compile.simulator import checks
from moe_compile.simulator.setups import shipped


def test_fitting_again_gives_the_constants_the_profiles_carry():
    assert fitting.fit_bytedance() == shipped("h800").fit("bytedance")
    assert fitting.fit_eos() == shipped("h100").fit("eos")


@pytest.mark.slow
def test_a_fit_sees_only_the_rows_marked_for_it(monkeypatch):
    """Held-out rows may say anything; the constants stay."""
    before = fitting.fit_bytedance()
    wrong = [
        dataclasses.replace(
            row,
            megatron_s=row.megatron_s * (1 if row.megatron_is_fitted else 3),
            megascale_s=row.megascale_s * (1 if row.megascale_is_fitted else 3),
        )
        for row in checks.TABLE_3
    ]
    monkeypatch.setattr(checks, "TABLE_3", wrong)
    assert fitting.fit_bytedance() == before
    moved = [dataclasses.replace(row, megascale_s=row.megascale_s * 1.1) for row in wrong]
    monkeypatch.setattr(checks, "TABLE_3", moved)
    assert fitting.fit_bytedance() != before
