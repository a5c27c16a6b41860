"""The net that makes slices finer: what it is untrained, and what no training can change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Net

from volpipe.models.superres import REACH, superres


def stirred(factor: int, seed: int = 1) -> Net:
    """Return a small net whose last layer was moved off zero."""
    net: Net = superres(factor=factor, features=4, num_blocks=1)
    with torch.no_grad():
        net.last.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return net


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_untrained_it_gives_back_the_polynomial_whose_means_it_was_given(factor: int) -> None:
    faces = np.linspace(-1.0, 1.0, 12 * factor + 1)
    integral = np.polynomial.Polynomial([0.0, 0.3, -0.2, 0.4, 0.1, -0.3])  # of a polynomial of degree 4
    fine = np.diff(integral(faces)) / np.diff(faces)
    coarse = torch.from_numpy(fine.reshape(-1, factor).mean(axis=1)).float()
    net: Net = superres(factor=factor, features=2, num_blocks=1)
    given = coarse[None, None, :, None, None].expand(1, 1, -1, 4, 4)
    out = net(given)[0, 0, :, 1, 2].detach().numpy()
    inside = slice(REACH * factor, -REACH * factor)
    np.testing.assert_allclose(out[inside], fine[inside], atol=1e-5)
    assert np.abs(out - np.repeat(coarse.numpy(), factor))[inside].max() > 0.01  # it does not merely repeat


@pytest.mark.parametrize("factor", [2, 3, 4])
def test_the_mean_of_the_finer_slices_is_the_slice_that_was_given(factor: int) -> None:
    given = torch.rand(2, 1, 5, 6, 8, generator=torch.Generator().manual_seed(3)) * 2 - 1
    net = stirred(factor)
    out = net(given).detach()
    assert out.shape == (2, 1, 5 * factor, 6, 8)
    torch.testing.assert_close(out.unflatten(2, (5, factor)).mean(dim=3), given, rtol=0, atol=1e-5)
    assert (out - superres(factor=factor, features=4, num_blocks=1)(given)).abs().max() > 0.05


def test_the_correction_turns_with_the_fold_not_the_window() -> None:
    """Voxels come out where they went in: a fold that was put back in another order would tear the picture."""
    given = torch.rand(1, 1, 12, 40, 40, generator=torch.Generator().manual_seed(4))
    net = stirred(2)
    z, y, x = net.volpipe["halo"]
    whole = net(given).detach()
    part = net(given[:, :, 2:, 2:, 4:]).detach()  # moved by whole folds
    inner = (..., slice(2 * z, -2 * z), slice(y + 1, -y - 1), slice(x + 1, -x - 1))
    torch.testing.assert_close(part[inner], whole[..., 4:, 2:, 4:][inner], rtol=0, atol=1e-5)


@pytest.mark.parametrize("option", ["features", "num_blocks", "fold"])
def test_sizes_below_one_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"superres: {option} is 0; give a whole number from 1 up"):
        superres(**{option: 0})


def test_a_factor_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="superres: factor is 1; give a whole number from 2 up"):
        superres(factor=1)
