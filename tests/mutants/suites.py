"""Which modules are changed, and which tests must notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Group:
    """Modules with one purpose, and tests of them that one process runs in a minute."""

    name: str
    modules: tuple[str, ...]
    """Paths from the repository's root."""
    tests: tuple[str, ...]
    """Files, or single tests of them, those that fail soonest first."""
    left_out: tuple[str, ...] = ()
    """Tests of these files that take long and notice nothing that others do not."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """What pytest is asked for."""
        return *self.tests, *(f"--deselect={test}" for test in self.left_out)


ROWS: Final = (
    "row_rules", "view_rules", "index_rules", "order_rules", "count_rules",
    "row_proof", "grouped_rules", "sampled_counts",
)  # fmt: skip

PROOF: Final = "tests/proof/test_row_proof.py"
PREMISES: Final = "tests/proof/test_row_premises.py"
ROUNDING: Final = "tests/testing/cpu_rounding/test_position_rounding.py"
MIRRORED: Final = "tests/equivalence/test_mirrored_programs.py"
REASONS: Final = (
    "tests/test_reasons_page.py::test_the_program_of_a_section_gives_its_reason_and_no_other"
)
OF_DETECTION: Final = ("NO_COMBINE", "NO_COUNT_EXCHANGE", "MUTATES_OUTSIDE", "COMMUNICATES")

GROUPS: Final = (
    Group(
        "proof",
        (
            "moe_compile/regions/count_facts.py",
            "moe_compile/regions/row_domain.py",
            *(f"moe_compile/proof/{name}.py" for name in ROWS),
        ),
        (
            f"{ROUNDING}::test_silu_in_rows_that_do_not_fill_vectors_is_refused",
            f"{ROUNDING}::test_products_of_rows_that_begin_between_boundaries_are_refused",
            f"{ROUNDING}::test_a_variance_in_float64_is_refused",
            f"{ROUNDING}::test_gelu_in_bfloat16_rows_that_do_not_fill_vectors_is_refused",
            PROOF,
            "tests/proof/test_row_orders.py",
            "tests/proof/test_row_refusals.py",
            "tests/proof/test_row_sizes.py",
            PREMISES,
        ),
        left_out=(
            f"{PREMISES}::test_the_verdict_is_the_same_for_few_tokens_and_none",
            f"{PROOF}::test_a_higher_order_operator_may_write_what_it_makes_of_counts",
        ),
    ),
    Group(
        "rounding",
        (
            "moe_compile/testing/cpu_rounding/position_rounding.py",
            "moe_compile/testing/cpu_rounding/cpu_bits.py",
        ),
        (
            ROUNDING,
            "tests/proof/test_row_refusals.py",
            "tests/proof/test_row_layout.py::test_rows_laid_out_channels_last_are_refused",
        ),
    ),
    Group(
        "legality",
        (
            "moe_compile/graph/legality.py",
            "moe_compile/graph/gradient_order.py",
            "moe_compile/graph/effects.py",
            "moe_compile/graph/dependence.py",
            "moe_compile/graph/aliases.py",
            "moe_compile/graph/memory.py",
            "moe_compile/regions/rewrites.py",
            "moe_compile/regions/rewrite_effects.py",
            "moe_compile/regions/new_order.py",
            "moe_compile/regions/implied_assertions.py",
            "moe_compile/regions/detect_moe.py",
        ),
        (
            "tests/graph/test_legality.py",
            "tests/graph/test_gradient_order.py",
            "tests/graph/test_dependence.py",
            "tests/regions/test_detect_moe.py",
            *(f"{REASONS}[{name}]" for name in OF_DETECTION),
            MIRRORED,
            "tests/passes/test_chunk_regions.py",
        ),
    ),
    Group(
        "edits",
        (
            "moe_compile/graph/edit.py",
            "passes/rewrite_regions.py",
            "passes/kinds/by_counts/kind.py",
            "passes/replay/masked_replay.py",
            "passes/replay/chunk_reads.py",
            "passes/replay/chunk_axis.py",
            "passes/replay/replayed.py",
            "passes/replay/gradient_paths.py",
            "passes/replay/prune.py",
            "passes/replay/host_reads.py",
        ),
        (
            "tests/passes/test_chunk_axis.py",
            "tests/passes/test_chunk_regions.py",
            MIRRORED,
            "tests/graph/test_legality.py",
            "tests/graph/test_precedence.py",
        ),
    ),
    Group(
        "scheduler",
        (
            "moe_compile/schedule/list_schedule.py",
            "moe_compile/schedule/choose_schedule.py",
            "moe_compile/graph/precedence.py",
            "moe_compile/schedule/liveness.py",
            "moe_compile/graph/launch_order.py",
            "passes/verify_schedule.py",
        ),
        (
            "tests/schedule/test_list_schedule.py",
            "tests/graph/test_precedence.py",
            "tests/graph/test_launch_order.py",
            "tests/passes/test_verify_schedule.py",
            "tests/passes/test_schedule_exchanges.py",
        ),
    ),
)
