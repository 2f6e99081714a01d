"""torchtitan jobs whose rows travel in eight bits."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.config import MegaMoEConfig
from moe_compile.ops.wire_format import row_bytes
from tests.integration.titan_jobs import OURS, train
from torchtitan_integration.metrics import bytes_of_routed_row

WIRES = {"megamoe.dispatch_wire": "fp8", "megamoe.combine_wire": "fp8"}
CHECKPOINTED = {"activation_checkpoint.mode": "full"}


def assert_close(ours, plain, relative):
    assert set(ours.steps) == set(plain.steps)
    for step, (loss, _) in ours.steps.items():
        assert float(loss) == pytest.approx(float(plain.steps[step][0]), rel=relative)


@pytest.mark.slow
def test_losses_are_close_to_those_of_unquantised_rows(two_ranks, tmp_path):
    plain = train(two_ranks, 2, tmp_path / "plain", OURS)
    ours = train(two_ranks, 2, tmp_path / "ours", OURS, WIRES)
    for mine, theirs in zip(ours, plain, strict=True):
        assert set(mine.verdicts) == {"chunked"}
        assert_close(mine, theirs, 5e-3)
        assert mine.steps != theirs.steps
        assert mine.placements == theirs.placements


@pytest.mark.slow
def test_checkpointed_blocks_exchange_once_and_lose_no_more(two_ranks, tmp_path):
    plain = train(two_ranks, 2, tmp_path / "plain", OURS, WIRES)
    ours = train(two_ranks, 2, tmp_path / "ours", OURS, WIRES, CHECKPOINTED)
    assert ours[0].steps == plain[0].steps


@pytest.mark.parametrize(
    ("dispatch", "combine", "quantized"),
    [("same", "same", 0), ("fp8", "same", 2), ("fp8_forward", "fp8", 3), ("fp8", "fp8", 4)],
)
def test_the_metric_counts_each_way_in_its_own_format(dispatch, combine, quantized):
    options = MegaMoEConfig(dispatch_wire=dispatch, combine_wire=combine)
    expected = quantized * row_bytes(512) + (4 - quantized) * 512 * 2
    assert bytes_of_routed_row(512, 2, options) == expected
