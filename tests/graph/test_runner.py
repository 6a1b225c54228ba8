"""The runner of graphs: values of eager models, freed in time, with errors that name the place."""

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError, GraphError
from torchq.graph import GraphRunner, NodeMeta, trace

X = torch.linspace(-2, 2, 24).reshape(2, 12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.act = nn.ReLU(inplace=True)
        self.second = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(x)))


class Net(nn.Module):
    """Two blocks, the last with an activation of its own, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Block()
        self.two = Block()
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
        x = self.two(self.one(x))
        if scale is not None:
            x = x * scale
        return {"logits": self.head(x), "features": x}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def runner(net: Net) -> GraphRunner:
    return GraphRunner(trace(net, X).graph_module)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "googlenet"])
def test_networks_give_the_values_of_the_eager_model(name: str) -> None:
    torchvision = pytest.importorskip("torchvision")
    options = {"init_weights": False} if name == "googlenet" else {}
    model = getattr(torchvision.models, name)(weights=None, **options).eval()
    x = torch.randn(1, 3, 64, 64)
    actual = trace(model, x)
    runner = GraphRunner(actual.graph_module)
    with torch.no_grad():
        expected = model(x.clone())
    assert actual.level == "module"
    assert torch.equal(runner.run(x), expected)
    names = [n.name for n in actual.graph_module.graph.nodes if n.op == "call_module"][
        :12
    ]
    together = runner.run(x, outputs=names)
    alone = [runner.run(x, outputs=name) for name in names]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_the_structure_of_the_result_is_that_of_the_model(
    net: Net, runner: GraphRunner
) -> None:
    expected = net(X)
    actual = runner.run(X)
    assert list(actual) == ["logits", "features"]
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


@pytest.mark.parametrize("inputs", [X, (X,), [X], {"x": X}])
def test_inputs_are_a_tensor_a_sequence_or_a_mapping(
    runner: GraphRunner, inputs
) -> None:
    assert torch.equal(
        runner.run(inputs, outputs="head"),
        runner.run(X)["logits"],
    )


def test_modules_and_duplicates_are_outputs(net: Net, runner: GraphRunner) -> None:
    one, again, head = runner.run(X, outputs=["one", "one", "head"])
    assert torch.equal(one, net.one(X))
    assert one is again
    assert torch.equal(head, net(X)["logits"])


@pytest.mark.parametrize("others", [[], ["one.act"], ["one.second", "head"]])
def test_a_value_is_that_of_its_node_whatever_else_is_asked_for(
    net: Net, runner: GraphRunner, others: list[str]
) -> None:
    value = runner.run(X, outputs=["one.first", *others])[0]
    assert torch.equal(value, net.one.first(X))
    assert value.lt(0).any()


def test_values_behind_a_quantizer_that_is_off_are_not_overwritten() -> None:
    off = torchq.TensorQuantizer(torchq.QuantDescriptor())
    off.mode = "off"
    model = nn.Sequential(
        nn.Linear(12, 4), off, nn.Flatten(), nn.ReLU(inplace=True)
    ).eval()
    runner = GraphRunner(trace(model, X).graph_module)
    assert torch.equal(
        runner.run(X, outputs=["0", "3"])[0],
        model[0](X),
    )


def test_given_values_replace_nodes_and_are_not_overwritten(
    net: Net, runner: GraphRunner
) -> None:
    value = torch.linspace(-1, 1, 24).reshape(2, 12)
    before = value.clone()
    got = runner.run({"x": X, "one.first": value}, outputs="one")
    assert torch.equal(got, X + net.one.second(before.relu()))
    assert torch.equal(value, before)
    assert torch.equal(
        runner.run({"one": X}, outputs="head"),
        net.head(net.two(X)),
    )


def test_only_ancestors_run(net: Net, runner: GraphRunner) -> None:
    ran: list[str] = []
    for name, module in net.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    runner.run(X, outputs=["two.first"])
    assert ran == ["one.first", "one.act", "one.second", "two.first"]


class InPlace(nn.Module):
    """Overwrites a value through a view, in a statement whose result nothing reads."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.view(-1).add_(1)
        return y.sin()


class ItemAssigning(nn.Module):
    """Overwrites a value in a way that torch.fx cannot follow."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y[0] = y[1]
        return y.sin()


@pytest.mark.parametrize(
    ("cls", "level"), [(InPlace, "module"), (ItemAssigning, "aten")]
)
def test_statements_that_overwrite_run_before_their_value_is_read(
    cls, level: str
) -> None:
    actual = trace(cls(), X)
    runner = GraphRunner(actual.graph_module)
    assert actual.level == level
    assert torch.equal(
        runner.run(X, outputs="sin"),
        cls()(X),
    )
    assert torch.equal(
        runner.run(X, outputs=["mul", "sin"])[0],
        X * 2,
    )
    assert torch.equal(runner.run(X), cls()(X))


def test_gradients_are_recorded_on_request(net: Net, runner: GraphRunner) -> None:
    x = X.clone().requires_grad_()
    assert not runner.run(x, outputs="head").requires_grad
    runner.run(x, outputs="head", grad=True).sum().backward()
    expected = X.clone().requires_grad_()
    net(expected)["logits"].sum().backward()
    assert torch.equal(x.grad, expected.grad)


# --- hooks --------------------------------------------------------------------------------------


def test_hooks_see_and_replace(net: Net, runner: GraphRunner) -> None:
    seen: list[Tensor] = []
    hooks = {
        "one": lambda value: seen.append(value.clone()),
        "head": (
            lambda args, kwargs: ((args[0] * 0,), kwargs),
            lambda value: value + 1,
        ),
        "two.first": (lambda args, kwargs: None, None),
    }
    got = runner.run(X, outputs="head", hooks=hooks)
    assert torch.equal(got, net.head(torch.zeros(2, 12)) + 1)
    assert torch.equal(seen[0], net.one(X))


def test_hooks_may_run_the_same_runner(net: Net, runner: GraphRunner) -> None:
    inner: list[Tensor] = []
    hook = {"two.first": lambda value: inner.append(runner.run(X * 2, outputs="head"))}
    assert torch.equal(
        runner.run(X, outputs="head", hooks=hook),
        net(X)["logits"],
    )
    assert torch.equal(
        inner[0],
        net(X * 2)["logits"],
    )


def test_threads_share_a_runner(net: Net, runner: GraphRunner) -> None:
    barrier = threading.Barrier(2)
    actual: dict[int, list[Tensor]] = {1: [], 2: []}

    def work(factor: int) -> None:
        def meet(value: Tensor) -> None:
            barrier.wait(10)

        for _ in range(10):
            actual[factor].append(
                runner.run(X * factor, outputs="head", hooks={"one.second": meet})
            )

    threads = [threading.Thread(target=work, args=(factor,)) for factor in actual]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for factor, values in actual.items():
        expected = net(X * factor)["logits"]
        assert len(values) == 10
        assert all(torch.equal(v, expected) for v in values)


# --- values are freed ---------------------------------------------------------------------------


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            x = x.sin()
        return x.reshape(3, 8)


def watched(runner: GraphRunner, alive: list[weakref.ref]) -> dict[str, object]:
    """Return hooks that count how many values live when each node has run."""

    def note(value: Tensor) -> None:
        alive.append(weakref.ref(value))
        counts.append(sum(ref() is not None for ref in alive))

    counts: list[int] = []
    hooks = {name: note for name in runner.node_names if name.startswith("sin")}
    return {"hooks": hooks, "counts": counts}


def test_values_are_freed_after_their_last_use() -> None:
    runner = GraphRunner(trace(Chain(), X).graph_module)
    alive: list[weakref.ref] = []
    actual = watched(runner, alive)
    runner.run(X, hooks=actual["hooks"])
    assert actual["counts"] == [1, 2, 2, 2, 2, 2]
    assert [ref() for ref in alive] == [None] * 6


def test_values_are_freed_after_an_error() -> None:
    runner = GraphRunner(trace(Chain(), X).graph_module)
    alive: list[weakref.ref] = []
    actual = watched(runner, alive)
    with pytest.raises(GraphError, match="reshape") as caught:
        runner.run(
            X[:, :5],
            outputs=["sin_2", "reshape"],
            hooks=actual["hooks"],
        )
    held = [ref() is not None for ref in alive]
    # The traceback holds the arguments of the node that failed.
    assert held[:-1] == [False] * 5
    del caught
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6


# --- ranges and figures -------------------------------------------------------------------------


def test_a_range_runs_on_values_of_its_border(net: Net, runner: GraphRunner) -> None:
    (border,) = runner.range_inputs("two", "head")
    value = runner.run(X, outputs=border)
    assert torch.equal(value, net.one(X))
    assert torch.equal(
        runner.run_range("two", "head", value),
        net(X)["logits"],
    )
    assert torch.equal(
        runner.run_range("two", "head", {border: value}), net(X)["logits"]
    )


def test_figures_of_nodes(net: Net, runner: GraphRunner) -> None:
    actual = runner.trace_meta(X)
    assert list(actual) == list(runner.node_names)[: len(actual)]
    assert actual["head"] == NodeMeta(
        "head", (2, 3), torch.float32, 2 * 3 * 4, 2 * 2 * 12 * 3
    )
    assert actual["add"] == NodeMeta("one", (2, 12), torch.float32, 2 * 12 * 4, 0)
    assert actual["x"].operations == 0
    assert actual["x"].shape == (2, 12)


# --- errors -------------------------------------------------------------------------------------


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 12),
            nn.ReLU(),
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.layers(self.layers(x)) + y


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"outputs": ["one.frist"]},
            r"run: outputs: got 'one.frist'; expected .*one\.first",
        ),
        ({"outputs": "hed"}, r"outputs: got 'hed'; .* Close names: .*head"),
        ({"hooks": {"two.ackt": print}}, r"run: hooks: got 'two.ackt'; .*two\.act"),
        (
            {"hooks": {"head": 3}},
            r"hooks: got 3 for 'head'; expected a function, or a pair",
        ),
        (
            {"hooks": {"one": print, "add": print}},
            r"hooks: got two entries for node 'add'",
        ),
        ({"inputs": {"xx": X}}, r"run: inputs: got 'xx'; .* Close names: .*x"),
        ({"inputs": {"one": X, "add": X}}, r"inputs: got two entries for node 'add'"),
        ({"inputs": {}}, r"run: inputs: got no value for x\. Give them"),
        ({"inputs": (X, None, X)}, r"inputs: got 3 values; expected 1 for x, "),
    ],
)
def test_wrong_arguments_are_named(runner: GraphRunner, arguments, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        runner.run(**{"inputs": X, **arguments})


def test_paths_of_several_values_are_refused() -> None:
    runner = GraphRunner(trace(Repeated(), (X, X)).graph_module)
    message = r"'layers.0', which is called 2 times; .*: layers_0, layers_2"
    with pytest.raises(ConfigError, match=message):
        runner.run((X, X), outputs="layers.0")
    with pytest.raises(ConfigError, match=r"got 1 values; expected 2 for x, y"):
        runner.run(X)


def test_wrong_ranges_are_named(runner: GraphRunner) -> None:
    with pytest.raises(
        ConfigError, match=r"from 'head' to 'one', whose end comes before"
    ):
        runner.run_range("head", "one", X)
    with pytest.raises(ConfigError, match=r"run_range: inputs: got no value for add\."):
        runner.run_range("two", "head", {"x": X})


def test_a_failing_node_is_named_with_its_module_and_line(runner: GraphRunner) -> None:
    with pytest.raises(GraphError) as caught:
        runner.run(X[:, :7])
    message = str(caught.value)
    assert message.startswith('one.first (node one_first), File "')
    assert "test_runner.py" in message
    assert "return x + self.second(self.act(self.first(x)))" in message
    assert "got RuntimeError: " in message
    assert "mat1 and mat2 shapes cannot be multiplied" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_wrong_pre_hook_is_named(runner: GraphRunner) -> None:
    with pytest.raises(
        GraphError, match=r"^head \(node head\).* pre hook returned a Tensor; exp"
    ):
        runner.run(X, hooks={"head": (lambda args, kwargs: args[0], None)})
