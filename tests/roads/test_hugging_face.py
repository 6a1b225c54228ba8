"""Hugging Face: its Trainer trains BERT and ViT, stops, goes on, and saves safetensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import torchq
import torchq.hugging_face
from tests.roads.end import ROAD, arrives, run_file
from torchq.lowering.kernel import saturates

pytestmark = ROAD
transformers = pytest.importorskip("transformers", reason="the road is Hugging Face's")
accelerate = pytest.importorskip("accelerate", reason="the Trainer needs it")

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
    if build is bert:
        check_other_length(loaded, batch, path)


def check_other_length(model: Any, batch: dict[str, torch.Tensor], path: Path) -> None:
    """Check that a file takes sentences of another length than the example's."""
    shorter = {name: tensor[:3, :7] for name, tensor in batch.items()}
    with torch.no_grad():
        expected = model(**shorter).logits
    (got,) = run_file(path, shorter)
    assert got.shape == expected.shape
    # A value at a tie between two codes moves a logit by less than codes are apart.
    assert (got - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("build", [bert, vit])
def test_accelerate_and_export(build: Any, tmp_path: Path) -> None:
    """accelerate trains, goes back to its own state, and writes the weights that are loaded."""
    model, batch = build()
    labels = torch.arange(16) % 4
    example = {name: tensor[:2] for name, tensor in batch.items()}
    prepared = torchq.qat.prepare(
        model, [batch], target="onnxruntime", lr=1e-2, progress=False
    )
    torchq.workflow.embed_record_(model)
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer = torch.optim.SGD(prepared.param_groups)
    network, optimizer = accelerator.prepare(model.train(), optimizer)
    for step in range(4):
        accelerator.backward(F.cross_entropy(network(**batch).logits, labels))
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            accelerator.save_state(tmp_path / "state")
    after = accelerator.unwrap_model(network).state_dict()
    after = {name: tensor.clone() for name, tensor in after.items()}
    accelerator.load_state(tmp_path / "state")
    before = accelerator.unwrap_model(network).state_dict()
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())
    accelerator.save_model(network, tmp_path / "weights")
    loaded: Any = torchq.load(build()[0], tmp_path / "weights").eval()
    with torch.no_grad():
        assert torch.equal(loaded(**batch).logits, model.eval()(**batch).logits)

    def loss(run: Any) -> float:
        return float(F.cross_entropy(run(batch), labels))

    name = f"{build.__name__}, accelerate"
    arrives(name, loaded, example, tmp_path / "net.onnx", loss, within=0.02)


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


SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def values(*shape: int) -> torch.Tensor:
    """Return random numbers, the same in each run."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


PICTURES = {"pixel_values": values(2, 3, 32, 32)}
WORDS = {
    "input_ids": torch.arange(24).view(2, 12),
    "attention_mask": torch.ones(2, 12, dtype=torch.long).index_fill_(
        1, torch.tensor([10, 11]), 0
    ),
}


def whisper_encoder() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=60,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_source_positions=20,
        num_mel_bins=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperModel(config).encoder


def segformer() -> Any:
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def dinov2() -> Any:
    config = transformers.Dinov2Config(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return transformers.Dinov2Model(config)


def llama() -> Any:
    config = transformers.LlamaConfig(vocab_size=50, num_key_value_heads=2, **SHAPE)
    return transformers.LlamaModel(config)


def t5_encoder() -> Any:
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64
    )
    return transformers.T5EncoderModel(config)


#: A network, one batch of it, and its layers of attention.
ATTENDING: dict[str, tuple[Any, dict[str, torch.Tensor], int]] = {
    "bert": (
        lambda: transformers.BertModel(transformers.BertConfig(vocab_size=50, **SHAPE)),
        WORDS,
        2,
    ),
    "vit": (
        lambda: transformers.ViTModel(
            transformers.ViTConfig(image_size=32, patch_size=8, **SHAPE)
        ),
        PICTURES,
        2,
    ),
    "dinov2": (dinov2, PICTURES, 2),
    "whisper": (whisper_encoder, {"input_features": values(2, 8, 40)}, 2),
    "segformer": (segformer, {"pixel_values": values(1, 3, 64, 64)}, 4),
    "heads that share keys": (llama, WORDS, 2),
    "biases of positions": (t5_encoder, WORDS, 2),
}


def only(output: Any) -> torch.Tensor:
    return output[0]


#: In float16 biases of positions are others at another length, with attention in float too.
TENSORRT = torchq.runtimes.TensorRt(precision="float32")


@pytest.mark.parametrize(
    "target", ["onnxruntime", "openvino", pytest.param(TENSORRT, id="tensorrt")]
)
@pytest.mark.parametrize("name", ATTENDING)
def test_attention_runs_on_integers(name: str, target: Any, tmp_path: Path) -> None:
    build, batch, layers = ATTENDING[name]
    torch.manual_seed(0)
    model = build().eval()
    torchq.fuse_(model, batch, progress=False)
    with torch.no_grad():
        in_float = only(model(**batch))
    paths = torchq.hugging_face.attend_in_modules_(model, batch)
    assert len(paths) == layers
    torchq.quantize_(
        model,
        torchq.recipes.int8(reduce_range=True),
        target=target,
        example=batch,
        progress=False,
    )
    for path in paths:
        attention = model.get_submodule(path).torchq_attend
        assert isinstance(attention, torchq.nn.QuantScaledDotProductAttention)
        assert attention.softmax_quantizer.quantizing
        is_signed = attention.softmax_quantizer.descriptor.unsigned is False
        assert is_signed == (target is TENSORRT)
    torchq.calibrate(model, [batch], progress=False)
    with torch.no_grad():
        assert not torch.equal(only(model(**batch)), in_float)
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(model, batch, path, progress=False)
    # Products of query and key, and of the softmax and value, too. Last layers may be float.
    # Convolutions whose results a norm reads have float kernels; products of attention have none.
    assert not [name for name in written.coverage.float_inputs if "matmul" in name]
    if not written.coverage.float_kernels:
        assert written.coverage.share == pytest.approx(1.0, abs=0.05)
    # Products of activations have no spare bit, which OpenVINO's kernels want without VNNI.
    if target != "openvino" or not saturates():
        report = torchq.verify_onnx(model, path, [batch], progress=False)
        assert report.ok, str(report)
    torchq.restore_(model)
    with torch.no_grad():
        torch.testing.assert_close(only(model(**batch)), in_float, rtol=1e-5, atol=1e-5)


def test_attention_that_does_more_is_refused() -> None:
    """The proof says no, and the model is as it was."""
    model, batch = bert()
    model.eval()
    with torch.no_grad():
        expected = model(**batch).logits
    other = type(model)(model.config).eval()
    torchq.hugging_face.attend_in_modules_(other, batch)
    with torch.no_grad():  # The configuration is one object of both.
        assert torch.equal(model(**batch).logits, expected)
    names = [name for name, _ in model.named_modules()]

    own = torchq.nn.ScaledDotProductAttention.forward

    def damaged(*args: Any, **kwargs: Any) -> torch.Tensor:
        return 1.01 * own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchq.nn.ScaledDotProductAttention, "forward", damaged)
        with pytest.raises(torchq.errors.QuantizationError, match="result 0 is off by"):
            torchq.hugging_face.attend_in_modules_(model, batch)
    assert [name for name, _ in model.named_modules()] == names
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, expected)
    with pytest.raises(torchq.errors.QuantizationError, match="AttentionInterface"):
        torchq.hugging_face.attend_in_modules_(torch.nn.Linear(2, 2), batch)


def test_what_attention_cannot_give_is_named_and_nothing_changes() -> None:
    model, batch = bert()
    model.set_attn_implementation("eager")
    model.eval()
    names = [name for name, _ in model.named_modules()]
    asking = {**batch, "output_attentions": True}
    with pytest.raises(
        torchq.errors.QuantizationError, match=r"returns \d+ tensors in"
    ):
        torchq.hugging_face.attend_in_modules_(model, asking)
    assert [name for name, _ in model.named_modules()] == names
    with torch.no_grad():
        assert model(**asking).attentions

    def failing(*_: Any) -> None:
        raise ValueError("no other attention")

    model.set_attn_implementation = failing
    with pytest.raises(ValueError, match="no other attention"):
        torchq.hugging_face.attend_in_modules_(model, batch)
    assert [name for name, _ in model.named_modules()] == names
    del model.set_attn_implementation
    torchq.quantize_(model, progress=False)
    with pytest.raises(torchq.errors.QuantizationError, match="is quantized; expected"):
        torchq.hugging_face.attend_in_modules_(model, batch)
