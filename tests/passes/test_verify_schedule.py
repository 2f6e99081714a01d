"""Every rule of verify_schedule: kept by good graphs, and each violation named."""

import pytest
import torch
from torch._prims.rng_prims import run_and_save_rng_state
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.config import MegaMoEConfig
from moe_compile.errors import ContractViolation
from moe_compile.graph.effects import is_size_query
from moe_compile.graph.launch_order import record_launch_order
from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import is_launch
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from passes.verify_schedule import VerifySchedule
from tests.scheduled_layers import c10d, one_rank_group

STATE = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"))


def send(x):
    return c10d.all_to_all_single(x, [4], [4], one_rank_group())


def traced(program, mode="fake"):
    one_rank_group()
    return make_fx(program, tracing_mode=mode)(torch.ones(4, 3)).graph


def verify(graph):
    return VerifySchedule().run(graph, STATE)


def asks_for_a_size(x):
    flying = send(x)
    return x + torch.ops.aten.sym_size.int(flying, 0), c10d.wait_tensor(flying)


def waits_twice(x):
    """Without gradients nothing merges what a program waits for twice: the job was ended."""
    flying = send(x)
    return c10d.wait_tensor(flying) + c10d.wait_tensor(flying)


def drops_out(x):
    """As inside a checkpointed function: an operator runs another, and writes no input."""
    launch = send(x)
    _, noisy = run_and_save_rng_state(torch.ops.aten.bernoulli.p, x, 0.5)
    return c10d.wait_tensor(launch), noisy


def writes_after_the_wait(x):
    sent = x + 1
    received = c10d.wait_tensor(send(sent))
    sent.zero_()
    return received + sent


ACCEPTED = {
    "one wait": lambda x: c10d.wait_tensor(send(x)) + x,
    "a wait for a wait": lambda x: c10d.wait_tensor(c10d.wait_tensor(send(x))) + x,
    "returned unawaited": lambda x: (send(x), x + 1),
    "asked for a size in flight": asks_for_a_size,
    "two waits": waits_twice,
    "dropout of what is sent": drops_out,
    "written after the wait": writes_after_the_wait,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_launch_is_accepted(name):
    report = verify(traced(ACCEPTED[name]))
    assert report.measures["num_verified_launches"] == 1
    assert not report.changed


def test_a_launch_that_nothing_reads_needs_no_wait():
    """AOTAutograd leaves such a launch where checkpointing recomputes an exchange in vain."""

    def program(x):
        return x + send(x).view(-1).shape[0]

    graph = traced(program, "symbolic")
    (launch,) = (node for node in graph.nodes if is_launch(node))
    assert launch.users and all(is_size_query(user) or is_view(user) for user in launch.users)
    verify(graph)


def test_a_launch_nobody_waits_for_is_a_violation():
    graph = traced(lambda x: c10d.wait_tensor(send(x)) + x)
    (wait,) = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    with pytest.raises(ContractViolation, match="its result is read by"):
        verify(graph)


def reads_in_flight(x):
    flying = send(x)
    return flying + 1, c10d.wait_tensor(flying)


def reads_a_view_in_flight(x):
    flying = send(x)
    seen = flying.view(-1)[:2] * 2
    return seen, c10d.wait_tensor(flying)


def writes_what_is_sent(x):
    sent = x + 1
    flying = send(sent)
    sent.view(-1)[:2].zero_()
    return c10d.wait_tensor(flying), sent


def drops_out_in_place(x):
    x = x.clone()
    launch = send(x)
    run_and_save_rng_state(torch.ops.aten.bernoulli_.float, x, 0.5)
    return c10d.wait_tensor(launch)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (reads_in_flight, "add: reads all_to_all_single before the wait"),
        (reads_a_view_in_flight, "before the wait"),
        (writes_what_is_sent, "zero_: writes"),
        (drops_out_in_place, "while all_to_all_single"),
    ],
)
def test_what_is_in_flight_is_neither_read_nor_written(program, said):
    with pytest.raises(ContractViolation, match=r"^verify_schedule: ") as raised:
        verify(traced(program))
    assert said in str(raised.value)


def test_collectives_out_of_the_planned_order_are_a_violation():
    graph = traced(lambda x: c10d.wait_tensor(send(x)) + c10d.wait_tensor(send(x + 1)))
    launches = [node for node in graph.nodes if is_launch(node)]
    record_launch_order(launches)
    verify(graph)
    record_launch_order(reversed(launches))
    with pytest.raises(ContractViolation, match="but the plan has it before"):
        verify(graph)
