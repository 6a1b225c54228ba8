"""Quantize a vision transformer by the flags and regular expressions of the published ViT and BERT.

Products of attention have quantizers of their own; ranges of query, key and value become one, those
behind GELU are clipped, and weights are calibrated anew. It knows nothing of torchq. It prints one
JSON line.
"""

import json
import math
import re

import torch
import torch.nn.functional as F
from common import arguments, both_losses, collect_stats, compute_amax, mean_loss
from pytorch_quantization import nn as quant_nn
from pytorch_quantization import utils as quant_utils
from pytorch_quantization.nn import QuantLinear, TensorQuantizer
from pytorch_quantization.tensor_quant import QuantDescriptor, tensor_quant
from torch import nn

WIDTH = 16


class Attention(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.query = QuantLinear(WIDTH, WIDTH)
        self.key = QuantLinear(WIDTH, WIDTH)
        self.value = QuantLinear(WIDTH, WIDTH)
        self.out = QuantLinear(WIDTH, WIDTH)
        descriptor = QuantLinear.default_quant_desc_input
        self.matmul_q_input_quantizer = TensorQuantizer(descriptor)
        self.matmul_k_input_quantizer = TensorQuantizer(descriptor)
        self.matmul_v_input_quantizer = TensorQuantizer(descriptor)
        self.softmax_input_quantizer = TensorQuantizer(descriptor)
        self.matmul_a_input_quantizer = TensorQuantizer(descriptor)

    def _split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        query = self.matmul_q_input_quantizer(self._split(self.query(x)))
        key = self.matmul_k_input_quantizer(self._split(self.key(x)).transpose(-1, -2))
        value = self.matmul_v_input_quantizer(self._split(self.value(x)))
        scores = torch.matmul(query, key) / math.sqrt(query.shape[-1])
        weights = torch.softmax(self.softmax_input_quantizer(scores), dim=-1)
        mixed = torch.matmul(self.matmul_a_input_quantizer(weights), value)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.fc1 = QuantLinear(WIDTH, 2 * WIDTH)
        self.fc2 = QuantLinear(2 * WIDTH, WIDTH)
        self.add1_residual_input_quantizer = TensorQuantizer(
            QuantLinear.default_quant_desc_input
        )

    def forward(self, x):
        x = self.attn(self.attention_norm(x)) + self.add1_residual_input_quantizer(x)
        return x + self.fc2(F.gelu(self.fc1(self.ffn_norm(x))))


class VisionTransformer(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.patches = quant_nn.QuantConv2d(3, WIDTH, kernel_size=4, stride=4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 5, WIDTH) * 0.02)
        self.layer = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.position
        for block in self.layer:
            x = block(x)
        return self.head(x[:, 0])


def set_default_quantizers(args) -> None:
    desc_input = QuantDescriptor(num_bits=args.aprec, calib_method=args.calibrator)
    axis = None if args.quant_per_tensor else (0,)
    desc_weight = QuantDescriptor(num_bits=args.wprec, axis=axis)
    for layer in (QuantLinear, quant_nn.QuantConv2d):
        layer.set_default_quant_desc_input(desc_input)
        layer.set_default_quant_desc_weight(desc_weight)


def set_quantizer(module, quantizer: str, key: str, value) -> None:
    child = getattr(module, quantizer, None)
    if child is not None:
        assert hasattr(child, key)
        setattr(child, key, value)


def set_quantizers(model, patterns, which: str = "both", **settings) -> int:
    changed = 0
    for name, module in model.named_modules():
        if not any(re.search(pattern, name) for pattern in patterns):
            continue
        for key, value in settings.items():
            if which in ("input", "both"):
                set_quantizer(module, "_input_quantizer", key, value)
            if which in ("weight", "both"):
                set_quantizer(module, "_weight_quantizer", key, value)
            if name.endswith("_quantizer"):
                setattr(module, key, value)
        changed += 1
    return changed


def configure(model) -> None:
    """Leave in float what the flags of the script name."""
    scores = r"layer\.\d+\.attn\.softmax_input_quantizer"
    set_quantizers(model, [scores], _disabled=True)
    set_quantizers(model, ["patches"], which="input", _disabled=True)


def fuse_qkv(model) -> None:
    for name, module in model.named_modules():
        if name.endswith(".attn"):
            weights = [
                layer._weight_quantizer
                for layer in (module.query, module.key, module.value)
            ]
            largest = max(quantizer._amax.detach().max() for quantizer in weights)
            for quantizer in weights:
                quantizer._amax.fill_(largest)


def clip_gelu(model, largest: float) -> list:
    before = []
    for name, module in model.named_modules():
        if name.endswith("fc2"):
            before.append(module._input_quantizer._amax.data.detach().item())
            module._input_quantizer._amax.data.detach().clamp_(max=largest)
    return before


def recalibrate_weights(model) -> None:
    for module in model.modules():
        if not hasattr(module, "_weight_quantizer"):
            continue
        axis = module._weight_quantizer.axis
        reduced = [
            d for d in range(module.weight.dim()) if axis is None or d not in axis
        ]
        amax = quant_utils.reduce_amax(
            module.weight, axis=None if axis is None else reduced, keepdims=True
        )
        module._weight_quantizer.amax = amax.detach()


def data(batches: int):
    generator = torch.Generator().manual_seed(5)
    for _ in range(batches):
        target = torch.randint(4, (16,), generator=generator)
        image = torch.randn(16, 3, 8, 8, generator=generator) * 0.5
        image[:, 0] += (target % 2)[:, None, None] * 2.0 - 1.0
        image[:, 1] += (target // 2)[:, None, None] * 2.0 - 1.0
        yield image, target


def train(model, steps: int, rate: float) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for image, target in data(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(image), target).backward()
        optimizer.step()


def accuracy(model) -> float:
    model.eval()
    with torch.no_grad():
        hits = [(model(x).argmax(1) == y).float().mean().item() for x, y in data(4)]
    return sum(hits) / len(hits)


def loss(model) -> float:
    return mean_loss(model, data(4), F.cross_entropy)


def export(model, path: str) -> None:
    TensorQuantizer.use_fb_fake_quant = True
    image, _ = next(data(1))
    torch.onnx.export(model.eval(), image, path, opset_version=13, dynamo=False)
    TensorQuantizer.use_fb_fake_quant = False


def stored_codes(state) -> dict:
    """Return weights as codes of 8 bits, as a program without torch is given them."""
    codes = {}
    for key, amax in state.items():
        if key.endswith("_weight_quantizer._amax"):
            weight = state[key.replace("_weight_quantizer._amax", "weight")]
            scaled = weight * (127.0 / amax)
            codes[key] = torch.round(scaled).clamp(-127, 127).to(torch.int8).numpy()
    return codes


def main() -> None:
    flag = {"action": "store_true"}
    args = arguments(
        ("--aprec", {"type": int, "default": 8}),
        ("--wprec", {"type": int, "default": 8}),
        ("--calibrator", {"default": "histogram"}),
        ("--quant-per-tensor", flag),
    )
    torch.manual_seed(11)
    set_default_quantizers(args)
    model = VisionTransformer()
    report = {"switched": set_quantizers(model, [""], _disabled=True)}
    train(model, 40, 3e-3)
    report["float"] = accuracy(model)
    set_quantizers(model, [""], _disabled=False)
    collect_stats(model, [(image,) for image, _ in data(2)])
    compute_amax(model, method="percentile", percentile=99.99)
    configure(model)
    report["calibrated"] = accuracy(model)
    report["gelu"] = clip_gelu(model, 1.0)
    recalibrate_weights(model)
    if args.quant_per_tensor:
        fuse_qkv(model)
    train(model, 5, 1e-4)
    report["finetuned"] = accuracy(model)

    state = model.state_dict()
    torch.save(state, args.out + "/vit.pth")
    fresh = VisionTransformer()
    fresh.load_state_dict(torch.load(args.out + "/vit.pth", weights_only=True))
    configure(fresh)
    image, _ = next(data(1))
    with torch.no_grad():
        report["reloaded"] = torch.equal(
            fresh.eval()(image),
            model.eval()(image),
        )
        script = torch.jit.trace(model, image)
        report["traced"] = torch.equal(
            script(image),
            model(image),
        )
    report["codes"] = 0
    for key, codes in stored_codes(state).items():
        weight = state[key.replace("_weight_quantizer._amax", "weight")]
        expected, _ = tensor_quant(weight, state[key])
        report["codes"] += int((expected.to(torch.int8).numpy() != codes).sum())
    report["qkv"] = len(
        {
            getattr(model.layer[0].attn, name)._weight_quantizer._amax.max().item()
            for name in ("query", "key", "value")
        }
    )
    report["loss"] = both_losses(model, loss, args.out)
    if args.onnx:
        export(model, args.out + "/vit.onnx")
    report["shown"] = sum("TensorQuantizer" in str(m) for m in model.modules())
    print(json.dumps(report))  # noqa: T201  # how the test reads the outcome


if __name__ == "__main__":
    main()
