"""For models of transformers: their own door to files, and attention that can be quantized.

``from_pretrained`` gives the quantized model, with its ranges; see :mod:`torchq.hugging_face.door`.
:func:`attend_in_modules_` lets the products of attention have quantizers. transformers is optional:
it is imported by the first call that needs it.

Example:
    >>> import torchq.hugging_face
    >>> torchq.hugging_face.register_method()  # doctest: +SKIP
    >>> model = BertModel.from_pretrained("folder")  # doctest: +SKIP
"""

from torchq.hugging_face.attention import attend_in_modules_
from torchq.hugging_face.door import embed_, quantization_config, register_method

__all__ = ["attend_in_modules_", "embed_", "quantization_config", "register_method"]
