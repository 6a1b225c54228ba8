"""Hugging Face: its Trainer trains BERT and ViT, stops, goes on, and saves safetensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchq
import torchq.hugging_face
from tests.roads.end import ROAD, arrives

pytestmark = ROAD
transformers = pytest.importorskip("transformers", reason="the road is Hugging Face's")
pytest.importorskip("accelerate", reason="the Trainer needs it")

SIZE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_labels": 4,
}


def bert() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, vocab_size=100)
    words = torch.randint(0, 100, (16, 12))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    return transformers.BertForSequenceClassification(config), batch


def vit() -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = transformers.ViTConfig(**SIZE, image_size=32, patch_size=8)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.rand(16, 3, 32, 32)
    }


@pytest.mark.parametrize("build", [bert, vit])
def test_trainer_and_export(build: Any, tmp_path: Path) -> None:
    model, batch = build()
    labels = torch.arange(16) % 4
    example = {name: tensor[:2] for name, tensor in batch.items()}
    torchq.quantize_(model, target="onnxruntime", example=example, progress=False)
    torchq.calibrate(model, [batch], progress=False)
    rows = [
        {**{name: tensor[i] for name, tensor in batch.items()}, "labels": labels[i]}
        for i in range(16)
    ]
    settings = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=8,
        max_steps=4,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(model=model, args=settings, train_dataset=rows).train()
    again = transformers.Trainer(model=model, args=settings, train_dataset=rows)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    torchq.workflow.embed_record_(model)
    model.eval().save_pretrained(tmp_path / "saved", save_original_format=False)
    loaded: Any = torchq.load(build()[0], tmp_path / "saved").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)

    def loss(run: Any) -> float:
        return float(F.cross_entropy(run(batch), labels))

    path = tmp_path / "net.onnx"
    arrives(build.__name__, loaded, example, path, loss, within=0.02)


@pytest.mark.parametrize("build", [bert, vit])
def test_its_own_door(build: Any, tmp_path: Path) -> None:
    """from_pretrained quantizes, the Trainer trains, and from_pretrained gives what it saved."""
    float_model, batch = build()
    labels = torch.arange(16) % 4
    float_model.save_pretrained(tmp_path / "float")
    example = {name: tensor[:2] for name, tensor in batch.items()}
    network = type(float_model)
    model = network.from_pretrained(
        tmp_path / "float",
        quantization_config=torchq.hugging_face.quantization_config(
            "onnxruntime", example=example, batches=[batch]
        ),
    )
    rows = [
        {**{name: tensor[i] for name, tensor in batch.items()}, "labels": labels[i]}
        for i in range(16)
    ]
    settings = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    transformers.Trainer(model=model, args=settings, train_dataset=rows).train()
    model.eval().save_pretrained(tmp_path / "saved")
    loaded, info = network.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model(**batch).logits)
        assert not torch.equal(loaded(**batch).logits, float_model(**batch).logits)
    half = network.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    ranges = torchq.workflow.quantizers(model)
    for name, quantizer in torchq.workflow.quantizers(half).items():
        assert torch.equal(quantizer.amax, ranges[name].amax)

    def loss(run: Any) -> float:
        return float(F.cross_entropy(run(batch), labels))

    arrives(
        f"{build.__name__}, from_pretrained",
        loaded,
        example,
        tmp_path / "net.onnx",
        loss,
        within=0.02,
    )
