"""Zeros of a pruned network stay zeros: runtimes skip them, and 2:4 kernels need them in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.fusion.blocks.mobileone import MobileOne
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import error, norms, outputs, randomized
from torchq.fusion import fuse_
from torchq.fusion.modules import is_layer
from torchq.swap import quantize_
from torchq.workflow import calibrate


def two_of_four(weight: Tensor) -> Tensor:
    """A mask that keeps the two largest of four neighbours along the input channels."""
    flat = weight.flatten(1)
    groups = flat.detach().abs().reshape(flat.shape[0], -1, 4)
    kept = groups.topk(2, -1).indices
    mask = torch.zeros_like(groups).scatter(-1, kept, 1.0)
    return mask.reshape(weight.shape)


def sparse_net() -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A network whose layers are all 2:4 sparse, pruned with torch's masks made permanent."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3),
        nn.BatchNorm2d(8),
        nn.ConvTranspose2d(8, 8, 2, groups=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 1),
        nn.Flatten(),
        nn.Linear(8 * 81, 16),
        nn.BatchNorm1d(16),
    )
    zeros = {}
    for path, layer in model.named_modules():
        if is_layer(layer):
            prune.custom_from_mask(layer, "weight", two_of_four(layer.weight))
            prune.remove(layer, "weight")
            zeros[path] = layer.weight == 0
            assert zeros[path].double().mean().item() == 0.5
    return randomized(model), zeros


IMAGE = torch.randn(4, 4, 10, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("quantized", [False, True])
def test_folding_keeps_the_zeros_of_2_to_4_sparsity(quantized: bool) -> None:
    model, zeros = sparse_net()
    if quantized:
        fuse_(model)
        quantize_(model)
        calibrate(model, [IMAGE], progress=False)
        for path in zeros:
            layer = model.get_submodule(path)
            codes = layer.weight_quantizer(layer.weight)
            assert torch.equal(codes[zeros[path]], torch.zeros_like(codes[zeros[path]]))
        return
    want = outputs(model, IMAGE)
    assert len(fuse_(model, IMAGE).require_all().fused) == 4
    assert norms(model) == []
    for path, mask in zeros.items():
        assert torch.equal(model.get_submodule(path).weight == 0, mask)
    assert error(outputs(model, IMAGE), want) <= 1e-5


def test_folding_into_a_calibrated_sparse_layer_keeps_its_zeros() -> None:
    model, zeros = sparse_net()
    quantize_(model)
    calibrate(model, [IMAGE], progress=False)
    fuse_(model, IMAGE)
    for path, mask in zeros.items():
        assert torch.equal(model.get_submodule(path).weight == 0, mask)


@pytest.mark.parametrize("block", [RepVGGBlock(8, 8), MobileOne(8, 8)], ids=["repvgg", "mobileone"])
def test_a_merged_kernel_is_zero_where_all_branches_are(block: nn.Module) -> None:
    """Only the identity and the 1x1 branches add taps, at the centre."""
    torch.manual_seed(0)
    model = randomized(nn.Sequential(block))
    mask = torch.zeros(8, 8, 3, 3, dtype=torch.bool)
    mask[:, :, 0] = True
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
            layer.weight.data[mask] = 0.0
    fuse_(model)
    merged = [m for m in model.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert torch.equal(merged[0].weight == 0, mask)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_weight_in_a_sparse_layout_is_refused_with_the_remedy() -> None:
    torch.manual_seed(0)
    model = randomized(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    dense = model[0].weight.detach() * two_of_four(model[0].weight)
    model[0].weight = nn.Parameter(dense.to_sparse_csr())
    x = torch.randn(3, 8)
    want = outputs(model, x)
    reason = fuse_(model, x).reason("1")
    assert reason is not None
    assert "has a weight stored as torch.sparse_csr; make it dense with to_dense() first" in reason
    assert torch.equal(outputs(model, x), want)
