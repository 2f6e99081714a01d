"""Profiles load only with the origin of every number, and say what is wrong with them."""

import dataclasses
import re
import tomllib

import pytest

from moe_compile.errors import InvalidConfig
from moe_compile.hardware import PROFILES, HardwareProfile, load_profile
from moe_compile.hardware.cluster import load_cluster
from moe_compile.hardware.detect import CHIPS
from moe_compile.hardware.links import NUMBERS
from moe_compile.hardware.products import Curve
from moe_compile.hardware.profile import NO_HOST, RATES

SHIPPED = sorted(PROFILES.glob("*.toml"))
CLUSTERS = ("h100", "h200", "h800", "h20", "b200", "gb200", "a100")
SLOWDOWNS = ("contention", "overlap_slowdown")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_profile_loads(path):
    assert load_profile(path.stem).name == path.stem
    assert load_profile(str(path)) == load_profile(path.stem)
    profile = load_profile(path.stem)
    assert set(profile.origins) == set(RATES)
    links = [] if path.stem == "cpu" else [profile.node, profile.network]
    assert all(set(link.origins) == set(NUMBERS) for link in links)


def test_all_profiles_ordered_are_shipped():
    assert {path.stem for path in SHIPPED} == {"cpu", *CLUSTERS}
    assert set(CHIPS) == set(CLUSTERS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_gpu_profile_describes_a_cluster(name):
    cluster = load_cluster(name)
    assert cluster.nvlink.gb_per_s > cluster.network.gb_per_s > 0
    assert 0 < cluster.compute.grouped_weight_gradient.at(768) < cluster.compute.gemm_share


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_the_compiler_and_the_simulator_read_the_same_slowdowns(path):
    profile, links = load_profile(path.stem), tomllib.loads(path.read_text()).get("link", ())
    num_sms = tomllib.loads(path.read_text()).get("compute", {}).get("num_sms", {}).get("value")
    stated = {
        link["name"]: [
            num_sms / (num_sms - link["ctas"]["value"]) - 1,
            link["overlap_slowdown"]["value"],
        ]
        for link in links
    }
    for name, num_ranks in (("nvlink", 8), ("network", 128)):
        link = profile.link_of(num_ranks)
        found = [getattr(link, key) for key in SLOWDOWNS]
        assert found == stated.get(name, [0.0, 0.0])
        if links:
            assert found == [getattr(getattr(load_cluster(path.stem), name), k) for k in SLOWDOWNS]


def test_a_gpu_has_a_host_beside_it_whose_costs_are_stated_whole(tmp_path):
    hosts = {load_profile(name).host for name in CLUSTERS}
    assert len(hosts) == 1 and NO_HOST not in hosts and load_profile("cpu").host == NO_HOST
    lines = (PROFILES / "h100.toml").read_text().splitlines()
    path = tmp_path / "h100.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith("read_us")))
    with pytest.raises(
        InvalidConfig, match=r"table host must have exactly .*unknown: \['read_us'\]"
    ):
        load_profile(str(path))


def test_the_link_to_the_host_is_stated_whole_or_not_at_all(tmp_path):
    assert load_profile("h100").host_link.copy_us(52e9) == pytest.approx(1e6 + 15.0)
    assert load_profile("gb200").host_link.gb_per_s > load_profile("h100").host_link.gb_per_s
    text, path = (PROFILES / "h100.toml").read_text(), tmp_path / "h100.toml"
    head, _, tail = text.partition("[host_link]\n")
    rate, latency, rest = tail.split("\n", 2)
    path.write_text(head + rest)
    assert load_profile(str(path)).host_link is None
    for line in (rate, latency):
        path.write_text(f"{head}[host_link]\n{line}\n{rest}")
        with pytest.raises(InvalidConfig, match="table host_link must have"):
            load_profile(str(path))
    path.write_text(f"{head}[host_link]\n{rate.replace('52.0', '0.0')}\n{latency}\n{rest}")
    with pytest.raises(InvalidConfig, match="with a rate above 0"):
        load_profile(str(path))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_a_profile_without_one_of_its_origins_does_not_load(path, tmp_path):
    """Strip every origin in turn, wherever it stands in the file."""
    text = path.read_text()
    origins = [match.span() for match in re.finditer(r', origin = "[^"]*"', text)]
    assert len(origins) == text.count("value = ")
    for number, (start, end) in enumerate(origins):
        stripped = tmp_path / f"{number}.toml"
        stripped.write_text(text[:start] + text[end:])
        tomllib.loads(stripped.read_text())
        with pytest.raises(InvalidConfig, match="origin is None; write one of measured"):
            load_profile(str(stripped))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("matmul_tflops = 1.0", "matmul_tflops = 1.0 has no origin; write"),
        ('matmul_tflops = { value = 1.0, origin = "" }', "write one of measured, datasheet"),
        ('matmul_tflops = { value = 1.0, origin = "mesured: x" }', "Did you mean 'measured'"),
        ('matmul_tflops = { value = 1.0, origin = "measured: fast" }', "the day and the machine"),
        ('matmul_tflops = { value = 1.0, origin = "fitted: yes" }', "what it was fitted on"),
        ('matmul_tflops = { value = 1.0, unit = "T", origin = "assumed: x" }', "has \\['unit'\\]"),
        ('matmul_tflops = { value = 1.0, origin = "assumed: x" }', "memory_gb_per_s"),
        ("matmul_tflops = ", "is not TOML"),
    ],
)
def test_a_wrong_profile_says_what_to_write(line, message, tmp_path):
    path = tmp_path / "slow.toml"
    path.write_text(f'name = "slow"\n{line}\n')
    with pytest.raises(InvalidConfig, match=message):
        load_profile(str(path))


def test_a_profile_from_before_a_number_of_links_says_what_to_write(tmp_path):
    lines = (PROFILES / "h100.toml").read_text().splitlines()
    path = tmp_path / "older.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith("overlap_slowdown")))
    with pytest.raises(
        InvalidConfig, match="nvlink must have overlap_slowdown, and has not; write its value"
    ):
        load_profile(str(path))
    with pytest.raises(InvalidConfig, match="overlap_slowdown"):
        load_cluster(str(path))


def test_contention_is_measured_or_follows_from_ctas(tmp_path):
    text, path = (PROFILES / "h100.toml").read_text(), tmp_path / "other.toml"
    assert load_profile("h100").node.origins["contention"].startswith("computed: num_sms (")
    (ctas,) = re.findall(r"^ctas = .*16.*$", text, re.MULTILINE)
    path.write_text(text.replace(ctas, 'contention = { value = 0.5, origin = "assumed: x" }'))
    assert (
        load_profile(str(path)).node.contention == load_cluster(str(path)).nvlink.contention == 0.5
    )
    path.write_text(text.replace(ctas, ctas.replace("16", "132")))
    with pytest.raises(
        InvalidConfig,
        match=r"nvlink has 132 ctas, but must have fewer than compute\.num_sms, which is 132",
    ):
        load_profile(str(path))


def test_an_unknown_profile_names_the_nearest():
    with pytest.raises(InvalidConfig, match="Did you mean 'h200'"):
        load_profile("h2000")


def test_a_profile_for_the_compiler_alone_is_no_cluster():
    with pytest.raises(InvalidConfig, match="name the profile of a GPU"):
        load_cluster("cpu")


def test_what_is_written_loads_again_with_its_origins(tmp_path):
    rates = dict.fromkeys(RATES, 2.5)
    origins = dict.fromkeys(RATES, 'measured: 2026-01-31 on a "box" \\ server')
    profile = HardwareProfile(name="box", origins=origins, **rates)
    path = tmp_path / "box.toml"
    path.write_text(profile.as_toml())
    assert load_profile(str(path)) == profile
    assert load_profile(str(path)).origins == origins
    with pytest.raises(InvalidConfig, match="memory_gb_per_s: origin is None"):
        HardwareProfile(name="box", origins={"matmul_tflops": "assumed: x"}, **rates).as_toml()


@pytest.mark.parametrize("name", ["h100", "h800", "cpu"])
def test_the_links_of_a_profile_are_written_as_they_are(tmp_path, name):
    profile, path = load_profile(name), tmp_path / "again.toml"
    for _ in range(2):
        path.write_text(profile.as_toml())
        again = load_profile(str(path))
        rounded = {rate: float(f"{getattr(profile, rate):.2g}") for rate in RATES}
        assert again == dataclasses.replace(profile, **rounded)
        assert again.origins == profile.origins
        for link in ("node", "network") if name != "cpu" else ():
            assert getattr(again, link).origins == getattr(profile, link).origins
        profile = again


def test_a_curve_is_straight_in_the_logarithm_and_proportional_below_it():
    curve = Curve(((64.0, 0.2), (256.0, 0.4)))
    assert curve.at(32) == pytest.approx(0.1)
    assert (curve.at(64), curve.at(128), curve.at(4096)) == pytest.approx((0.2, 0.3, 0.4))
    with pytest.raises(InvalidConfig, match="rising numbers of rows"):
        Curve(((256.0, 0.2), (64.0, 0.4)))
