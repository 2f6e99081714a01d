"""What a MoE layer computes, in float64 and in the plainest way: one expert after the other.

Contract
    Tokens go to the experts the layer itself chooses for them in float32; all else is float64.
    One rank: exchanges move nothing and are left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.link.layer import MoELayer

Tensors = dict[str, torch.Tensor]
"""By name: "out", "input_grad" and the parameters' names for their gradients."""


def exact_results(layer: MoELayer, tokens_TH: torch.Tensor, grad_TH: torch.Tensor) -> Tensors:
    """Return output and gradients of the layer, float64."""
    weights = {
        name: parameter.detach().double().requires_grad_()
        for name, parameter in layer.named_parameters()
    }
    x_TH = tokens_TH.detach().double().requires_grad_()
    with torch.no_grad():
        probabilities = torch.softmax(tokens_TH.float() @ layer.router, dim=-1)
        chosen = torch.topk(probabilities, layer.case.top_k, dim=-1).indices
    scores = torch.softmax(x_TH @ weights["router"], dim=-1).gather(1, chosen)

    out_TH = torch.zeros_like(x_TH)
    for expert in range(layer.case.experts):
        token, choice = (chosen == expert).nonzero(as_tuple=True)
        rows = x_TH[token]
        gate, up = rows @ weights["gate"][expert], rows @ weights["up"][expert]
        done = (F.silu(gate) * up) @ weights["down"][expert]
        out_TH = out_TH.index_add(0, token, done * scores[token, choice][:, None])
    out_TH.backward(grad_TH.double())
    grads = {name: weight.grad for name, weight in weights.items()}
    return {"out": out_TH.detach(), "input_grad": x_TH.grad, **grads}


def relative_errors(found: Tensors, exact: Tensors) -> dict[str, float]:
    """Return |found - exact| / |exact| (2-norms) of every tensor; NaN where one has a NaN."""
    return {
        name: float((found[name].double() - wanted).norm() / wanted.norm())
        for name, wanted in exact.items()
    }
