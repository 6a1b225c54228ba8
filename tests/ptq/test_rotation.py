"""QuaRot: the float model stays, and no channel has outliers (Ashkboos et al., 2024)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError, QuantizationError
from torchq.ptq import hadamard_
from torchq.ptq.rotation.orthogonal import hadamard_matrix, random_rotation


class RMSNorm(nn.Module):
    """The norm of another library; Gemma's multiplies by one more than its weight."""

    def __init__(self, size: int, offset: float = 0.0, power: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.offset, self.power = offset, power

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return y * (self.weight**self.power + self.offset)


class Layer(nn.Module):
    """Attention whose heads share values, and SwiGLU; ``fused`` makes q, k and v at once."""

    def __init__(self, size: int, norm: Any, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.size, self.fused = norm(size), norm(size), size, fused
        if fused:
            self.qkv = nn.Linear(size, 2 * size)
        else:
            self.q, self.k, self.v = (nn.Linear(size, n) for n in (size, size // 2, size // 2))
        self.out, self.gate, self.up = (nn.Linear(size, n) for n in (size, 24, 24))
        self.down = nn.Linear(24, size)

    def forward(self, x: Tensor) -> Tensor:
        y, s = self.norm1(x), self.size
        if self.fused:
            packed = self.qkv(y)
            parts = packed[..., :s], packed[..., s : s + s // 2], packed[..., s + s // 2 :]
        else:
            parts = self.q(y), self.k(y), self.v(y)
        q, k, v = (part.unflatten(-1, (-1, s // 4)).transpose(1, 2) for part in parts)
        # Like positions, this does not commute with rotations.
        q = q * torch.linspace(0.5, 2, s // 4, dtype=q.dtype)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    def __init__(
        self, size: int = 16, norm: Any = RMSNorm, *, tied: bool = False, fused: bool = False
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(32, size)
        self.layers = nn.ModuleList(Layer(size, norm, fused) for _ in range(2))
        self.norm, self.head = norm(size), nn.Linear(size, 32, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def net(*args: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = Net(*args, **kwargs).eval()
    with torch.no_grad():
        model.table.weight[:, 3] *= 20.0  # an outlier channel, as in language models
    return model


TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 24, 28, 36, 44, 48, 60, 64, 96, 112, 896])
def test_hadamard_matrices_are_orthogonal(size: int) -> None:
    matrix = hadamard_matrix(size)
    assert matrix is not None and bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


def test_other_sizes_get_a_random_rotation() -> None:
    assert hadamard_matrix(14) is None and hadamard_matrix(0) is None
    matrix, is_hadamard = random_rotation(14, 0)
    assert not is_hadamard
    # Entries of products in float64 carry an error of about size * 1e-16.
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(14).double(), rtol=0, atol=1e-14)
    assert not torch.equal(matrix, random_rotation(14, 1)[0])
    assert torch.equal(matrix, random_rotation(14, 0)[0])


@pytest.mark.parametrize("size", [16, 12, 8, 28])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_output_stays_and_weights_follow_the_equations(size: int, offset: float) -> None:
    """W diag(g) Q for readers, Q^T W and Q^T b for writers, E Q for the table."""

    def norm(n: int) -> nn.Module:
        return RMSNorm(n, offset)

    model, before = net(size, norm), net(size, norm)
    report = hadamard_(model, TOKENS, heads=False, seed=3)
    assert report.error < 1e-5 and report.is_hadamard and report.size == size
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), before(TOKENS), rtol=1e-4, atol=1e-4)
    q = random_rotation(size, 3)[0]
    old, new = before.layers[1], model.layers[1]
    gain = old.norm2.weight + offset
    expected = {
        new.up.weight: (old.up.weight * gain).double() @ q,
        new.up.bias: old.up.bias,
        new.down.weight: q.T @ old.down.weight.double(),
        new.down.bias: q.T @ old.down.bias.double(),
        model.table.weight: before.table.weight.double() @ q,
        new.norm2.weight: torch.full((size,), 1 - offset),
    }
    for found, value in expected.items():
        # Computed in float64 and rounded once, but for the gain.
        torch.testing.assert_close(found, value.float(), rtol=1e-6, atol=1e-6)
    writers = tuple(f"layers.{i}.{name}" for i in (0, 1) for name in ("out", "down"))
    assert report.writers == writers


def test_activations_of_four_bits_become_better() -> None:
    errors = []
    for rotated in (False, True):
        model = net(64)
        with torch.no_grad():
            expected = model(TOKENS)
        if rotated:
            report = hadamard_(model, TOKENS)
            assert report.heads == tuple((f"layers.{i}.v", f"layers.{i}.out") for i in (0, 1))
        torchq.quantize_(model, torchq.recipes.integer(8, 4, first_last=8))
        torchq.calibrate(model, [TOKENS], progress=False)
        with torch.no_grad():
            errors.append((model(TOKENS) - expected).norm().item())
    assert errors[1] < 0.6 * errors[0]


def test_online_rotations_protect_the_hardest_inputs(tmp_path: Path) -> None:
    model = net(16)
    with torch.no_grad():
        expected = model(TOKENS)
    report = hadamard_(model, TOKENS, online=True)
    assert report.online == ("layers.0.down", "layers.1.down") and report.error < 1e-5
    assert "2 layers with a rotation before them" in str(report)
    x = torch.zeros(1, 24)
    x[0, 3] = 1.0  # An outlier is spread over its run of 8 channels.
    spread = model.layers[0].down[0](x)
    assert spread.abs().max() < 0.36 and int(spread.count_nonzero()) == 8
    torchq.quantize_(model, torchq.recipes.integer(8, 8))
    torchq.calibrate(model, [TOKENS], progress=False)
    torchq.save(model, tmp_path / "model.pt")
    fresh = net(16)
    hadamard_(fresh, TOKENS, online=True)
    loaded = torchq.load(fresh, tmp_path / "model.pt")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS), model(TOKENS))
        # 8 bits of every input: about 1 % of the outputs.
        assert (model(TOKENS) - expected).norm() < 0.05 * expected.norm()
    broken = net(16)
    with pytest.raises(QuantizationError, match="hadamard_: the float output changed by"):
        hadamard_(broken, TOKENS, online=True, tolerance=0.0)
    assert isinstance(broken.layers[0].down, nn.Linear)
    with pytest.raises(ConfigError, match="hadamard_: got online=True and a quantized model"):
        hadamard_(model, TOKENS, online=True)


def test_tied_tables_are_untied_and_said() -> None:
    model = net(tied=True)
    with torch.no_grad():
        expected = model(TOKENS)
    report = hadamard_(model)
    assert report.untied == ("head",) and model.head.weight is not model.table.weight
    assert "head no longer shares the embedding" in str(report)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_heads_are_left_alone_where_one_layer_makes_more_than_values() -> None:
    model = net(fused=True)
    with torch.no_grad():
        expected = model(TOKENS)
    report = hadamard_(model, TOKENS)
    assert report.heads == () and report.error < 1e-5
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), expected, rtol=1e-4, atol=1e-4)


def test_half_precision_is_rounded_once() -> None:
    model = net().to(torch.bfloat16)
    report = hadamard_(model, TOKENS)
    assert report.error < 8 * torch.finfo(torch.bfloat16).eps
    assert model.head.weight.dtype is torch.bfloat16


class WithPositions(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.table(tokens) + self.norm.weight))


class WithoutHead(Net):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers[0](self.table(tokens))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: net(16, nn.LayerNorm), r"norm1 \(LayerNorm\) works on the residual stream"),
        (lambda: net(16, lambda n: RMSNorm(n, power=2)), "does not multiply by its weight"),
        (lambda: WithPositions().eval(), "got a constant or parameter that is added"),
        (lambda: WithoutHead().eval(), "is an output of the model"),
        (lambda: nn.Sequential(nn.Linear(12, 4)), "got no embedding; expected a language model"),
    ],
)
def test_other_models_are_refused_by_name_and_stay(model: Any, text: str) -> None:
    broken = model()
    before = copy.deepcopy(broken.state_dict())
    example = TOKENS if hasattr(broken, "table") else torch.rand(2, 12)
    with pytest.raises(QuantizationError, match=text):
        hadamard_(broken, example)
    assert all(torch.equal(before[name], t) for name, t in broken.state_dict().items())


def test_calibrated_models_and_small_tolerances_are_refused() -> None:
    model = net(tied=True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(QuantizationError, match="hadamard_: the float output changed by"):
        hadamard_(model, TOKENS, tolerance=0.0)
    assert model.head.weight is model.table.weight
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    torchq.quantize_(model, torchq.recipes.int8())
    torchq.calibrate(model, [TOKENS], progress=False)
    with pytest.raises(ConfigError, match=r"hadamard_: got a calibrated model \(.* has a range\)"):
        hadamard_(model, TOKENS)


def test_llama_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "intermediate_size": 64, "vocab_size": 200}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        expected = model(TOKENS).logits
        report = hadamard_(model)
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-3, atol=1e-4)
    assert len(report.heads) == 2 and report.untied == ("lm_head",)
    assert not model.config.tie_word_embeddings
