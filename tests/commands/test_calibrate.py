"""`megamoe calibrate` writes a profile that loads, and says what was measured where."""

import tomllib

import pytest

from moe_compile.cli import main
from moe_compile.hardware import PROFILES, load_profile
from moe_compile.hardware.cluster import load_cluster
from moe_compile.hardware.measure import grouped_shares
from moe_compile.hardware.sourced_file import dump_sourced

MEASURED = ("matmul_tflops", "memory_gb_per_s", "op_overhead_us")


def test_a_processor_is_measured_and_its_link_stays(tmp_path, capsys):
    path = tmp_path / "new" / "mine.toml"
    assert main(["calibrate", str(path), "--device", "cpu"]) == 0
    assert "megamoe check" in capsys.readouterr().out  # measures links
    profile, start = load_profile(str(path)), load_profile("cpu")
    assert profile.name == "mine"
    for rate, origin in profile.origins.items():
        assert origin.startswith("measured: 20") is (rate in MEASURED)
        if rate not in MEASURED:
            assert (getattr(profile, rate), origin) == (getattr(start, rate), start.origins[rate])
    assert 1e-3 < profile.matmul_tflops < 100 and 0.1 < profile.memory_gb_per_s < 1e4
    assert 0.01 < profile.op_overhead_us < 1e3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.toml", "--device", "cpu", "--start", "h100"], "--start is h100, but the rates"),
        (["mine", "--device", "cpu"], "ends in .toml"),
        (["/proc/mine.toml", "--device", "cpu"], "no file can be written in /proc"),
        (["mine.toml", "--device", "cpu", "--start", "h10"], "Did you mean 'h100'"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments, message, capsys):
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_profile_that_is_there_stays(tmp_path, capsys):
    """It was overwritten without a word."""
    path = tmp_path / "mine.toml"
    path.write_text("name = 'mine'")
    assert main(["calibrate", str(path), "--device", "cpu"]) == 2
    assert "mine.toml exists already" in capsys.readouterr().err
    assert path.read_text() == "name = 'mine'"


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_profile_is_written_as_it_was_read(path):
    table = tomllib.loads(path.read_text())
    assert tomllib.loads(dump_sourced(table)) == table


def test_grouped_products_are_measured_forward_and_for_weights():
    for is_gradient in (False, True):
        shares = grouped_shares("cpu", (16, 64), 100.0, is_gradient=is_gradient)
        assert [rows for rows, _ in shares] == [16, 64]
        assert all(0 < share < 1 for _, share in shares)


@pytest.mark.gpu
def test_a_gpu_is_measured_with_its_curves(tmp_path):
    path = tmp_path / "mine.toml"
    assert main(["calibrate", str(path)]) == 0
    cluster = load_cluster(str(path))
    assert 0.3 < cluster.compute.gemm_share <= 1 and 0.5 < cluster.memory.share <= 1
    forward, gradient = cluster.compute.grouped_forward, cluster.compute.grouped_weight_gradient
    assert forward.at(64) < forward.at(2048) and gradient.at(64) < gradient.at(2048)
    assert cluster.fits == {}
