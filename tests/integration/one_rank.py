"""Any layout against the same job on one rank, without parallelism: what both train must agree.

Both start from the same weights and step over the same sequences, in float32, without clipping;
the one rank is torchtitan's own and not compiled. Each rank writes whole tensors to a file.
"""

import contextlib
import dataclasses
from collections import defaultdict
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.integration.titan_jobs import ONE_TEXT, STOCK, keys_of, train
from torchtitan_integration.layout import Layout

GLOBAL_BATCH = 8
STEPS = 3
OF_GRADIENTS, OF_CHANGES = 1e-4, 1e-3
"""How far a gradient of the first step, and the change of a parameter after all, may be off."""
STEEPER = 10
"""So many times Adam's rate has plain descent: at that rate some weights change by a last digit."""
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTER = "tokens_per_expert"
PIPELINE = "float32_pipeline"
EXACT = {
    "model.flavor": "float32",
    "training.seq_len": 64,
    "training.steps": STEPS,
    "training.max_norm": 1e9,
    "training.global_batch_size": GLOBAL_BATCH,
    "optimizer.lr": 1e-3,
    "optimizer.eps": 1e-4,
    "lr_scheduler.warmup_steps": 0,
    **ONE_TEXT,
}


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Writes what a rank trained into a file of a folder; entered around the training."""

    folder: Path
    descends: bool
    """Whether steps are plain gradient descent, which torchtitan's optimizers do not offer."""

    @contextlib.contextmanager
    def __call__(self, rank, trainer):
        seen = _Seen(trainer)
        if self.descends:
            _descend(trainer)
        try:
            yield
            torch.save(seen.results(), self.folder / f"rank{rank}.pt")
        finally:
            for hook in seen.hooks:
                hook.remove()


class _Seen:
    """Collects a job's tensors."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.gradients, self.before, self.choices = {}, {}, []
        # hooks of all optimizers run before an optimizer's own, which clears the counters
        self.hooks = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def results(self):
        return {
            "gradients": self.gradients,
            "before": self.before,
            "after": {name: _whole(p) for name, p in self._parameters()},
            "buffers": {n: b.clone() for n, b in self._buffers() if COUNTER not in n},
            "moments": self._moments(),
            "choices": self.choices,
        }

    def _before_step(self, optimizer, args, kwargs):
        if optimizer is not self.trainer.optimizers:
            return
        self.choices.append({n: b.clone() for n, b in self._buffers() if COUNTER in n})
        if not self.before:
            self.before = {name: _whole(p) for name, p in self._parameters()}
            self.gradients = {name: _whole(p.grad) for name, p in self._parameters()}

    def _after_step(self, optimizer, args, kwargs):
        if optimizer is self.trainer.optimizers:
            for name, counter in self._buffers():
                if COUNTER in name:
                    counter.zero_()  # so does torchtitan, where it balances

    def _moments(self):
        states = {p: s for o in self.trainer.optimizers.optimizers for p, s in o.state.items()}
        return {
            f"{name} {kind}": _whole(states[p][kind])
            for name, p in self._parameters()
            for kind in MOMENTS
            if kind in states.get(p, ())
        }

    def _parameters(self):
        return self._named("named_parameters")

    def _buffers(self):
        named = self._named("named_buffers")
        return ((name, b) for name, b in named if name.endswith((COUNTER, "expert_bias")))

    def _named(self, method):
        for part in self.trainer.model_parts:
            for name, tensor in getattr(part, method)():
                yield name.replace("_checkpoint_wrapped_module.", ""), tensor


def _whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _descend(trainer):
    """Have the job step by gradient descent."""
    container, rate = trainer.optimizers, STEEPER * trainer.job_config.optimizer.lr
    container.optimizers = [
        torch.optim.SGD(optimizer.param_groups[0]["params"], lr=rate)
        for optimizer in container.optimizers
    ]


# --- in the test ----------------------------------------------------------------------------------


def settings_of(layout):
    """Return a job on `layout`, by TOML key, with the same sequences a step as on any other."""
    settings = keys_of(layout) | EXACT
    settings |= {"training.local_batch_size": GLOBAL_BATCH // shards_of(layout)}
    return settings | ({"model.flavor": PIPELINE} if layout.pp > 1 else {})


def shards_of(layout):
    return layout.dp_replicate * layout.dp_shard


def trained(pool, ranks, folder, *changes, descends=False):
    """Train; return each rank's JobResult and the tensors that it wrote."""
    folder.mkdir(exist_ok=True)
    results = train(pool, ranks, folder, *changes, recorder=Recorder(folder, descends))
    return results, [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


def alone(layout, settings):
    """Return the job of `settings` on one rank, without parallelism."""
    one = settings_of(Layout(model=layout.model, dp_shard=1, checkpointing="none"))
    kept = {key: settings[key] for key in EXACT}
    return {**one, **kept, **STOCK}


def faults(ranks, one, layout, *, of_gradients=OF_GRADIENTS, of_changes=OF_CHANGES):
    """Return what any of the ranks has that is not one rank's, in words."""
    found = [f"{n} is on no rank" for n in one["after"] if not any(n in r["after"] for r in ranks)]
    found += _other_choices(ranks, one, layout)
    for number, rank in enumerate(ranks):
        pairs = [(name, x, one["gradients"][name]) for name, x in rank["gradients"].items()]
        found += _far(f"gradient on rank {number}", pairs, of_gradients)
        changes = (
            (name, x - rank["before"][name], one["after"][name] - one["before"][name])
            for name, x in rank["after"].items()
        )
        found += _far(f"change on rank {number}", changes, of_changes)
        for kind in ("buffers", "moments"):
            pairs = [(name, x, one[kind][name]) for name, x in rank[kind].items()]
            found += _far(f"{kind} on rank {number}", pairs, of_changes)
    return found


def _far(what, pairs, bound):
    for name, mine, expected in pairs:
        off, size = (mine - expected).norm(), expected.norm()
        if not off <= bound * size:
            yield f"{what}: {name} is {off / size:.1e} off"


def _other_choices(ranks, one, layout):
    """Yield where experts did not get as many tokens as on one rank: were any chosen otherwise?"""
    for step, expected in enumerate(one["choices"]):
        counted = defaultdict(int)
        for rank in ranks:
            for name, rows in rank["choices"][step].items():
                counted[name] += rows / layout.tp  # ranks of a TP group count the same tokens
        for name, rows in expected.items():
            if not torch.equal(counted[name], rows):
                yield f"step {step + 1}: {name} is {counted[name].tolist()}, not {rows.tolist()}"
