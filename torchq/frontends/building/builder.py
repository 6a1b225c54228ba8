"""The graph and the modules that a file is converted into, as converters see them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx, nn

from torchq.frontends.building.paths import free_path, identifier, parent_of
from torchq.frontends.building.values import Constant, Value

#: The key of ``GraphModule.meta`` under which torch looks for attributes that a copy shall have.
_KEPT_BY_COPIES = "_user_preserved_attributes"


class GraphBuilder:
    """What has been converted so far.

    Args:
        where: how errors begin.

    Attributes:
        graph, root: the calls, and the modules and tensors that the calls name.
        values: of the tensors of the file, by name.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.values: dict[str, Value] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._tensors: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []

    def share_parameters(self, other: GraphBuilder) -> None:
        """Use the parameters of another builder for the same tensors of the file."""
        self._parameters = other._parameters

    def input(self, name: str) -> fx.Node:
        """Return a new argument of ``forward``, named after an input of the file."""
        base = wanted = identifier(name)
        taken = {str(node.target) for node in self.graph.nodes if node.op == "placeholder"}
        count = 1
        while wanted in taken or wanted == "self":
            count += 1
            wanted = f"{base}_{count}"
        return self.graph.placeholder(wanted)

    def parameter(
        self, value: Constant, key: str = "", tensor: Tensor | None = None
    ) -> nn.Parameter:
        """Return a parameter with the values of a constant, the same one for the same name.

        Args:
            value: the constant.
            key: tells apart different forms of one tensor of the file, such as its transpose.
            tensor: this form, by default the constant itself.
        """
        tensor = (value.tensor if tensor is None else tensor).contiguous()
        if not value.name:
            return nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        found = self._parameters.get(f"{value.name}\0{key}")
        if found is None:
            found = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            self._parameters[f"{value.name}\0{key}"] = found
        return found

    def stored(self, value: Constant) -> fx.Node:
        """Return a node that gives a constant: a parameter of the result, or a buffer."""
        known = self._tensors.get(id(value.tensor))
        if known is not None:
            return known
        # A slash separates parts of what belongs to one node, whose path a module may take later.
        name = value.name.replace(".", "_") if "/" in value.name else value.name
        path = free_path(self.root, name.replace("/", "_") or "constant")
        parent, leaf = parent_of(self.root, path), path.rpartition(".")[2]
        if value.trainable and value.tensor.is_floating_point():
            parent.register_parameter(leaf, self.parameter(value))
        else:
            # Exporters ask for the memory that the shape says, not one element for all.
            parent.register_buffer(leaf, value.tensor.contiguous())
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        if first is None:
            node = self.graph.get_attr(path)
        else:
            with self.graph.inserting_before(first):
                node = self.graph.get_attr(path)
        self._tensors[id(value.tensor)] = node
        self._kept.append(value.tensor)  # ids stay unique while tensors live
        return node

    def add_module(self, name: str, module: nn.Module, op_type: str) -> str:
        """Put a module into the result under a path made from ``name``; return the path."""
        path = free_path(self.root, name, op_type)
        parent_of(self.root, path).add_module(path.rpartition(".")[2], module)
        return path

    def finish(
        self,
        outputs: Sequence[fx.Node],
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        input_shapes: Sequence[Sequence[int | None] | None],
    ) -> fx.GraphModule:
        """Return the result, in eval mode, without what no output needs.

        Args:
            outputs: what ``forward`` returns: one tensor, or a tuple of several.
            name: of its class.
            input_names: of the file.
            output_names: of the file.
            input_shapes: as far as the file states them, None for an open size or shape.
        """
        self.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
        name = identifier(name)
        draft = fx.GraphModule(self.root, self.graph, class_name=name)
        draft.graph.eliminate_dead_code()
        draft.graph.lint()
        module = fx.GraphModule(draft, draft.graph, class_name=name)  # keeps what the graph uses
        facts = {
            "input_names": list(input_names),
            "input_shapes": list(input_shapes),
            "output_names": list(output_names),
        }
        vars(module).update(facts)
        module.meta[_KEPT_BY_COPIES] = facts
        return module.eval()
