"""``Graph``: passes by name, their conditions, and the forms of text."""

import copy
import json

import pytest
import torch
from torch import Tensor, fx, nn

import torchq
from torchq.errors import ConfigError, GraphError
from torchq.graph import PASSES, Graph, GraphPass, graph_pass


class Net(nn.Module):
    """A BatchNorm, a dropout, an identity, and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout()
        self.same = nn.Identity()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.same(self.drop(self.norm(self.conv(x)).relu()))
        return self.head(y.mean((2, 3))) + 1


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    actual = Net().eval()
    nn.init.uniform_(actual.norm.running_mean)
    nn.init.uniform_(actual.norm.running_var, 0.5, 2)
    return actual


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", sorted(PASSES))
def test_each_pass_is_pure_and_keeps_the_result(name: str, model: Net) -> None:
    graph = Graph(model, X)
    before = graph.ir()
    state = copy.deepcopy(model.state_dict())
    result = graph.apply(name)
    torch.testing.assert_close(
        result.module(X),
        model(X),
        rtol=1e-5,
        atol=1e-6,
    )
    assert graph.ir() == before
    assert model.drop.p == 0.5
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])


def kinds(graph: Graph) -> set[str]:
    return {type(module).__name__ for module in graph.module.modules()}


def test_what_each_pass_leaves(model: Net) -> None:
    graph = Graph(model, X)
    assert "Identity" not in kinds(graph.apply("remove_identity"))
    simple = graph.apply("simplify_inference")
    assert not {"Dropout", "BatchNorm2d"} & kinds(simple)
    assert "mul(" in simple.ir()
    assert torchq.fusion.api.fold_bn is PASSES["fold_bn"].function
    assert "BatchNorm2d" not in kinds(graph.apply(["fold_bn", "remove_identity"]))
    assert "BatchNorm2d" in kinds(graph)


def test_dead_nodes_and_their_modules_disappear(model: Net) -> None:
    graph = Graph(model, X)
    with graph.module.graph.inserting_before(graph.module.graph.output_node()):
        graph.module.graph.call_module("same", (next(iter(graph.module.graph.nodes)),))
    nodes = len(graph.module.graph.nodes)
    assert len(graph.apply("dce").module.graph.nodes) == nodes - 1


def test_branches_are_merged() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Conv2d(4, 4, 3, padding=1)
            self.narrow = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(x) + self.narrow(x) + x

    x = torch.randn(1, 4, 6, 6)
    model = nn.Sequential(Block(), nn.ReLU()).eval()
    merged = Graph(model, x).apply("merge_branches")
    torch.testing.assert_close(
        merged.module(x),
        model(x),
        rtol=1e-4,
        atol=1e-5,
    )


def test_shapes_and_types_are_attributes(model: Net) -> None:
    graph = Graph(model, X).apply(["infer_shape", "infer_dtype"])
    assert graph.attributes["shape"]["conv"] == (2, 4, 8, 8)
    assert graph.attributes["dtype"]["conv"] is torch.float32
    assert "= conv(%x), shape=(2, 4, 8, 8)" in graph.ir("shape")
    # A rewritten graph has other nodes.
    assert set(graph.apply("dce").attributes) == {"example"}


def test_conditions_are_checked(model: Net) -> None:
    module = Graph(model, X).module
    with pytest.raises(
        GraphError, match=r"lacks 'example'. Pass it: Graph\(model, example"
    ):
        Graph(module).apply("infer_shape")
    PASSES.add("needs", GraphPass("needs", lambda graph: graph, requires=("shape",)))
    PASSES.add("breaks", GraphPass("breaks", lambda graph: graph, provides=("memory",)))
    try:
        with pytest.raises(GraphError, match="Apply 'infer_shape' first"):
            Graph(module).apply(["dce", "needs"])
        with pytest.raises(GraphError, match="did not give the attribute 'memory'"):
            Graph(module).apply("breaks")
    finally:
        PASSES.remove("needs")
        PASSES.remove("breaks")
    with pytest.raises(ConfigError, match="unknown graph pass 'fold'"):
        Graph(module).apply("fold")
    with pytest.raises(ConfigError, match="without an example"):
        Graph(model)


def test_constants_are_computed_once_but_not_random_values() -> None:
    root = nn.Module()
    drawn = fx.Graph()
    root.register_parameter("weight", nn.Parameter(torch.tensor([1.0, 2.0, 3.0])))
    x = drawn.placeholder("x")
    weight = drawn.get_attr("weight")
    doubled = drawn.call_function(torch.exp, (drawn.call_method("mul", (weight, 2)),))
    noise = drawn.call_function(torch.rand, (3,))
    total = drawn.call_function(torch.add, (x, doubled))
    drawn.output(drawn.call_function(torch.sub, (total, noise)))
    graph = Graph(fx.GraphModule(root, drawn))
    folded = graph.apply("constant_fold")
    assert "rand" in folded.ir()
    assert "exp" in graph.ir()
    assert "exp(" not in folded.ir()
    assert "mul(" not in folded.ir()
    torch.manual_seed(0)
    expected = graph.module(torch.ones(3))
    torch.manual_seed(0)
    assert torch.equal(folded.module(torch.ones(3)), expected)
    assert [name for name, _ in folded.module.named_buffers()] == ["exp_value"]


def test_forms_of_text(model: Net) -> None:
    graph = Graph(model, X).with_attributes(title="net", note={"conv": torch.float32})
    assert graph.attributes["title"] == "net"
    data = json.loads(graph.json())
    names = [node["name"] for node in data["nodes"]]
    conv = data["nodes"][names.index("conv")]
    assert conv["op"] == "conv"
    assert conv["inputs"] == data["arg_nodes"] == [0]
    assert data["attrs"] == {"title": "net", "note": {"conv": "torch.float32"}}
    assert data["nodes"][data["heads"][0]]["op"] == "add"
    lines = graph.ir().splitlines()
    assert lines[0] == "Graph(%x) {"
    assert lines[-1] == "attributes = ['example', 'note', 'title']"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.act = nn.Hardswish(inplace=True)
        self.register_buffer("steps", torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y.mul_(3)
        torch.add(y, 1, out=y)
        self.act(y)
        scale = self.steps * 2
        scale.mul_(2)
        return y * scale


@pytest.mark.parametrize("name", sorted(PASSES))
def test_effects_in_place_survive_each_pass(name: str) -> None:
    model = InPlace().eval()
    result = Graph(model, X).apply(name)
    # Passes that fold numbers move them in the last digits.
    with torch.no_grad():
        torch.testing.assert_close(
            result.module(X),
            model(X),
            rtol=1e-5,
            atol=1e-6,
        )


def test_dropout_that_is_always_on_stays() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(nn.functional.dropout(x, 0.5), 0.5, False)

    graph = Graph(Net().eval(), X).apply("simplify_inference")
    assert graph.ir().count("dropout") == 1


def test_a_pass_that_computes_something_else_is_refused(model: Net) -> None:
    def scaled(graph: Graph) -> Graph:
        module = fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            output.args = (
                module.graph.call_function(torch.mul, (output.args[0], 1.01)),
            )
        return graph.with_module(fx.GraphModule(module, module.graph))

    def lossy(graph: Graph) -> Graph:
        return scaled(graph)

    graph = Graph(model, X)
    try:
        graph_pass()(scaled)
        graph_pass(rounding=0.02)(lossy)
        with pytest.raises(
            GraphError, match=r"scaled: its graph is off by 1\.0e-02.*at most 0e\+00"
        ):
            graph.apply("scaled")
        torch.testing.assert_close(
            graph.apply("lossy").module(X),
            1.01 * model(X),
        )
    finally:
        for name in ("scaled", "lossy"):
            PASSES.remove(name)
