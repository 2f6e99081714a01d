"""The computed times of products in eight bits are those of their formulas."""

import pytest

from benchmarks.gpu.product_roof import CLOCK_HZ, SHAPES, main, roof_us, tiles_us


def test_many_rows_are_bound_by_operations_and_few_by_bytes():
    assert roof_us(32768, 7168, 2048, 8) == pytest.approx(2e6 * 32768 * 7168 * 2048 / 1979e12)
    weights = 8 * 7168 * 2048
    assert roof_us(128, 7168, 2048, 8) == pytest.approx(1e6 * weights / 3.35e12, rel=0.02)


def test_a_wave_of_tiles_takes_its_blocks_cycles():
    """132 tiles of one block: each loads 32 KiB; one tile more is a wave more."""
    one_wave = tiles_us(128 * 132, 128, 128, 1)
    assert one_wave == pytest.approx(1e6 * 32768 * 132 / 5120 / CLOCK_HZ)
    assert tiles_us(128 * 132 + 1, 128, 128, 1) == pytest.approx(2 * one_wave)
    assert tiles_us(16, 128, 128, 16) == pytest.approx(one_wave)  # a row of a group has a tile


def test_it_says_that_nothing_was_measured(capsys):
    main()
    printed = capsys.readouterr().out
    assert "not measured" in printed and len(printed.splitlines()) == 1 + len(SHAPES)
