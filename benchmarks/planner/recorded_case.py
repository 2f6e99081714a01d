"""What a recorded result of `benchmarks.link.overlap` says of a case: shapes, rates, the link."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from benchmarks.link.cases import Case
from moe_compile.hardware import HardwareProfile


def case_of(head: Mapping[str, Any]) -> Case:
    """Return the case a header is of."""
    return Case(**{field.name: head[field.name] for field in fields(Case)})


def profile_of(head: Mapping[str, Any]) -> HardwareProfile:
    """Return the profile a header holds; older ones state no origins."""
    table = tomllib.loads(head["megamoe_profile"])
    return HardwareProfile(
        **{key: v["value"] if isinstance(v, dict) else v for key, v in table.items()}
    )


def with_link(hardware: HardwareProfile, head: Mapping[str, Any], ratio: str) -> HardwareProfile:
    """Return `hardware` with the link that the case had at `ratio`."""
    link = head["links"][ratio]
    return replace(
        hardware, link_gb_per_s=link["mb_per_s"] / 1e3, link_latency_us=link["latency_us"]
    )
