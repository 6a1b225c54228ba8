"""Which calls overwrite a tensor that something else reads again.

A child that stands for an operator returns a new tensor, and so does a quantized activation that
was to work in place. Where ``x += y`` is read through ``x`` alone, this makes no difference. Where
the memory has another reader (``z = x`` before it, a slice, the caller of the forward), the call
has to stay what it is. In a run in float the result of such a call is handed on as another tensor
on the same memory, so that whoever reads the memory through an older tensor is told apart.
"""

from collections import defaultdict

from torch import Tensor

from torchq.graph import address_of, effects_of, function_name, tensors_in


class Overwrites:
    """The calls of one run that overwrite tensors, and those whose memory is read again.

    Attributes:
        read_again: the calls after which an older tensor on the same memory is read: the id of
            what recorded an operator and its name, or the id of a module and "".
    """

    def __init__(self) -> None:
        self.read_again: set[tuple[int, str]] = set()
        self._count = 0
        self._born: dict[int, int] = {}
        # An id is unique only as long as its tensor lives.
        self._alive: list[Tensor] = []
        self._writes: dict[int, list[tuple[int, tuple[int, str]]]] = defaultdict(list)

    def handed_on(self, result: Tensor, key: tuple[int, str]) -> Tensor:
        """Return the result of a call that overwrote it, as a tensor that is younger."""
        younger = result.view_as(result)
        self._count += 1
        self._writes[_memory(result)].append((self._count, key))
        self._born[id(younger)] = self._count
        self._alive.append(younger)
        return younger

    def note_made(self, values: object) -> None:
        """Note tensors that were made, or came in, just now."""
        for tensor in tensors_in(values):
            if id(tensor) not in self._born:
                self._born[id(tensor)] = self._count
                self._alive.append(tensor)

    def note_read(self, function: object, arguments: object) -> None:
        """Note that a function reads tensors; ``shape`` and its like read none."""
        if self._writes and "metadata" not in effects_of(function_name(function)):
            self.note_returned(arguments)

    def note_returned(self, values: object) -> None:
        """Note that tensors are read."""
        for tensor in tensors_in(values) if self._writes else ():
            born = self._born.get(id(tensor), 0)
            for number, key in self._writes.get(_memory(tensor), ()):
                if born < number:
                    self.read_again.add(key)


def _memory(tensor: Tensor) -> int:
    address = address_of(tensor)
    return id(tensor) if address is None else address
