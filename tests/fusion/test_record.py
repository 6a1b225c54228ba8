"""What fuse_ did is kept with the model as data, and brings an unfused model into its structure."""

import copy
import io
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.blocks.layers import conv_bn
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import (
    Net,
    copied,
    data_dependent,
    image,
    outputs,
    randomized,
    same_state,
)
from tests.fusion.test_families import CASES, build
from tests.fusion.test_registry import Two
from torchq.errors import ConfigError, FuseError
from torchq.fusion import (
    ConstantPad,
    apply_fusion_record_,
    fuse_,
    fusion_record,
    register_block,
)
from torchq.fusion.blocks import BLOCKS
from torchq.swap import quantize_, restore_
from torchq.workflow import calibrate


def structure(model: nn.Module) -> list[tuple[str, str, str]]:
    """Every module's path, class and arguments."""
    actual = [
        (path, type(m).__name__, m.extra_repr()) for path, m in model.named_modules()
    ]
    return [row for row in actual if not row[1].startswith("Dropout")]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(
        conv_bn(3, 8, 3, bias=False),
        nn.ReLU(),
        RepVGGBlock(8, 8),
    )
    model = nn.Sequential(
        body,
        nn.Conv2d(8, 8, 1),
        nn.BatchNorm2d(8),
    )
    assert isinstance(randomized(model), nn.Sequential)
    return model


IMAGE = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(3))


@pytest.mark.sample(15)
@pytest.mark.parametrize("case", CASES)
def test_a_fresh_model_takes_the_structure_and_the_tensors_of_a_fused_one(
    case: str,
) -> None:
    fused = build(case)
    fresh = build(case)
    for parameter in fresh.parameters():
        nn.init.normal_(parameter)
    report = fuse_(fused)
    record = json.loads(json.dumps(report.record))
    assert record == fusion_record(fused)
    apply_fusion_record_(fresh, record)
    assert structure(fresh) == structure(fused)
    assert same_after_loading(fresh, fused, image(2, CASES[case].in_channels, 12, 14))
    assert fusion_record(fresh) == record


def same_after_loading(fresh: nn.Module, fused: nn.Module, x: Tensor = IMAGE) -> bool:
    fresh.load_state_dict(fused.state_dict())
    return torch.equal(
        outputs(fresh.eval(), x),
        outputs(fused, x),
    )


def test_a_record_replays_in_any_mode_and_needs_no_example() -> None:
    """The fused model needed an example to be followed, and eval mode; a new one needs neither."""
    fused, fresh = (Net(data_dependent(lambda m, x: m.other(x))) for _ in range(2))
    fused.other, fresh.other = small(), small()  # type: ignore[assignment]
    fuse_(fused.eval(), IMAGE)
    apply_fusion_record_(fresh.train(), fusion_record(fused))
    assert same_after_loading(fresh, fused)


def test_explicit_padding_is_replayed() -> None:
    fused, fresh = (
        randomized(nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)))
        for _ in "ab"
    )
    assert fuse_(fused, IMAGE, constant_pad=True).applied
    apply_fusion_record_(fresh, fusion_record(fused))
    assert type(fresh[0]) is ConstantPad
    assert same_after_loading(fresh, fused)


def test_the_record_survives_copies_pickling_quantizing_and_a_second_fuse() -> None:
    model = small()
    first = fuse_(model, IMAGE).record
    assert len(first) == 3
    assert fuse_(model, IMAGE).record == ()
    quantize_(model)
    calibrate(model, [IMAGE], progress=False)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert fusion_record(twin) == list(first)
    restore_(model)
    assert fusion_record(model) == list(first)


def test_a_part_of_a_fused_model_has_its_part_of_the_record() -> None:
    model = small()
    fresh = small()
    fuse_(model, IMAGE)
    part = model[0]
    assert isinstance(part, nn.Sequential)
    assert [entry["kind"] for entry in fusion_record(part)] == ["block", "batchnorm"]
    apply_fusion_record_(fresh[0], fusion_record(part))
    assert same_after_loading(fresh[0], part)
    wrapped = nn.Sequential(nn.Identity(), model)
    fresh = nn.Sequential(nn.Identity(), small())
    apply_fusion_record_(fresh, fusion_record(wrapped))
    assert structure(fresh) == structure(wrapped)


def test_a_wrapper_of_torch_leaves_the_record_with_the_model_inside() -> None:
    model = small()
    fresh = small()
    fuse_(nn.DataParallel(model), IMAGE)
    record = fusion_record(model)
    assert [e.get("path", e.get("layers")) for e in record] == [
        "0.2",
        ["0.0.conv"],
        ["1"],
    ]
    apply_fusion_record_(fresh, record)
    assert same_after_loading(fresh, model)


def test_entries_of_parts_that_were_replaced_later_come_first() -> None:
    """A BatchNorm folded inside a block, whose branches are merged afterwards."""
    fused = build("repvgg-stride")
    fresh = build("repvgg-stride")
    fuse_(fused, reparameterize=False)
    fuse_(fused)
    record = fusion_record(fused)
    assert [entry["kind"] for entry in record] == ["batchnorm", "batchnorm", "block"]
    apply_fusion_record_(fresh, record)
    assert structure(fresh) == structure(fused)


def test_a_model_fused_already_is_left_alone() -> None:
    fused = small()
    other = small()
    fuse_(fused, IMAGE)
    fuse_(other)
    state = copied(other)
    apply_fusion_record_(other, fusion_record(fused))
    assert same_state(other, state)


def test_the_family_of_a_user_has_to_be_registered_where_it_is_replayed() -> None:
    register_block(
        "two", branches=("wide", "narrow"), writes="merged_conv", bypass=("act",)
    )(Two)
    try:
        fused = nn.Sequential(Two()).eval()
        fresh = nn.Sequential(Two())
        fuse_(fused)
        apply_fusion_record_(copy.deepcopy(fresh), fusion_record(fused))
    finally:
        BLOCKS.remove("two")
    with pytest.raises(
        ConfigError, match="unknown block family 'two'; expected one of"
    ):
        apply_fusion_record_(fresh, fusion_record(fused))


def entry(**changes: Any) -> dict[str, Any]:
    base = {"kind": "batchnorm", "norms": ["2"], "layers": ["1"], "constant_pad": False}
    return {
        key: value for key, value in {**base, **changes}.items() if value is not ...
    }


def block(**changes: Any) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "class": "Conv2d",
        "in_channels": 8,
        "out_channels": 8,
        "groups": 1,
    }
    layer |= {"kernel_size": [3, 3], "stride": [1, 1], "padding": [1, 1]} | changes
    return {"kind": "block", "path": "0.2", "family": "repvgg", "layers": [layer]}


def test_the_undamaged_entries_of_the_next_test_do_replay() -> None:
    model = small()
    apply_fusion_record_(model, [entry(), block()])
    assert [e["kind"] for e in fusion_record(model)] == ["batchnorm", "block"]


DAMAGED: dict[str, tuple[Any, type[Exception], str]] = {
    "no list": ({"kind": "batchnorm"}, ConfigError, "expected a list of entries"),
    "no entry": (["batchnorm"], ConfigError, "expected an entry with 'kind'"),
    "unknown kind": (
        [entry(kind="exec")],
        ConfigError,
        "got 'exec' for 'kind'; expected one of",
    ),
    "kind of another type": (
        [entry(kind=[])],
        ConfigError,
        "expected one of batchnorm, block",
    ),
    "missing key": (
        [entry(layers=...)],
        ConfigError,
        "expected an entry with the keys kind, norm",
    ),
    "further key": (
        [entry(code="x")],
        ConfigError,
        "expected an entry with the keys kind, norm",
    ),
    "path of another type": (
        [entry(norms=[2])],
        ConfigError,
        "expected a list of strings",
    ),
    "no path": ([entry(norms=[])], ConfigError, "expected a list of strings"),
    "flag of another type": (
        [entry(constant_pad=1)],
        ConfigError,
        "expected true or false",
    ),
    "no such norm": (
        [entry(norms=["9"])],
        FuseError,
        "9: got no such module; expected a BatchN",
    ),
    "norm is the root": (
        [entry(norms=[""])],
        FuseError,
        r"\(root\): got a Sequential; expected a",
    ),
    "attribute, not module": (
        [entry(norms=["1.__class__"])],
        FuseError,
        "got no such module; exp",
    ),
    "no layer": (
        [entry(layers=["0"])],
        FuseError,
        "0: got a Sequential; expected a layer",
    ),
    "unknown family": (
        [block() | {"family": "x"}],
        ConfigError,
        "unknown block family 'x'",
    ),
    "another block": (
        [block() | {"path": "1"}],
        FuseError,
        "1: got a Conv2d; expected a repvgg b",
    ),
    "no layers": (
        [block() | {"layers": []}],
        ConfigError,
        "expected None layers|1 layers",
    ),
    "too many layers": (
        [block() | {"layers": block()["layers"] * 2}],
        ConfigError,
        "1 layers for",
    ),
    "layers of another type": (
        [block() | {"layers": 1}],
        ConfigError,
        "expected a list of layers",
    ),
    "unknown class": (
        [block(**{"class": "Sequential"})],
        ConfigError,
        "expected Linear, Conv1d",
    ),
    "negative channels": (
        [block(in_channels=-8)],
        ConfigError,
        "expected a positive whole number",
    ),
    "true channels": (
        [block(in_channels=True)],
        ConfigError,
        "expected a positive whole number",
    ),
    "kernel of three": (
        [block(kernel_size=[3])],
        ConfigError,
        "expected 2 whole numbers of at",
    ),
    "groups": ([block(groups=3)], ConfigError, "expected a divisor of the channels"),
    "huge kernel": (
        [block(kernel_size=[2**20, 2**20])],
        FuseError,
        "a layer of 70368744177664 we",
    ),
    "huge number": (
        [block(in_channels=10**30)],
        ConfigError,
        "expected a positive whole number",
    ),
    "no JSON": ([entry(norms={1})], ConfigError, "expected JSON data"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_refused_and_changes_nothing(name: str) -> None:
    damaged, kind, message = DAMAGED[name]
    model = small()
    before = structure(model)
    state = copied(model)
    is_fold = isinstance(damaged, list) and "0.2" not in str(damaged)
    with pytest.raises(kind, match=message):
        apply_fusion_record_(model, [block(), *damaged] if is_fold else damaged)
    assert structure(model) == before
    assert same_state(model, state)
    assert fusion_record(model) == []
