"""Whether an option may have a value, alone and beside others, and what to write instead.

Contract
    Each check returns where the value is allowed, and raises InvalidConfig where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest

AMOUNTS: Final = {
    "max_memory_increase": "a fraction of at least 0, 0.05 for example",
    "offload_budget": "a share from 0 to 1, such as 0.5, or a whole number of bytes, such as "
    "2000000000",
    "row_room": '"auto" or a number above 0, 1.5 for example',
    "routing_skew": "0 if experts are chosen evenly, or a larger number, 0.5 for example",
}
"""What to write of each amount."""


def check_number(name: str, chunks: object) -> None:
    """Raise InvalidConfig for anything but "auto" or a whole number of at least 1."""
    whole = isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1
    if not whole and chunks != "auto":
        raise InvalidConfig(
            f'megamoe.{name} is {chunks!r}; write "auto" or a whole number of at least 1'
        )


def check_chunk_by(chunk_by: str, slices: object, edges: str) -> None:
    """Raise InvalidConfig as `check_number`, and for what chunks of tokens do not have.

    There `chunks` is the number of slices, and no chunk of experts has `edges`.
    """
    check_number("hop_slices", slices)
    if edges == "load" and chunk_by == "tokens":
        raise InvalidConfig(
            f"megamoe.chunk_edges is {edges!r}, which moves the edges of chunks of experts, but "
            'chunk_by is "tokens"; leave out one of the two options'
        )
    if slices not in ("auto", 1) and chunk_by == "tokens":
        raise InvalidConfig(
            f'megamoe.hop_slices is {slices}, but with chunk_by = "tokens" megamoe.chunks '
            "already splits hop 1; leave out hop_slices, or leave out chunk_by, so that "
            "megamoe.chunks splits the experts and hop_slices splits hop 1"
        )


def check_apply_scores(apply_scores: str, dispatch: str, nodes: str) -> None:
    """Raise InvalidConfig where scores are to travel beside rows, and no rows travel."""
    for name, value, plain in (("dispatch", dispatch, "all_to_all"), ("nodes", nodes, "off")):
        if apply_scores == "before_down" and value not in (plain, "auto"):
            raise InvalidConfig(
                'megamoe.apply_scores is "before_down", which needs a score with every row that '
                f"is sent, but {name} = {value!r} sends one token for several rows; leave out "
                f"{name}, or apply_scores"
            )


WITHOUT_READS: Final[Mapping[str, tuple[object, ...]]] = {
    "dispatch": ("all_to_all", "auto"),
    "nodes": ("off", "auto"),
    "dispatch_wire": ("same", "auto"),
    "combine_wire": ("same", "auto"),
    "transport": ("functional",),
    "apply_scores": ("model",),
    "expert_compute": ("same",),
}
"""Values of other options with which the host can do without reads."""


def check_without_reads(
    host_reads: str, chunks: object, chunk_by: str, others: Mapping[str, object]
) -> None:
    """Raise InvalidConfig where other options ask for rows that travel in another way, and no
    reads."""
    if host_reads != "none":
        return
    if chunks not in (1, "auto") and chunk_by != "tokens":
        raise InvalidConfig(
            f'megamoe.host_reads is "none", and chunks = {chunks!r} asks for chunks of experts, '
            'whose sizes the host must read; write chunk_by = "tokens" too, or leave out chunks, '
            "or leave out host_reads"
        )
    for name, value in others.items():
        if value not in WITHOUT_READS[name]:
            raise InvalidConfig(
                'megamoe.host_reads is "none", which supports only plain all-to-alls of rows in '
                f"the model's number format, but {name} is {value!r}; leave out {name}, or leave "
                "out host_reads"
            )


FORWARD_PRODUCTS: Final = ("gate", "up", "down")
PRODUCTS: Final = (*FORWARD_PRODUCTS, "grad_input", "grad_weight")
"""Names of the products of experts, those of the forward pass first."""


def check_list(option: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise InvalidConfig for a name in a list that is not one of those `known`."""
    for name in names:
        if name not in known:
            raise InvalidConfig(
                f"megamoe.{option} has {name!r}, which it does not know; write a list of "
                f"{', '.join(known)}." + nearest(name, known)
            )


def check_fp8_products(compute: str, products: tuple[str, ...]) -> None:
    """Raise InvalidConfig for a list of products that nothing reads, or that a format lacks."""
    if not products:
        raise InvalidConfig(
            "megamoe.fp8_products is an empty list; name a product, or write expert_compute = "
            '"same" to have none in eight bits'
        )
    if compute == "same" and set(products) != {*FORWARD_PRODUCTS, "grad_input"}:
        raise InvalidConfig(
            f'megamoe.fp8_products is {list(products)}, but with expert_compute = "same" no '
            'product is in eight bits; write expert_compute = "fp8_blockwise", or leave out '
            "fp8_products"
        )
    if compute == "fp8_rowwise" and "grad_weight" in products:
        raise InvalidConfig(
            'megamoe.fp8_products has "grad_weight", but "fp8_rowwise" cannot compute it: a '
            "gradient of weights sums over rows, and needs scales along rows; write "
            'expert_compute = "fp8_blockwise", or leave out "grad_weight"'
        )
    if compute.endswith("_e5m2") and set(products) <= {*FORWARD_PRODUCTS}:
        raise InvalidConfig(
            f'megamoe.fp8_products is {list(products)}, but expert_compute = "{compute}" needs '
            '"grad_input" in it, because it differs from "fp8_blockwise" only in the format of '
            'gradients; write expert_compute = "fp8_blockwise", or add "grad_input"'
        )


def check_amount(name: str, amount: Any) -> None:
    """Raise InvalidConfig for anything but a number of at least 0, and what the option adds."""
    is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
    is_wrong = not is_number or not math.isfinite(amount) or amount < 0
    is_part_of_a_byte = name == "offload_budget" and not is_wrong and amount > 1 and amount % 1
    if is_wrong or is_part_of_a_byte or (name == "row_room" and amount == 0):
        raise InvalidConfig(f"megamoe.{name} is {amount!r}; write {AMOUNTS[name]}")


BUDGET: Final = (
    "a share above 0 and at most 1, such as 0.5, or a whole number of bytes per graph, such as "
    "2_000_000_000"
)


def check_budget(budget: object, recompute: str) -> None:
    """Raise InvalidConfig for anything but a share or bytes, and for a share that nothing reads."""
    is_share = isinstance(budget, int | float) and 0 < budget <= 1
    is_bytes = isinstance(budget, int) and budget > 1
    if isinstance(budget, bool) or not (is_share or is_bytes):
        raise InvalidConfig(f"megamoe.activation_budget is {budget!r}; write {BUDGET}")
    if budget != 1 and recompute != "price":
        raise InvalidConfig(
            f"megamoe.activation_budget is {budget!r}, but megamoe.recompute = {recompute!r} does "
            'not use a budget; write recompute = "price", or leave out activation_budget'
        )


PARTS: Final = (
    "layernorm",
    "moe_act",
    "core_attn",
    "mla_up_proj",
    "shared_experts",
    "mlp",
    "moe",
    "megascale_moe",
)
"""Names that `recompute_modules` takes (`recompute/named_parts.py`)."""
NAMED: Final = "recompute_modules"
"""The option that names parts, and the pass in records about them."""


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidConfig for anything but one of `choices`."""
    if value not in choices:
        raise InvalidConfig(
            f"megamoe.{name} is {value!r}; write one of {', '.join(choices)}."
            + (nearest(value, choices) if isinstance(value, str) else "")
        )
