"""A GPU is planned with its own profile, with one that is said to be another's, or not at all."""

import logging
from types import SimpleNamespace

import pynvml
import pytest

from moe_compile.errors import InvalidConfig
from moe_compile.hardware import detect, load_profile
from moe_compile.hardware.detect import CHIPS, STANDS_IN, own_profile, profile_of_chip
from tests.hardware.test_devices import Library

GONE = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)


@pytest.fixture
def detected(monkeypatch):
    """Return what is detected by a library that stands in for NVML."""
    own_profile.cache_clear()

    def detected_by(library):
        monkeypatch.setattr(detect, "pynvml", library)
        return detect.detected_profile()

    yield detected_by
    own_profile.cache_clear()


@pytest.mark.parametrize(
    ("name", "generation", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", 9, "h100"),
        ("NVIDIA H200", 9, "h200"),
        ("NVIDIA H800", 9, "h800"),
        ("NVIDIA H20", 9, "h20"),
        ("NVIDIA H20-3e", 9, "h20"),
        ("NVIDIA B200", 10, "b200"),
        ("NVIDIA GB200", 10, "gb200"),
        ("NVIDIA A100-SXM4-80GB", 8, "a100"),
    ],
)
def test_a_gpu_that_a_profile_is_named_after_needs_no_warning(name, generation, profile):
    found = profile_of_chip(name, generation)
    assert (found.profile, found.warning) == (profile, "")


@pytest.mark.parametrize(
    ("name", "generation", "profile"),
    [
        ("NVIDIA GH200 480GB", 9, "h100"),  # once taken for an H200, whose name it ends in
        ("NVIDIA L40S", 8, "a100"),
        ("NVIDIA B300 SXM6 AC", 10, "b200"),
        ("NVIDIA GB300", 10, "b200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 12, "a100"),
        ("NVIDIA H100 PCIe", 9, "h100"),
        ("NVIDIA H100 NVL", 9, "h100"),
        ("NVIDIA A100-PCIE-40GB", 8, "a100"),
    ],
)
def test_a_gpu_planned_with_anothers_profile_is_warned_of(name, generation, profile):
    found = profile_of_chip(name, generation)
    assert found.profile == profile
    assert repr(name) in found.warning and "is used for" in found.warning
    assert f"megamoe calibrate mine.toml --start {profile}" in found.warning


def test_the_warning_is_given_once_per_process(detected, caplog):
    with caplog.at_level(logging.WARNING, detect.__name__):
        assert [detected(Library("NVIDIA GH200 480GB", 8, 8)) for _ in range(2)] == ["h100"] * 2
    (record,) = caplog.records
    assert (
        "megamoe: no profile has the name of this GPU, 'NVIDIA GH200 480GB': h100"
        in record.getMessage()
    )


def test_where_nothing_can_stand_in_it_is_an_error(detected):
    old = Library("Tesla V100-SXM2-32GB", 8, 6, nvmlDeviceGetCudaComputeCapability=[7, 0])
    said = (
        "'detect': no profile has the name of this GPU, 'Tesla V100-SXM2-32GB'.*set "
        "megamoe.hardware"
    )
    with pytest.raises(InvalidConfig, match=said):
        detected(old)


def test_a_gpu_that_nvml_does_not_show_is_no_processor(detected, monkeypatch):
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "AMD MI300X")
    monkeypatch.setitem(detect.sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with pytest.raises(InvalidConfig, match="torch runs on 'AMD MI300X', which NVML does not"):
        detected(Library("", 0, 0, nvmlInit=GONE))


def test_without_a_gpu_the_processor_is_planned_with(detected):
    assert detected(Library("", 0, 0, nvmlInit=GONE)) == "cpu"


def test_what_stands_in_is_shipped():
    assert set(STANDS_IN.values()) <= set(CHIPS)
    assert {load_profile(name).name for name in CHIPS} == set(CHIPS)
