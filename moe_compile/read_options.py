"""The options of `torch.compile(mode=, options=)`: megamoe's, and Inductor's settings.

Contract
    A wrong option reaches the caller as InvalidConfig. torch hands a backend its options with the
    first graph, not before, and wraps errors of backends, except those whose traceback it shortens.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch._dynamo.exc
import torch._inductor
import torch._inductor.config as inductor_config

from moe_compile.config import OPTION_NAMES, PREFIX, MegaMoEConfig, from_sources, split_options
from moe_compile.errors import InvalidConfig, nearest
from moe_compile.hardware import load_profile
from passes.outside import find_transport
from passes.pipeline import check_names

UNWRAPPED: Final[type[Exception]] = getattr(torch._dynamo.exc, "ShortenTraceback", Exception)
"""Base class of errors that torch passes on to the caller unchanged."""


class InvalidOptions(InvalidConfig, UNWRAPPED):  # type: ignore[misc,valid-type]
    """An option of torch.compile that is unknown or impossible."""

    def __init__(self, text: str) -> None:
        """Take the message."""
        Exception.__init__(self, text)
        self.first_useful_frame = None  # torch shortens no traceback then


def read_options(
    mode: str | None, options: Mapping[str, Any] | None
) -> tuple[MegaMoEConfig, dict[str, Any]]:
    """Return megamoe's options and Inductor's settings. Raises InvalidOptions."""
    try:
        ours, inductor = split_options(options or {})
        _check_inductors(inductor)
        config = from_sources(options=ours, environment=os.environ)
        check_names(config.disable_passes)
        find_transport(config.transport)
        load_profile(config.hardware)
        return config, {**_of_mode(mode), **inductor}
    except InvalidConfig as error:
        raise InvalidOptions(str(error)) from None


def _check_inductors(names: Iterable[str]) -> None:
    """Refuse names that are not Inductor's; most are ours without their prefix."""
    for name in names:
        if _is_inductors(name):
            continue
        if name in OPTION_NAMES:
            raise InvalidConfig(f"options=: Inductor has no {name!r}; write {PREFIX + name!r}")
        known = [*inductor_config.get_config_copy(), *(PREFIX + ours for ours in OPTION_NAMES)]
        close = nearest(name, known)
        hint = close if close.startswith(" Did") else f" Options of megamoe begin with {PREFIX!r}."
        raise InvalidConfig(f"options=: neither megamoe nor Inductor has {name!r}.{hint}")


def _is_inductors(name: str) -> bool:
    owner: Any = inductor_config
    for part in name.split("."):
        if not hasattr(owner, part):
            return False
        owner = getattr(owner, part)
    return True


def _of_mode(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    try:
        return dict(torch._inductor.list_mode_options(mode))
    except (RuntimeError, KeyError) as error:
        raise InvalidConfig(f"torch.compile mode {mode!r}: {error}") from None
