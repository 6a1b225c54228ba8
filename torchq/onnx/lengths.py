"""The number of tokens in the example of a language model, which its file leaves open."""

from __future__ import annotations

from torch import Tensor, nn

from torchq.graph import call_arguments, map_tensors
from torchq.onnx.interface import named_tensors
from torchq.onnx.ir import first_line
from torchq.onnx.trial import run_in_float

#: How the names of arguments end that hold one number for each token, in the calls of transformers.
_ENDINGS = ("_ids", "_mask")
_DECODER = "decoder_"
_LENGTH = "length"


def token_lengths(model: nn.Module, example: object) -> dict[str, dict[int, str]]:
    """Return the second dimension of ids and masks, by argument, as for ``dynamic_shapes``.

    Ids and masks have a row of one number for each token; all of one length share its name.
    """
    tensors = named_tensors(model, *call_arguments(model, example))
    rows = {
        name: t
        for name, t in tensors.items()
        if name.endswith(_ENDINGS) and t.dim() == 2
    }
    lengths: dict[str, set[int]] = {}
    for name, tensor in rows.items():
        lengths.setdefault(_name(name), set()).add(tensor.shape[1])
    return {
        name: {1: _name(name)}
        for name, tensor in rows.items()
        if len(lengths[_name(name)]) == 1 and tensor.shape[1] > 1
    }


def _name(argument: str) -> str:
    return _DECODER + _LENGTH if argument.startswith(_DECODER) else _LENGTH


def problem_with_half(
    model: nn.Module, example: object, lengths: dict[str, dict[int, str]]
) -> str:
    """Return why the float model takes no half as many tokens; "" if it does."""
    args, kwargs = call_arguments(model, example)
    tensors = named_tensors(model, args, kwargs)
    halves = {id(tensors[name]): _half(tensors[name]) for name in lengths}

    def shortened(value: object) -> object:
        return map_tensors(value, lambda tensor: halves.get(id(tensor), tensor))

    shorter = shortened(kwargs) if kwargs else shortened(args)
    try:
        run_in_float(model, shorter)
    except Exception as error:  # A model may refuse a length in any way it likes.
        return first_line(error) or type(error).__name__
    return ""


def _half(tensor: Tensor) -> Tensor:
    return tensor[:, : tensor.shape[1] // 2]
