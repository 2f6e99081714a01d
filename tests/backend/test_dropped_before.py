"""What failed when code was compiled is known where the code comes from a cache."""

from unittest import mock

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.codegen import compile_with_inductor, plan_of
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from passes.save_exchanges import SaveExchanges


def failing(self, graph, state):
    raise IndexError("tuple index out of range")


def state_of_one_program(**options):
    config = MegaMoEConfig(**options)
    return CompileState(config=config, hardware=load_profile("cpu"), has_work=True)


def program():
    return make_fx(lambda x: x + 1)(torch.ones(3))


def compiled(state, *, joint=None, later=None):
    """Compile with `state`: the joint graph here, one graph after it, or everything by a cache."""

    def compile_fx(gm, inputs, config_patches):
        if joint is not None:
            config_patches["joint_custom_post_pass"](joint.graph)
        return config_patches["joint_custom_post_pass"]

    with mock.patch("moe_compile.codegen.compile_fx", compile_fx):
        hook = compile_with_inductor(program(), [], state, {})
    if later is not None:
        hook(later.graph)
    return state


@pytest.fixture(autouse=True)
def cache(tmp_path):
    with temporary_cache_dir(str(tmp_path)):
        yield


def test_a_rank_with_a_cache_hit_compares_what_one_that_compiles_does(monkeypatch):
    monkeypatch.setattr(SaveExchanges, "run", failing)
    cold = compiled(state_of_one_program(), joint=program())
    warm = compiled(state_of_one_program())
    assert cold.dropped == warm.dropped == ["save_exchanges joint"]
    assert plan_of(cold) == plan_of(warm) != plan_of(state_of_one_program())
    assert list(cold.journal.dropped()) == list(warm.journal.dropped())


def test_what_failed_once_the_program_ran_is_reported_and_not_compared(monkeypatch):
    """The rank that compiled it had compared its plan before."""
    monkeypatch.setattr(SaveExchanges, "run", failing)
    told = mock.Mock()
    compiled(state_of_one_program(), later=program())
    warm = state_of_one_program()
    warm.tell_dropped = told
    compiled(warm)
    assert warm.dropped == [] and told.call_count == 1
    assert [one.pass_name for _, one in warm.journal.dropped()] == ["save_exchanges"]


def test_a_program_with_other_options_and_one_compiled_here_are_not_told(monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(SaveExchanges, "run", failing)
        compiled(state_of_one_program(), joint=program())
    assert compiled(state_of_one_program(chunks=3)).dropped == []
    assert compiled(state_of_one_program(), joint=program()).dropped == []


def test_a_pass_that_is_switched_off_makes_no_difference_between_ranks():
    """It counted as left out where the code was compiled, and not where it came from a cache."""
    off = {"disable_passes": ("save_exchanges",)}
    cold = compiled(state_of_one_program(**off), joint=program())
    warm = compiled(state_of_one_program(**off))
    assert cold.dropped == warm.dropped == [] and plan_of(cold) == plan_of(warm)


def test_nothing_is_noted_where_inductor_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(SaveExchanges, "run", failing)
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(state_of_one_program(), joint=program())
    assert not (tmp_path / "megamoe").exists()
