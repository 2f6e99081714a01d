"""A step of plain PyTorch that a user's function returns, as a program that can be checked.

Contract
    The function returns a dictionary: `model`, `optimizer` and `step`, and where wanted `blocks`,
    `state` and `options` (docs/check.md). What is wrong with it is an InvalidConfig that names the
    function.
    The blocks' forwards become switches. The step is called with its number, from 0 after every
    return to the start, and returns this rank's loss.
    Where the function makes no process group, one of all ranks is made.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from moe_compile.check.forms import Forms
from moe_compile.check.model_state import Snapshot, gradients_of, values_of
from moe_compile.config import PREFIX, MegaMoEConfig, from_sources, split_options
from moe_compile.errors import InvalidConfig, nearest
from moe_compile.testing.process_groups import BACKENDS

REQUIRED: Final = ("model", "optimizer", "step")
KEYS: Final = (*REQUIRED, "blocks", "state", "options")


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """What a function returned."""

    model: nn.Module
    blocks: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    others: Sequence[Any]
    """Further state, with `state_dict` and `load_state_dict`."""
    options: Mapping[str, Any]
    """The blocks' `options=` of torch.compile."""
    step: Callable[[int], torch.Tensor]


def load_function(path: Path, name: str) -> Callable[[], Any]:
    """Import a script as a module, its folder first on the path; return a function of it."""
    sys.path.insert(0, str(path.parent))
    known = path.stem if path.stem not in sys.modules else f"{path.stem}_to_check"
    spec = importlib.util.spec_from_file_location(known, path)
    assert spec is not None and spec.loader is not None  # a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidConfig(f"{path} has no function {name!r}")
    return function


def given_by(returned: Any) -> Given:
    """Return the parts of a function's result. Raises InvalidConfig where it is no such thing."""
    if not isinstance(returned, Mapping):
        raise InvalidConfig(
            f"the function must return a dictionary with the keys {', '.join(KEYS)}; got "
            f"{_kind(returned)}"
        )
    if unknown := [key for key in returned if key not in KEYS]:
        raise InvalidConfig(
            "the function returned a dictionary with the unknown key "
            f"{unknown[0]!r}.{nearest(str(unknown[0]), KEYS)}"
        )
    if missing := [key for key in REQUIRED if key not in returned]:
        raise InvalidConfig(
            f"the function must return a dictionary with the keys {', '.join(REQUIRED)}; "
            f"{missing[0]!r} is missing"
        )
    model, step = returned["model"], returned["step"]
    _expect(isinstance(model, nn.Module), "model", model, "a torch.nn.Module")
    _expect(_takes_a_number(step), "step", step, "a function of the step's number")
    optimizers = _listed(returned["optimizer"], torch.optim.Optimizer)
    for one in optimizers:
        is_one = isinstance(one, torch.optim.Optimizer)
        _expect(is_one, "optimizer", one, "a torch.optim.Optimizer, or a list of them")
    others = _listed(returned.get("state", ()), object)
    for one in others:
        has_state = hasattr(one, "state_dict") and hasattr(one, "load_state_dict")
        _expect(has_state, "state", one, "objects with state_dict and load_state_dict")
    options = returned.get("options", {})
    _expect(isinstance(options, Mapping), "options", options, "the options= of torch.compile")
    return Given(
        model=model,
        blocks=_blocks(model, returned.get("blocks", model)),
        optimizers=optimizers,
        others=others,
        options=options,
        step=step,
    )


def _blocks(model: nn.Module, given: Any) -> list[nn.Module]:
    """Return the modules to be compiled; none of them may be compiled already."""
    blocks, known = _listed(given, nn.Module), {*model.modules()}
    _expect(bool(blocks), "blocks", given, "modules of the model that are to be compiled")
    for one in blocks:
        _expect(one in known, "blocks", one, "modules of the model that are to be compiled")
    compiled = (nn.Module, "_compiled_call_impl"), (torch._dynamo.OptimizedModule, "_orig_mod")
    for one in known:
        if any(isinstance(one, k) and getattr(one, name, None) is not None for k, name in compiled):
            raise InvalidConfig(
                f"{_kind(one)} is compiled already; leave torch.compile out, since megamoe check "
                "compiles it itself"
            )
    return blocks


def _expect(is_so: bool, key: str, value: Any, wanted: str) -> None:
    if not is_so:
        raise InvalidConfig(
            f"the key {key!r} of the returned dictionary must be {wanted}; got {_kind(value)}"
        )


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def _listed(value: Any, single: type) -> list[Any]:
    """Return what a container has, or the one value that is none."""
    if isinstance(value, Mapping | nn.ModuleDict):
        return list(value.values())
    if isinstance(value, nn.ModuleList | list | tuple | set):
        return list(value)
    is_many = isinstance(value, Iterable) and not isinstance(value, single)
    return list(value) if is_many else [value]


def _takes_a_number(step: Any) -> bool:
    try:
        inspect.signature(step).bind(0)
    except (TypeError, ValueError):
        return False
    return True


class ScriptSteps:
    """A user's step, the forms of its blocks, and the state to which it can go back."""

    def __init__(self, given: Given, flags: Mapping[str, Any]) -> None:
        """Put switches into the blocks and train one step; `flags` win over the options given.

        Raises InvalidConfig for a wrong option, and for a step that cannot be checked.
        """
        self.forms, self._given = Forms(), given
        flagged = {PREFIX + name: value for name, value in flags.items()}
        options = {**given.options, **flagged}
        ours, _ = split_options(options)
        self.config: MegaMoEConfig = from_sources(options=ours, environment=os.environ)
        if f"{PREFIX}codegen" in given.options:  # the command must know it before ranks start
            raise InvalidConfig(
                "the script sets megamoe.codegen in its options; leave it out there, and "
                "write --megamoe.codegen fx on the command line"
            )
        for block in given.blocks:
            inner = getattr(block, "_checkpoint_wrapped_module", block)
            block.forward = self.forms.switch(block.forward, options, precise=inner.forward)
        first = next(given.model.parameters(), None)
        self.device = torch.device("cpu") if first is None else first.device
        self._parts = (given.model,)
        self._start = Snapshot(self._parts, given.optimizers, given.others)
        self._number, self._loss = 0, torch.zeros(())
        self.step()  # optimizers make their state
        if not any(True for _ in self.gradients()):
            raise InvalidConfig(
                "the step must leave its gradients for the check to compare, and left none; call "
                "zero_grad at the start of a step, not at its end"
            )
        self.restore()

    def restore(self) -> None:
        """Go back to the start: weights, optimizer, further state, random state."""
        self._start.restore()
        self._number = 0

    def step(self, *, is_told: bool = False) -> None:
        """Train one step; its loss is kept either way."""
        del is_told
        loss = self._given.step(self._number)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise InvalidConfig(f"the step must return its loss, one number; got {_kind(loss)}")
        self._loss = loss.detach().clone()
        self._number += 1

    def seen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the last step left, by name: in the order in which it was computed."""
        yield "loss", self._loss
        yield from self.gradients()
        yield from values_of(self._parts)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the gradients of the last step, of parameters from the last to the first."""
        yield from gradients_of(self._parts)

    def losses(self) -> list[float]:
        """Return this rank's loss of the last step."""
        return [float(self._loss)]


def steps_of(path: Path, name: str, device: str, flags: Mapping[str, Any]) -> ScriptSteps:
    """Call a script's function on this rank and return its step.

    Raises InvalidConfig where what it returned cannot be checked.
    """
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    returned = load_function(path, name)()
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device])
    try:
        return ScriptSteps(given_by(returned), flags)
    except InvalidConfig as error:
        raise InvalidConfig(f"{path.name}:{name}: {error}") from None
