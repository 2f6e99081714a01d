"""Programs that other backends compile, in a process with megamoe or without; prints one JSON."""

import importlib
import itertools
import json
import sys
import types

import torch
import torch._functorch.config
import torch._inductor.config
import torch.distributed as dist

NUMBERS = itertools.count()
SIZES = (4, 6, 9, 4)
"""Of the inputs, one after another: others cost one compilation more, once."""


def loss(x):
    """Read the host, as losses do that are logged."""
    scaled = x.sin().sum()
    return x * scaled.item() + 1


def picked(x):
    """Pick parts of a list by numbers of a tensor."""
    parts = (x * 2).split(2)
    return torch.cat([parts[i] for i in torch.arange(2).flip(0).tolist()]).cos()


def capacity(x):
    """Compute a number of slots of tensors, as DeepSpeed does."""
    slots = torch.ceil((x.shape[0] / 4) * torch.tensor(2.0)).to(torch.int64)
    return x.new_zeros(int(slots)) + x.sum()


READ_THE_HOST = (loss, picked, capacity)


def positive(x):
    """Have a shape that depends on data."""
    return x[x.sin() > 0].cos().sum() + x


def branching(x):
    """Branch on a value."""
    return x + 1 if x.sum() > 0 else x - 1


def shaped(x):
    """Depend on a size."""
    return (x * x.shape[0]).sin()


OTHERS = (positive, branching, shaped)


def counted(function, backend="eager", sizes=SIZES, **settings):
    """Return how many graphs and frames Dynamo compiled for a function, and its values."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    compiled = torch.compile(function, backend=backend, **settings)
    values = [compiled(torch.arange(1.0, size + 1)).tolist() for size in sizes]
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "frames": dict(counters["frames"]),
        "values": values,
    }


def copied(function):
    """Return `function` with code of another name, for which Dynamo has compiled nothing."""
    name = f"{function.__name__}_{next(NUMBERS)}"
    return types.FunctionType(function.__code__.replace(co_name=name), globals(), name)


def counted_apart(function):
    """Return the same of a function that has host reads in graphs switched off for itself."""
    apart = torch._dynamo.patch_dynamo_config(capture_scalar_outputs=False)
    return counted(apart(copied(function)))


def optimizer_steps():
    """Return the same of a compiled step of an optimizer."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1)

    def step(x):
        weight.grad = x.clone()
        optimizer.step()
        return weight.detach().clone()

    return counted(step, sizes=(4, 4, 4))


def all_counted():
    """Return what each program took, and under which settings of torch.

    Without a capacity that torch computes wrong, or not at all, with host reads in graphs.
    """
    readers = READ_THE_HOST[: 2 if torch._dynamo.config.capture_scalar_outputs else 3]
    return {
        "others": {
            **{f.__name__: counted(f) for f in OTHERS},
            "traced": counted(copied(positive), "aot_eager"),
            "generated": counted(copied(shaped), "inductor"),
            "beyond the limit": counted(copied(shaped), sizes=range(3, 15), dynamic=False),
            "optimizer": optimizer_steps(),
        },
        "readers": {f.__name__: counted(f) for f in readers},
        "readers apart": {f.__name__: counted_apart(f) for f in READ_THE_HOST},
        "settings": {
            module.__name__: {key: repr(value) for key, value in module.get_config_copy().items()}
            for module in (torch._dynamo.config, torch._inductor.config, torch._functorch.config)
        },
    }


def compile_a_layer(**settings):
    """Compile a layer by megamoe and train it; return what became of its regions.

    With `settings` host reads are switched off once the backend is loaded.
    """
    layer = importlib.import_module("tests.layers").GroupedExperts(16, 24, 4, 2, dist.group.WORLD)
    options = {"megamoe.codegen": "fx", "megamoe.chunks": 2}
    compiled = torch.compile(layer, backend="megamoe", options=options, **settings)
    torch._dynamo.config.capture_scalar_outputs &= not settings
    for tokens in (32, 48):
        x = torch.randn(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
        compiled(x).sum().backward()
    report = importlib.import_module("moe_compile.report.process_report").REPORT
    return [region.verdict for c in report.compilations for region in c.regions]


if __name__ == "__main__":
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    whole = {"fullgraph": True} if sys.argv[1] == "switched off" else {}
    regions = compile_a_layer(**whole) if sys.argv[1] != "alone" else []
    sys.stdout.write(f"RESULT {json.dumps({'regions': regions, **all_counted()})}\n")
    dist.destroy_process_group()
