"""Why no test notices some changes: they change no behaviour, or none that could do harm.

Contract
    Keys hold when lines move. An entry is consulted only for a
    mutant that the tests let pass.
"""

from __future__ import annotations

from typing import Final

Key = tuple[str, str, str]
"""Module, line of source without its indent, change."""

PROOF: Final = "moe_compile/proof/"
ROUNDING: Final = "moe_compile/testing/cpu_rounding/"

DECLARED: Final = (
    "the default given here is never used: every overload of the operator declares the argument, "
    "and `Call.argument` then returns the schema's default"
)

EQUIVALENT: Final[dict[Key, str]] = {
    (
        f"{PROOF}view_rules.py",
        'if dim_of(call.argument("dim", 0), call.outputs[0].dim()) != row_dim:',
        "0  ->  1",
    ): DECLARED,
    (
        f"{PROOF}order_rules.py",
        'descending = bool(call.argument("descending", False))',
        "False  ->  True",
    ): DECLARED,
    (
        f"{ROUNDING}position_rounding.py",
        "for tensor, result in zip(call.outputs, results, strict=True):",
        "True  ->  False",
    ): "a rule gives one result for each output, so neither list is longer",
}
"""No input can tell the changed source from the one written."""

HARMLESS: Final[dict[Key, str]] = {
    (
        f"{ROUNDING}position_rounding.py",
        'mantissas = torch.arange(NUM_GRADIENTS, device="cpu") / NUM_GRADIENTS + 1',
        "1  ->  2",
    ): (
        "gradients between 2 and 3 instead of 1 and 2 are tried on every number of two bytes: as "
        "many, with a bit less of mantissa"
    ),
}
"""Behaviour differs, and the tests do not show it; they count as survivors."""
