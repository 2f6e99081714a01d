"""What a program has in force around it while it is compiled takes no part in our work."""

import logging
import logging.handlers
import queue
import threading

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from moe_compile import backend
from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig, what_to_lower
from moe_compile.first_run import agreed_callable
from moe_compile.report.process_report import REPORT
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts

OPTIONS = {"megamoe.codegen": "fx", "megamoe.chunks": 2, "megamoe.strict": True}


@pytest.mark.parametrize("are_forbidden", [False, True])
def test_hooks_on_saved_tensors_see_none_of_ours(fake_ranks, are_forbidden):
    """Checkpointing counted what the proof saved for gradients of its own."""
    layer = GroupedExperts(16, 24, 8, 2, fake_ranks)
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    gm = dynamo_graphs(layer, x)[0]
    packed = []
    hooks = (
        disable_saved_tensors_hooks("not here")
        if are_forbidden
        else saved_tensors_hooks(packed.append, lambda kept: kept)
    )
    with hooks:
        _, compilation = rewrite(gm, MegaMoEConfig(chunks=2, hardware="cpu", strict=True))
    assert [region.verdict for region in compilation.regions] == ["chunked"]
    assert not packed


def in_a_thread(rank):
    """Compile a layer twice in a thread of its own; return verdicts, and what was warned of."""
    torch._dynamo.reset()
    layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)
    compiled = torch.compile(layer, backend="megamoe", options={**OPTIONS, "megamoe.strict": False})
    seen, warned = [], logging.handlers.QueueHandler(queue.SimpleQueue())

    def run():
        for _ in range(2):
            torch._dynamo.reset()
            before = len(REPORT.compilations)
            compiled(torch.randn(32, 16, dtype=torch.bfloat16))
            seen.append([r.verdict for c in REPORT.compilations[before:] for r in c.regions])

    thread = threading.Thread(target=run, name="training")
    backend.LOG.addHandler(warned)
    thread.start()
    thread.join()
    backend.LOG.removeHandler(warned)
    said = [warned.queue.get().getMessage() for _ in range(warned.queue.qsize())]
    return seen, [text for text in said if "capture_scalar_outputs" in text]


def test_a_thread_that_trains_captures_host_reads_too(mirrored_ranks):
    """Torch keeps Dynamo's settings per thread: where it trained, no region was found."""
    for (first, second), said in mirrored_ranks.run(in_a_thread):
        assert second == ["chunked"]
        assert bool(said) is (not first)
        assert all("thread 'training'" in text for text in said)


def too_large(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_an_error_of_too_little_memory_names_the_options_that_hold_more():
    told = what_to_lower(MegaMoEConfig(nodes="exact"))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        agreed_callable(too_large, {}, None, told)()
    (note,) = caught.value.__notes__
    assert "max_memory_increase = 0.3 lets" in note and "nodes = 'exact': in two hops" in note
    nothing = MegaMoEConfig(schedule=False, recompute="model")
    assert what_to_lower(nothing) == ""
    assert "row_room = 1.5: " in what_to_lower(MegaMoEConfig(host_reads="none", row_room=1.5))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        agreed_callable(too_large, {}, None)()
    assert not hasattr(caught.value, "__notes__")
