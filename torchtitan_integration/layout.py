"""What this version of the recipe can lay out, said before and while a job starts.

Contract
    A layout that would train wrongly or fail late is refused by the name of its TOML key.
    The command line and the ranks ask the same question of the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from moe_compile.errors import InvalidConfig

SPEC_PREFIX: Final = "megamoe_"
"""How the names of our train specs begin; what follows is torchtitan's name of the model."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of torchtitan's TOML that has one value here."""

    only: int | str
    """The value to write."""
    default: int | str
    """What torchtitan takes when the key is absent."""


SETTINGS: Final[Mapping[str, Setting]] = {
    "parallelism.tensor_parallel_degree": Setting(1, 1),
    "parallelism.context_parallel_degree": Setting(1, 1),
    "parallelism.pipeline_parallel_degree": Setting(1, 1),
    "parallelism.expert_parallel_comm_backend": Setting("standard", "standard"),
    "activation_checkpoint.mode": Setting("none", "selective"),
}
"""Keys whose other values are not available in this version."""


def check_settings(read: Callable[[str, Any], Any]) -> None:
    """Raise InvalidConfig for a setting not available; `read(key, default)` gives its value."""
    for key, setting in SETTINGS.items():
        value = read(key, setting.default)
        if str(value) != str(setting.only):
            raise InvalidConfig(
                f"{key} = {_toml(value)} is not available in this version of the megamoe "
                f"recipe; write {key} = {_toml(setting.only)}"
            )


def check_degrees(*, replicate: int, shard: int) -> None:
    """Raise InvalidConfig for replicas without shards: nothing would add up their gradients."""
    if replicate > 1 and shard == 1:
        raise InvalidConfig(
            f"parallelism.data_parallel_replicate_degree = {replicate} with "
            "data_parallel_shard_degree = 1 is not available in this version of the megamoe "
            f"recipe; write data_parallel_shard_degree = {replicate} and replicate degree 1"
        )


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
