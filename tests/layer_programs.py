"""Layers of the fuzzer's grammar as modules: a test chooses a form, and writes no class."""

import sys

from moe_compile.testing.programs.grammar import Program
from moe_compile.testing.programs.run import load
from moe_compile.testing.programs.text import source_of


def layer_of(layer, old="", new="", *, tokens=32, width=16, hidden=16, dtype="float32"):
    """Return a module of `layer`, with `new` where its source has `old`.

    It takes `tokens` rows, and returns its result and a list of what else the layer returns.
    """
    sizes = {"width": width, "hidden": hidden, "dtype": dtype}
    text = source_of(Program(layers=(layer,), tokens=((tokens, tokens),), **sizes))
    assert old in text
    module = load(text.replace(old, new))
    sys.modules[module.__name__] = module  # Dynamo imports it for a program that calls another's
    return module.Program()
