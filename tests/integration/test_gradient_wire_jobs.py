"""torchtitan jobs whose gradients travel as bfloat16 train as those that send float32."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.errors import InvalidConfig
from tests.integration import reduce_scatter_spy
from tests.integration.titan_jobs import CONFIG, OURS, train
from torchtitan_integration.job_checks import checked_ranks
from torchtitan_integration.job_config import MegaMoE, compile_options, options_of
from torchtitan_integration.job_file import read_job

WIRE = {"megamoe.gradient_wire": "bf16_fp32_sum"}
FLAG = ["--megamoe.gradient_wire", "bf16_fp32_sum"]


@pytest.mark.slow
def test_losses_are_close_to_those_of_float32_gradients(plain_job, two_ranks, tmp_path):
    plain = plain_job.ranks
    assert plain_job.num_rounded == [0, 0]
    two_ranks.run(reduce_scatter_spy.watch)
    ours = train(two_ranks, 2, tmp_path / "ours", OURS, WIRE, renewed=False)
    assert two_ranks.run(reduce_scatter_spy.count) == [len(ours[0].gathered)] * 2
    assert set(ours[0].verdicts) == {"chunked"}
    for step, (loss, norm) in ours[0].steps.items():
        expected_loss, expected_norm = plain[0].steps[step]
        assert float(loss) == pytest.approx(float(expected_loss), rel=1e-3)
        assert float(norm) == pytest.approx(float(expected_norm), rel=1e-2)
    assert ours[0].steps[1][0] == plain[0].steps[1][0]  # no gradient has been used yet
    assert ours[0].steps != plain[0].steps


def test_the_option_comes_from_the_table_or_the_environment():
    table = SimpleNamespace(megamoe=MegaMoE(gradient_wire="bf16_fp32_sum"))
    assert options_of(table, {}).gradient_wire == "bf16_fp32_sum"
    variable = {"MEGAMOE_GRADIENT_WIRE": "bf16_fp32_sum"}
    assert options_of(SimpleNamespace(), variable).gradient_wire == "bf16_fp32_sum"
    assert options_of(SimpleNamespace(), {}).gradient_wire == "same"


def test_graphs_of_a_job_keep_the_reduce_scatters_of_tensor_parallelism():
    """FSDP2 reduces outside of them."""
    table = MegaMoE(gradient_wire="bf16_fp32_sum")
    assert compile_options(table, {})["megamoe.gradient_wire"] == "same"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--training.mixed_precision_reduce", "bfloat16"],
            'write training.mixed_precision_reduce = "float32"',
        ),
        (
            [
                "--parallelism.data_parallel_shard_degree=1",
                "--parallelism.expert_parallel_degree=1",
            ],
            'write megamoe.gradient_wire = "same"',
        ),
        (["--megamoe.gradient_wire", "bf16"], "write one of same, bf16_fp32_sum"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(monkeypatch, flags, message):
    with pytest.raises(InvalidConfig) as by_flag:
        checked_ranks(read_job(CONFIG, [*FLAG, *flags]), None, is_run=False)
    assert message in str(by_flag.value)
    assert checked_ranks(read_job(CONFIG, FLAG), None, is_run=False) == 2
    monkeypatch.setenv("MEGAMOE_GRADIENT_WIRE", "bf16_fp32_sum")
    with pytest.raises(InvalidConfig) as by_variable:
        checked_ranks(read_job(CONFIG, flags), None, is_run=False)
    assert message in str(by_variable.value)
