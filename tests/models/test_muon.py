"""The optimiser of the training: the same steps as torch's, whose products are in bfloat16."""

import pytest
import torch

from models.training.muon import Muon, orthogonal

SHAPES = ((48, 48), (48, 16), (16, 48), (48, 48))


@pytest.mark.parametrize("shape", [(48, 48), (96, 16), (16, 96)])
def test_singular_values_become_nearly_equal(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    values = torch.linalg.svdvals(orthogonal(torch.randn(3, *shape)))
    assert 0.3 < values.min() <= values.max() < 1.3


def test_it_takes_the_steps_that_torchs_own_takes() -> None:
    """Up to the rounding of bfloat16, over several steps, with momentum and weight decay."""
    torch.manual_seed(2)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(parameter.detach().clone()) for parameter in ours]
    optimisers = Muon(ours, 0.02, weight_decay=0.1), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    before = [parameter.detach().clone() for parameter in ours]
    for _ in range(4):
        for own, other in zip(ours, theirs, strict=True):
            own.grad = torch.randn_like(own)
            other.grad = own.grad.clone()
        for optimiser in optimisers:
            optimiser.step()
    for own, other, start in zip(ours, theirs, before, strict=True):
        moved = (other - start).norm()
        assert (own - other).norm() < 0.02 * moved


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2)]
    parameters[0].grad = torch.eye(4)
    Muon(parameters, 0.1).step()
    assert not torch.equal(parameters[0], torch.ones(4, 4))
    assert torch.equal(parameters[1], torch.ones(4, 4))
