"""The bias on the choice of experts moves by the tokens that were trained on, in every layer."""

import numpy as np
import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
from hypothesis import given
from hypothesis import strategies as st
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.config import Optimizer

from tests.integration.titan_jobs import OURS, STEPS, STOCK, VALIDATES, train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.layout import KEYS, MODELS
from torchtitan_integration.routing import build_optimizers

EXPERTS = 4
COUNTS = st.lists(st.integers(0, 60), min_size=EXPERTS, max_size=EXPERTS)


class OneRank:
    """Degrees of a job on one rank."""

    ep_enabled = pp_enabled = False

    def get_optional_mesh(self, name):
        return None


class Model(torch.nn.Module):
    """Layers that have no more than a bias and a counter."""

    def __init__(self, *coefficients):
        super().__init__()
        self.layers = torch.nn.ModuleDict()
        for number, coefficient in enumerate(coefficients):
            block = torch.nn.Module()
            block.moe_enabled, block.moe = True, torch.nn.Linear(1, 1)
            block.moe.load_balance_coeff = coefficient
            bias = None if coefficient is None else torch.zeros(EXPERTS)
            block.moe.register_buffer("expert_bias", bias)
            block.moe.register_buffer("tokens_per_expert", torch.zeros(EXPERTS))
            self.layers[str(number)] = block

    def forward(self, *counts):
        for block, rows in zip(self.layers.values(), counts, strict=True):
            block.moe.tokens_per_expert.add_(torch.tensor(rows, dtype=torch.float32))

    def bias(self):
        found = [block.moe.expert_bias for block in self.layers.values()]
        return [None if bias is None else bias.tolist() for bias in found]


def optimizer_of(model, build=build_optimizers):
    return build([model], Optimizer(implementation="for-loop"), OneRank())


def moved(bias, counts, coefficient):
    """Return the bias after a step, by the formula, in float64."""
    counts = np.asarray(counts, dtype=np.float64)
    change = coefficient * np.sign(counts.mean(-1, keepdims=True) - counts)
    return np.asarray(bias, dtype=np.float64) + change - change.mean(-1, keepdims=True)


@given(COUNTS, COUNTS)
def test_where_every_layer_is_balanced_it_is_as_torchtitan_does(first, second):
    ours, theirs = Model(1e-3, 1e-3), Model(1e-3, 1e-3)
    steps = (
        optimizer_of(ours),
        optimizer_of(theirs, build_optimizers_with_moe_load_balancing),
    )
    for model, optimizer in zip((ours, theirs), steps, strict=True):
        for counts in ((first, second), (second, first)):
            model(*counts)
            optimizer.step()
    assert ours.bias() == theirs.bias()


@given(COUNTS, st.permutations([None, 1e-3, 2e-2]))
def test_a_layer_without_a_coefficient_stops_no_other(counts, coefficients):
    """torchtitan looks at the first layer, and leaves where it meets one without."""
    model = Model(*coefficients)
    model(counts, counts, counts)
    optimizer_of(model).step()
    for coefficient, bias in zip(coefficients, model.bias(), strict=True):
        if coefficient is None:
            assert bias is None
        else:
            assert np.allclose(bias, moved(0.0, counts, coefficient), atol=1e-8)
    left = [block.moe.tokens_per_expert.sum().item() for block in model.layers.values()]
    assert left == [0, 0, 0]


@pytest.mark.parametrize("evaluating", ["eval", "no_grad"])
def test_tokens_that_train_nothing_are_not_counted(evaluating):
    model = Model(1e-3)
    optimizer_of(model)
    model([4, 0, 1, 1])
    with torch.set_grad_enabled(evaluating != "no_grad"):
        model.train(evaluating != "eval")([0, 90, 0, 0])
        with pytest.raises(ValueError):
            model([0, 0, 90, 0], [0, 0, 0, 90])
    model.train()([1, 1, 0, 0])
    assert model.layers["0"].moe.tokens_per_expert.tolist() == [5, 1, 1, 1]


@pytest.mark.parametrize("model", exhaustive_but(["qwen3"], MODELS))
def test_the_bias_of_a_job_is_the_formula_of_all_ranks_choices(two_ranks, tmp_path, model):
    """Qwen3's experts were never balanced, and tokens of validation moved those of the others."""
    name = {KEYS["model"]: model, "activation_checkpoint.mode": "none"}
    plain = train(two_ranks, 2, tmp_path / "plain", name, STOCK)
    ours = train(two_ranks, 2, tmp_path / "ours", name, OURS)
    validating = train(two_ranks, 2, tmp_path / "validating", name, OURS, VALIDATES)

    bias = 0.0
    for step in range(STEPS):
        choices = np.add(*(rank.choices[step] for rank in plain))
        assert np.ptp(choices, axis=1).min() > 0  # else nothing would move
        bias = moved(bias, choices, 1e-3)
        assert [np.allclose(rank.bias[step], bias, atol=1e-8) for rank in plain] == [True, True]
    for rank, other, third in zip(plain, ours, validating, strict=True):
        assert rank.bias == other.bias == third.bias
        assert rank.steps == other.steps == third.steps
    assert not ours[0].validated and len(validating[0].validated) == STEPS
