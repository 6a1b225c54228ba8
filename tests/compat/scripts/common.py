"""The functions that published scripts share, word for word or nearly so."""

import argparse

import torch
from pytorch_quantization import calib, quant_modules
from pytorch_quantization import nn as quant_nn
from pytorch_quantization.nn.modules import _utils as quant_nn_utils
from torch import nn


def arguments(*more):
    """The command line; ``more`` are further options with a dictionary each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--onnx", action="store_true")
    for name, options in more:
        parser.add_argument(name, **options)
    torch.set_num_threads(1)
    return parser.parse_args()


def quantizers(model: nn.Module) -> list:
    return [
        m for _, m in model.named_modules() if isinstance(m, quant_nn.TensorQuantizer)
    ]


def collect_stats(model, batches) -> None:
    model.eval()
    for module in quantizers(model):
        if module._calibrator is not None:
            module.disable_quant()
            module.enable_calib()
        else:
            module.disable()
    with torch.no_grad():
        for batch in batches:
            model(*batch)
    for module in quantizers(model):
        if module._calibrator is not None:
            module.enable_quant()
            module.disable_calib()
        else:
            module.enable()


def compute_amax(model, strict: bool = True, **kwargs) -> None:
    for module in quantizers(model):
        if module._calibrator is not None:
            if isinstance(module._calibrator, calib.MaxCalibrator):
                module.load_calib_amax(strict=strict)
            else:
                module.load_calib_amax(strict=strict, **kwargs)
            module._amax = module._amax.to("cpu")


def mean_loss(model, batches, loss_of) -> float:
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model(image), target).item() for image, target in batches]
    return sum(losses) / len(losses)


def both_losses(model, loss, folder: str) -> dict:
    """The loss as it is, whose outputs are saved, and of the same weights without quantizers."""
    outputs = []
    with model.register_forward_hook(lambda *call: outputs.append(call[-1])):
        simulated = loss(model)
    torch.save(torch.cat(outputs), folder + "/outputs.pt")
    active = [module for module in quantizers(model) if not module._disabled]
    for module in active:
        module.disable()
    in_float = loss(model)
    for module in active:
        module.enable()
    return {"float": in_float, "simulation": simulated}


def transfer_torch_to_quantization(instance: nn.Module, quant_class):
    quant_instance = quant_class.__new__(quant_class)
    for k, val in vars(instance).items():
        setattr(quant_instance, k, val)

    def __init__(self) -> None:
        if isinstance(self, quant_nn_utils.QuantInputMixin):
            self.init_quantizer(
                quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__, input_only=True)
            )
        else:
            self.init_quantizer(
                *quant_nn_utils.pop_quant_desc_in_kwargs(self.__class__)
            )
        for quantizer in quantizers(self):
            if isinstance(quantizer._calibrator, calib.HistogramCalibrator):
                quantizer._calibrator._torch_hist = True

    __init__(quant_instance)
    return quant_instance


def replace_to_quantization_module(
    model: nn.Module, more, skip=lambda path: False
) -> list:
    """Swap the layers of the default map and of ``more``; return the paths that were skipped."""
    module_dict = {
        id(getattr(e.orig_mod, e.mod_name)): e.replace_mod
        for e in quant_modules._DEFAULT_QUANT_MAP
    }
    module_dict |= {id(old): new for old, new in more.items()}
    ignored = []

    def recurse(module, prefix: str = "") -> None:
        for name in list(module._modules):
            child = module._modules[name]
            path = name if prefix == "" else prefix + "." + name
            recurse(child, path)
            if id(type(child)) in module_dict:
                if skip(path):
                    ignored.append(path)
                    continue
                module._modules[name] = transfer_torch_to_quantization(
                    child, module_dict[id(type(child))]
                )

    recurse(model)
    return ignored
