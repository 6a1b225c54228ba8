"""Products with weights beside the common functions: any axes, transposed, and what stays float."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq


class Contracts(nn.Module):
    """Multiplies by weights in functions that take any axes."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Parameter(torch.randn(3, 4, 5)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensordot(torch.einsum("ngi,gio->ngo", x, self.mix), self.out, 1)


def test_contractions_of_any_axes_are_quantized() -> None:
    model, x = Contracts(), torch.randn(6, 3, 4)
    torchq.quantize_(model, example=x)
    torchq.calibrate(model, [x], progress=False)
    first, second = model.mix_call, model.out_call
    y = torch.einsum("ngi,gio->ngo", first.input_quantizer(x), first.weight_quantizer(model.mix))
    expected = second.input_quantizer(y).matmul(second.weight_quantizer(model.out))
    torch.testing.assert_close(model(x), expected)  # The same sums in another order.
    assert first.weight_quantizer.amax.dim() == 0


class Chains(nn.Module):
    """Multiplies by weights in ways that have no quantized form."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.bilinear(x, x, self.a[None]) + torch.einsum("ni,ij,jk->nk", x, self.a, self.b)


def test_products_that_no_quantizer_reaches_are_reported() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Chains())
    (skipped,) = torchq.plan(model, example=torch.randn(2, 4)).skipped
    text = (
        "its forward multiplies by a weight in bilinear and multiplies by a weight in einsum, "
        "which stays float"
    )
    assert (skipped.name, skipped.reason) == ("1", text)


class DynamicFilter(nn.Module):
    """Computes the kernel of a convolution from its input, as dynamic filter networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(3, 27)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.generator(x.mean((0, 2, 3))).view(3, 3, 3, 1))


class Table(nn.Module):
    """Looks up rows of a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.embedding(x, self.rows))
        return out


class Blurs(nn.Module):
    """Convolves with a fixed kernel, as anti-aliased networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.full((3, 1, 3, 3), 1 / 9))
        self.head = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.conv2d(x, self.kernel, groups=3))
        return out


class Convolves(nn.Module):
    """Calls the general convolution of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.head = nn.Parameter(torch.randn(3, 3, 1, 1)), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        options = ((1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        out: Tensor = self.head(torch.convolution(x, self.kernel, None, *options))
        return out


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Blurs(), "calls conv2d with a weight that is no parameter"),
        (Convolves(), "multiplies by a weight in convolution"),
        (DynamicFilter(), "computes the weight of conv2d from its input"),
        (Table(), "looks up rows of a parameter with F.embedding"),
    ],
)
@pytest.mark.filterwarnings("ignore:.* only .* quantized")
def test_weights_in_other_places_are_reported(model: nn.Module, text: str) -> None:
    x = torch.randint(0, 5, (2, 3)) if isinstance(model, Table) else torch.randn(2, 3, 8, 8)
    (skipped,) = torchq.plan(model, example=x).skipped
    assert (skipped.name, skipped.reason) == ("", f"its forward {text}, which stays float")


class ReadsTransposed(nn.Module):
    """Multiplies the weight of a child by its input, as Mamba does; nothing calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.steps = nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.steps.weight @ self.first(x).transpose(1, 2)


def test_a_layer_whose_weight_another_product_uses_holds_its_quantizers() -> None:
    model, x = ReadsTransposed().eval(), torch.randn(2, 3, 4)
    assert not torchq.quantize_(model, example=x).skipped
    torchq.calibrate(model, [x], progress=False)
    steps: Any = model.steps
    transposed = steps.input_quantizer(model.first(x).transpose(1, 2))
    expected = steps.weight_quantizer(steps.weight) @ transposed
    assert torch.equal(model(x), expected)
    # Two float32 orders of the same sums.
    torch.testing.assert_close(torchq.deploy(model, x)(x), expected)
