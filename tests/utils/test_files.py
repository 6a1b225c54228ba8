"""Files are replaced whole or not at all."""

import os
from pathlib import Path

import pytest

from torchq.utils import replacing


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"old")

    def fail_half_way() -> None:
        with replacing(path) as (temporary,):
            temporary.write_bytes(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.bin"]


def test_files_that_belong_together_are_replaced_together(tmp_path: Path) -> None:
    model = tmp_path / "m.onnx"
    data = tmp_path / "m.onnx.data"
    data.write_bytes(b"old")
    data.chmod(0o600)
    with replacing(data, model) as (new_data, new_model):
        assert (new_data.name, new_model.name) == ("m.onnx.data", "m.onnx")
        new_data.write_bytes(b"tensors")
        new_model.write_bytes(b"graph")
        assert data.read_bytes() == b"old"
    assert (data.read_bytes(), model.read_bytes()) == (b"tensors", b"graph")
    assert data.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]


def test_what_was_not_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx.data"
    path.write_bytes(b"old")
    with replacing(path):
        pass
    assert path.read_bytes() == b"old"


def test_links_are_followed_and_devices_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target = tmp_path / "real" / "m.onnx"
    target.write_bytes(b"old")
    (tmp_path / "link.onnx").symlink_to(target)
    with replacing(tmp_path / "link.onnx") as (temporary,):
        temporary.write_bytes(b"new")
    assert (tmp_path / "link.onnx").is_symlink()
    assert target.read_bytes() == b"new"
    with replacing(os.devnull) as (temporary,):
        temporary.write_bytes(b"nowhere")


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with (
        pytest.raises(FileNotFoundError, match=r"the folder .*missing does not exist"),
        replacing(tmp_path / "missing" / "m.onnx"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="expected paths in one folder"),
        replacing(tmp_path / "a", tmp_path / "b" / "c"),
    ):
        pass


def test_a_name_may_be_as_long_as_the_file_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("m" * (os.pathconf(tmp_path, "PC_NAME_MAX") - 3) + ".pt")
    with replacing(path) as (temporary,):
        temporary.write_bytes(b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == [path.name]
