"""The choice between signed and unsigned codes, which calibration makes for ``unsigned="auto"``."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError

__all__ = ["SignChoice"]

# The value of the buffer ``unsigned`` while calibration has not chosen; then it is 0 or 1.
_UNDECIDED = -1


class SignChoice(nn.Module):
    """Mixin of a quantizer: the choice of the sign, in its descriptor and in its state dict.

    The state dict has the choice because the range means nothing without it.
    """

    descriptor: QuantDescriptor
    name: str

    @property
    def given_descriptor(self) -> QuantDescriptor:
        """The descriptor that the quantizer was made with, without the choice of the sign."""
        return self.descriptor.replace(unsigned="auto") if self._chooses_sign else self.descriptor

    def set_unsigned(self, unsigned: bool | Literal["auto"]) -> None:
        """Choose the sign of the codes, for a descriptor with ``unsigned="auto"``.

        Args:
            unsigned: the choice; "auto" leaves it to the next calibration.

        Raises:
            ConfigError: the descriptor fixes the sign.
        """
        if not self._chooses_sign:
            raise ConfigError(
                f"{self.name or 'TensorQuantizer'}: got set_unsigned for {self.descriptor}; "
                "expected a descriptor with unsigned='auto'"
            )
        value = _UNDECIDED if unsigned == "auto" else int(unsigned)
        with torch.inference_mode(False), torch.no_grad():
            buffer = torch.full_like(self.get_buffer("unsigned"), value)
            self.register_buffer("unsigned", buffer)
        self.descriptor = self.descriptor.replace(unsigned=unsigned)

    @property
    def _chooses_sign(self) -> bool:
        return "unsigned" in self._buffers

    def _prepare_sign(self, device: torch.device | None) -> None:
        """Add the buffer ``unsigned`` if the descriptor leaves the sign to calibration."""
        if self.descriptor.unsigned == "auto":
            undecided = torch.tensor(_UNDECIDED, dtype=torch.int8, device=device)
            self.register_buffer("unsigned", undecided)

    def _adopt_loaded_sign(self, prefix: str, errors: list[str]) -> None:
        """Make the descriptor agree with the loaded buffer ``unsigned``.

        Args:
            prefix: the path of the quantizer, for error texts.
            errors: the list that ``load_state_dict`` reports.
        """
        if not self._chooses_sign or self.get_buffer("unsigned").is_meta:
            return
        value = int(self.get_buffer("unsigned"))
        if value not in (_UNDECIDED, 0, 1):
            errors.append(f"{prefix}unsigned: got {value}; expected -1, 0 or 1")
        else:
            self.set_unsigned("auto" if value == _UNDECIDED else bool(value))
