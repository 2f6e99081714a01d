"""A graph that our passes work on is compiled without what would undo its order or hang its job."""

from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config

from moe_compile.backend import megamoe
from moe_compile.report.process_report import REPORT
from moe_compile.torch_quirks.inductor_settings import REORDERINGS, settings_of_ours, switched_off
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts


def test_settings_are_named_as_this_torch_has_them():
    ours = settings_of_ours(is_scheduled=True)
    with inductor_config.patch(ours):
        assert inductor_config.reorder_for_peak_memory is False
        assert inductor_config.max_autotune is False
        assert inductor_config.triton.cudagraphs is False
    assert not set(REORDERINGS) & set(settings_of_ours(is_scheduled=False))


def test_every_reordering_of_this_torch_is_switched_off():
    """A newer torch that has another one fails here."""
    known = inductor_config.get_config_copy()
    switches = {key for key, value in known.items() if isinstance(value, bool)}
    reorderings = {key for key in switches if "reorder" in key and "debug" not in key}
    loops = {"loop_ordering_after_fusion", "loop_reindexing_after_fusion"}
    assert reorderings - set(REORDERINGS) - loops == set()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("default", set()),
        ("reduce-overhead", {"triton.cudagraphs"}),
        ("max-autotune", {"max_autotune", "coordinate_descent_tuning", "triton.cudagraphs"}),
    ],
)
def test_what_a_mode_asks_for_and_does_not_get_is_told(mode, expected):
    patches = torch._inductor.list_mode_options(mode)
    assert set(switched_off(patches, settings_of_ours(is_scheduled=True))) == expected


def test_what_is_switched_on_for_all_compilations_is_told():
    with inductor_config.patch({"max_autotune": True}):
        assert switched_off({}, settings_of_ours(is_scheduled=True)) == ("max_autotune",)
    assert switched_off({"shape_padding": True}, {"shape_padding": False}) == ("shape_padding",)
    assert switched_off({"graph_partition": True}, {"graph_partition": ["ours"]}) == ()


def compiled_with(module, x, **arguments):
    """Return the settings that Inductor gets of a module's graph, and what was warned of."""
    (gm,) = dynamo_graphs(module, x)
    with (
        mock.patch("moe_compile.codegen.compile_fx") as inductor,
        mock.patch("moe_compile.backend._warn_once") as warn,
    ):
        megamoe(gm, [x], **arguments)
    return inductor.call_args.kwargs["config_patches"], [c.args[0] for c in warn.call_args_list]


def test_benchmarks_are_off_where_there_is_a_region(fake_ranks):
    layer = GroupedExperts(16, 16, 4, 1, fake_ranks)
    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    settings, warnings = compiled_with(layer, x, mode="max-autotune-no-cudagraphs")
    off = [name for name in settings_of_ours(is_scheduled=True) if settings[name]]
    assert off == []
    (warning,) = warnings
    assert "max_autotune, coordinate_descent_tuning are off" in warning
    assert "CUDA graph" not in warning
    assert "test_inductor_settings.py" in warning or "layers.py" in warning
    assert "max_autotune" in REPORT.as_dict()["inductor_settings_off"]


def test_a_graph_without_a_region_is_compiled_as_asked(fake_ranks):
    settings, warnings = compiled_with(torch.nn.Linear(4, 4), torch.ones(2, 4), mode="max-autotune")
    assert settings == torch._inductor.list_mode_options("max-autotune") and warnings == []
