"""NVML's answers become a machine; silence becomes None, and absence a message."""

import dataclasses
from types import SimpleNamespace

import pynvml
import pytest

from moe_compile.commands.doctor import find_choices, find_findings, link_gb_per_s
from moe_compile.hardware.cluster import load_cluster
from moe_compile.hardware.devices import read_machine

MBPS = 26562
"""What NVML says of one NVLink of an H100 or H800."""


class Library:
    """As much of NVML's library as the doctor asks, for GPUs that are not here.

    `changes` replace an answer by name; an exception among them is raised.
    """

    NVMLError = pynvml.NVMLError
    NVML_SUCCESS = pynvml.NVML_SUCCESS
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_NVLINK_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS
    NVML_FI_DEV_NVLINK_GET_SPEED = pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
    c_nvmlGpuFabricInfoV_t = pynvml.c_nvmlGpuFabricInfoV_t

    def __init__(self, name, count, links, **changes):
        self.links = links
        self.shut_down = 0
        self.answers = {
            "nvmlInit": None,
            "nvmlSystemGetDriverVersion": "570.1",
            "nvmlDeviceGetCount": count,
            "nvmlDeviceGetName": name,
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80e9),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetCudaComputeCapability": [9, 0],
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            "nvmlDeviceGetClockInfo": 1200,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
            **changes,
        }

    def __getattr__(self, function):
        if function not in self.answers:
            raise AttributeError(function)
        answer = self.answers[function]

        def call(*arguments):
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def nvmlShutdown(self):
        self.shut_down += 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetNvLinkState(self, handle, link):
        if link >= 18:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return int(link < self.links)

    def nvmlDeviceGetFieldValues(self, handle, fields):
        ((field, link),) = fields
        assert field == self.NVML_FI_DEV_NVLINK_GET_SPEED and link < self.links
        value = SimpleNamespace(uiVal=MBPS)
        return [SimpleNamespace(nvmlReturn=self.NVML_SUCCESS, value=value)]

    def nvmlDeviceGetGpuFabricInfoV(self, handle, info):
        info._obj.state, info._obj.cliqueId = 3, 7
        return self.NVML_SUCCESS


def h800(**changes):
    return Library("NVIDIA H800", 8, 8, **changes)


def test_a_machine_is_read_and_the_library_closed():
    library = h800()
    machine = read_machine(library)
    assert library.shut_down == 1
    assert (len(machine.devices), machine.driver) == (8, "570.1")
    device = machine.devices[0]
    assert device.nvlink_total_gb_per_s == pytest.approx(8 * 26.562)
    assert device.pcie_gb_per_s == pytest.approx(63, abs=0.1)
    assert (device.fabric_state, device.fabric_clique, device.is_mig) == ("completed", 7, False)
    assert (device.clock_reasons, device.throttling) == (("idle",), ())


def test_what_nvml_does_not_answer_is_none():
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    names = [name for name in h800().answers if name.startswith("nvmlDeviceGet")]
    silent = dict.fromkeys(set(names) - {"nvmlDeviceGetCount", "nvmlDeviceGetName"}, refused)
    (device, *_) = read_machine(h800(**silent)).devices
    unknown = ("memory_gb", "generation", "is_mig", "pcie_generation", "pcie_lanes", "sm_clock_mhz")
    assert [getattr(device, name) for name in unknown] == [None] * 6


def test_no_nvml_is_a_message():
    gone = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    machine = read_machine(h800(nvmlInit=gone))
    assert machine.devices == ()
    (finding,) = find_findings(machine, None)
    assert "NVML is not available" in finding and "profile cpu is used" in finding


def test_a_machine_as_its_profile_says_has_nothing_to_say():
    machine = read_machine(h800())
    profile = load_cluster("h800")
    assert find_findings(machine, profile) == ()
    assert find_choices(machine, profile) == ()


@pytest.mark.parametrize(
    ("library", "said"),
    [
        (h800(nvmlDeviceGetMigMode=[1, 1]), "GPU 3: MIG is on"),
        (h800(nvmlDeviceGetCurrentClocksEventReasons=0x41), "(hardware thermal slowdown)"),
        (Library("NVIDIA H800", 8, 4), "NVLink has 106 GB/s, but profile h800 has 200"),
        (Library("NVIDIA H800", 8, 0), "PCIe (there is no NVLink) has 63 GB/s"),
        (Library("NVIDIA H800", 1, 0), "there is no exchange to hide"),
        (
            Library("NVIDIA GH200 480GB", 8, 8),
            "has the name of this GPU, 'NVIDIA GH200 480GB': h100 is used",
        ),
    ],
)
def test_a_machine_that_differs_is_told_so(library, said):
    found = find_findings(read_machine(library), load_cluster("h800"))
    assert any(said in finding for finding in found), found


def test_gpus_in_several_cliques_are_told_so():
    machine = read_machine(h800())
    devices = [dataclasses.replace(d, fabric_clique=d.index // 4) for d in machine.devices]
    apart = dataclasses.replace(machine, devices=tuple(devices))
    (finding,) = find_findings(apart, load_cluster("h800"))
    assert "2 fabric cliques" in finding


def test_slow_links_change_choices_and_make_an_fp8_wire_worth_more():
    machine = read_machine(Library("NVIDIA H200", 8, 0))
    assert link_gb_per_s(machine) == pytest.approx(63, abs=0.1)
    choices = find_choices(machine, load_cluster("h200"))
    assert any(choice.here != choice.by_profile for choice in choices)
    assert all(c.fp8_wire_gain_here > c.fp8_wire_gain_by_profile for c in choices)


@pytest.mark.gpu
def test_this_machines_gpu_is_read():
    (device, *_) = read_machine().devices
    assert device.name and device.memory_gb > 0 and device.max_sm_clock_mhz > 0
