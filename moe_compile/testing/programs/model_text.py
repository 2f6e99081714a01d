"""The model of a generated program as Python source: its layers, called one after another."""

from __future__ import annotations

from moe_compile.testing.programs.choices import Groups, Running, Sharing, Wrapping
from moe_compile.testing.programs.expert_text import indented
from moe_compile.testing.programs.grammar import Experts, Layer, Program


def model_class(program: Program) -> list[str]:
    """Return the source of class `Program`, whose layers are `Layer0`, `Layer1`, ..."""
    made = [f"self.layer{i} = Layer{i}()" for i in range(len(program.layers))]
    calls: list[str] = []
    if program.groups is Groups.OWN_SUM:
        made += ["self.own = own_group()"]
        calls += ['extra.append(wait_tensor(all_reduce(x.detach() * 1.0, "sum", self.own)))']
    if program.running is Running.IF_ANY:
        made += ['self.register_buffer("images", torch.zeros(3, dtype=torch.bool))']
    constructor = ["def __init__(self):", *indented(["super().__init__()", *made])]
    if program.sharing is Sharing.INSIDE:
        calls += _one_inside(program)
    else:
        for i, layer in enumerate(program.layers):
            call = _call(program, i, layer)
            is_optional = program.running is Running.IF_ANY and i == 0
            calls += ["if self.images.any():", *indented(call)] if is_optional else call
    if program.sharing is Sharing.WEIGHTS:
        calls += _call(program, 0, program.layers[0])
    if program.sharing is Sharing.ROUTING:
        calls += ["", *_call(program, 0, program.layers[0], routing="routing")]
    body = ["extra = []", *_around(program, calls), "return x, extra"]
    forward = ["def forward(self, x):", *indented(body)]
    return ["class Program(nn.Module):", *indented([*constructor, "", *forward])]


def _one_inside(program: Program) -> list[str]:
    """Return calls of all layers between routing and rows of the first, or of that one again."""
    inside = list(enumerate(program.layers))[1:] or [(0, program.layers[0])]
    calls = ["routing = self.layer0.route(x)"]
    for i, layer in inside:
        calls += [*_call(program, i, layer), "x = x * (1 + routing[4][0] * 0.125)"]
    return [*calls, *_call(program, 0, program.layers[0], routing="routing")]


def _call(program: Program, i: int, layer: Layer, routing: str = "") -> list[str]:
    before: list[str] = []
    if not isinstance(layer, Experts):
        call = f"self.layer{i}"
    elif i == 0 and (routing or program.sharing is Sharing.ROUTING):
        before = [] if routing else ["routing = self.layer0.route(x)"]
        call = "lambda x: self.layer0(x, routing)"
    else:
        call = f"lambda x: self.layer{i}(x, self.layer{i}.route(x))"
    if program.wrapping is Wrapping.CHECKPOINT:
        line = f"y, more = checkpoint({call}, x, use_reentrant=False)"
    else:
        line = f"y, more = {call.removeprefix('lambda x: ')}" + ("" if "lambda" in call else "(x)")
    residual = "x + y" if program.wrapping is Wrapping.RESIDUAL else "y"
    return [*before, line, "extra += more", f"x = {residual}"]


def _around(program: Program, calls: list[str]) -> list[str]:
    if program.wrapping is Wrapping.AUTOCAST:
        return ["with torch.autocast(x.device.type, dtype=torch.bfloat16):", *indented(calls)]
    if program.wrapping is Wrapping.NO_GRAD_HALF:
        kept = ["kept = x", "with torch.no_grad():", *indented(calls), "x = kept + x * 0.125"]
        return [*kept, *calls]
    return calls
