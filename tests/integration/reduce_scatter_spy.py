"""What FSDP modules are given for a reduce-scatter, counted in the ranks of a pool."""

from unittest import mock

from torch.distributed.fsdp import FSDPModule

from torchtitan_integration.fsdp import RoundedReduceScatter

SPIES = []


def watch(rank):
    """From now on, count; anew where it was counted before."""
    if SPIES:
        SPIES[-1].reset_mock()
        return
    given = FSDPModule.set_custom_reduce_scatter
    spy = mock.patch.object(
        FSDPModule, "set_custom_reduce_scatter", autospec=True, side_effect=given
    )
    SPIES.append(spy.start())


def count(rank):
    """Return how many modules were given ours since the last count."""
    calls = SPIES[-1].call_args_list
    number = sum(isinstance(call.args[1], RoundedReduceScatter) for call in calls)
    SPIES[-1].reset_mock()
    return number
