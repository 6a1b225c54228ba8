"""Training code of others: checkpoints, EMA, AMP, checkpointing, and frameworks with a loop.

Frameworks are optional (``pip install torchq[integration]``); a test of one that is missing is
skipped.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchq
from tests.models import ConvNet
from torchq.qat import prepare
from torchq.workflow import quantizers

# The frameworks warn of each other and of small data.
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def dataset(count: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, 8, 8, generator=generator)
    return TensorDataset(images, torch.arange(count) % 5)


def loader() -> DataLoader[Any]:
    return DataLoader(dataset(), batch_size=4)


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = ConvNet().train()
    done = prepare(
        model,
        loader(),
        torchq.recipes.w4a4(),
        lr=0.01,
        progress=False,
    )
    return model, torch.optim.SGD(done.param_groups, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    images, labels = dataset().tensors
    losses = []
    for step in steps:
        part = slice(
            4 * (step % 4),
            4 * (step % 4) + 4,
        )
        loss = F.cross_entropy(
            model(images[part]),
            labels[part],
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_state(one: nn.Module, other: nn.Module) -> bool:
    first = one.state_dict()
    second = other.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(first[k], second[k]) for k in first
    )


def test_averaged_model_of_torch() -> None:
    model, optimizer = prepared()
    average = AveragedModel(model, use_buffers=True)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        average.update_parameters(model)
    assert bool(average(dataset().tensors[0]).isfinite().all())


class Checkpointed(nn.Module):
    """A network whose blocks are computed again in the backward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner.stem(x)
        y = checkpoint(self.inner.left, x, use_reentrant=False)
        return self.inner.head(
            (x + checkpoint(self.inner.right, y, use_reentrant=False)).mean((2, 3))
        )


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, _ = prepared()
    model.eval()  # BatchNorm would move its statistics twice; that is torch's own affair.
    for quantizer in quantizers(model).values():
        quantizer.train()
    images = dataset().tensors[0]
    grads = []
    for call in (model, Checkpointed(model)):
        torch.manual_seed(1)
        model.zero_grad()
        call(images).square().sum().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    model, optimizer = prepared()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(
                self.model(batch[0]),
                batch[1],
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    before = copy.deepcopy(model.state_dict())
    trainer = lightning.Trainer(
        max_steps=4,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), loader())
    assert not torch.equal(model.state_dict()["head.weight"], before["head.weight"])
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    state = torch.load(path, weights_only=False)["state_dict"]
    fresh, _ = prepared()
    fresh.load_state_dict(
        {key.removeprefix("model."): value for key, value in state.items()}
    )
    assert same_state(fresh, model)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, optimizer = prepared()
    accelerator = accelerate.Accelerator(cpu=True)
    wrapped, wrapped_optimizer, batches = accelerator.prepare(
        model, optimizer, loader()
    )
    before = copy.deepcopy(model.state_dict())
    for images, labels in batches:
        with accelerator.accumulate(wrapped):
            loss = F.cross_entropy(wrapped(images), labels)
            accelerator.backward(loss)
            wrapped_optimizer.step()
            wrapped_optimizer.zero_grad()
    after = accelerator.unwrap_model(wrapped).state_dict()
    assert not torch.equal(after["head.weight"], before["head.weight"])


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    rows = [
        {"input_ids": torch.randint(50, (6,)), "labels": torch.tensor(i % 3)}
        for i in range(8)
    ]
    batch = {"input_ids": torch.stack([row["input_ids"] for row in rows])}
    done = prepare(
        model, [batch], torchq.recipes.integer(4, 8, learn_ranges=True), progress=False
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    optimizer = torch.optim.AdamW(done.param_groups)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, None)
    )
    assert trainer.train().global_step == 3
    moved = [n for n, p in model.named_parameters() if not torch.equal(p, before[n])]
    assert any(name.endswith("weight_quantizer.amax") for name in moved)
    assert torchq.workflow.is_quantized(model)
