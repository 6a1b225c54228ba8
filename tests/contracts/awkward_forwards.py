"""Forwards in which conversion, deployment or correction could lose something, by name.

Each is written as users write them: effects in place, aliases, methods of one object, closures,
decorators, generators, exceptions, containers, hooks, state, noise, routing and masks.
"""

import collections
import contextlib
import dataclasses
import functools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: Name -> the class of a network for images of 3 channels, made without arguments.
AWKWARD: dict[str, Callable[[], nn.Module]] = {}


def awkward(name: str) -> Callable[[Any], Any]:
    def enter(make: Any) -> Any:
        AWKWARD[name] = make
        return make

    return enter


class Base(nn.Module):
    """Two layers, something between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 4, 1)

    def tail(self, h: Tensor) -> Any:
        return h + self.b(h)

    def forward(self, x: Tensor) -> Any:
        return self.c(self.tail(self.a(x)))


# --- effects in place -----------------------------------------------------------------------------


@awkward("in place: a statement")
class Statement(Base):
    def tail(self, h: Tensor) -> Any:
        o = self.b(h)
        o.add_(h)
        o.mul_(2)
        return o


@awkward("in place: an alias")
class Alias(Base):
    def tail(self, h: Tensor) -> Any:
        o = kept = self.b(h)
        o += h
        o *= self.b(o)
        return kept


@awkward("in place: a slice")
class Slice(Base):
    def tail(self, h: Tensor) -> Any:
        h[:, :4].mul_(3)
        h[:, 4:] += h[:, :4]
        return h + self.b(h)


@awkward("in place: a view")
class View(Base):
    def tail(self, h: Tensor) -> Any:
        rows = h.flatten(1)
        rows.add_(1).relu_()
        return h + self.b(h)


@awkward("in place: out=")
class Out(Base):
    def tail(self, h: Tensor) -> Any:
        o = torch.empty_like(h)
        torch.add(h, self.b(h), out=o)
        torch.mul(o, o, out=o)
        return o


@awkward("in place: flags of functions")
class Flags(Base):
    def tail(self, h: Tensor) -> Any:
        F.silu(h, inplace=True)
        F.hardswish(h, True)
        F.relu_(h)
        return self.b(h)


@awkward("in place: a module as a statement")
class Modules(Base):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU(inplace=True)

    def tail(self, h: Tensor) -> Any:
        self.act(h)
        return self.b(h) + h


@awkward("in place: a method that returns nothing")
class Nothing(Base):
    def grow(self, h: Tensor) -> None:
        h += self.b(h)

    def tail(self, h: Tensor) -> Any:
        self.grow(h)
        return h


@awkward("in place: another type")
class Narrow(Base):
    def tail(self, h: Tensor) -> Any:
        h = h.half()
        h += self.b(h.float())
        return h.float()


@awkward("in place: its own input")
class Normalised(Base):
    def forward(self, x: Tensor) -> Any:
        x.sub_(0.5).div_(0.25)
        return super().forward(x)


@awkward("in place: what a list holds")
class Listed(Base):
    def tail(self, h: Tensor) -> Any:
        maps = [h, self.b(h)]
        maps[0] += maps[1]
        maps[1].add_(maps[0])
        return sum(maps)


# --- which function is called ---------------------------------------------------------------------


@awkward("functions: a method of the object")
def bound() -> nn.Module:
    model = Base()
    model.tail = types.MethodType(lambda self, h: h * 3 - self.b(h), model)  # type: ignore[method-assign]
    return model


@awkward("functions: a partial of the object")
def partial() -> nn.Module:
    model = Base()
    model.tail = functools.partial(lambda h, k: h * k + h, k=3.0)  # type: ignore[method-assign]
    return model


@awkward("functions: a closure of the forward")
class Closure(Base):
    def tail(self, h: Tensor) -> Any:
        scale = h.mean() + 2

        def inside(y: Tensor, other: Any = None) -> Tensor:
            return y * scale + (y if other is None else other)

        return inside(self.b(h), h) + inside(h)


@awkward("functions: a lambda in a comprehension")
class Lambdas(Base):
    def tail(self, h: Tensor) -> Any:
        steps = [lambda y, k=k: y * k + self.b(y) for k in (1.0, 2.0)]
        return functools.reduce(lambda y, step: step(y), steps, h)


@awkward("functions: recursion")
class Recursive(Base):
    def tail(self, h: Tensor, depth: int = 2) -> Any:
        return h if depth == 0 else h + self.tail(self.b(h), depth - 1)


@awkward("functions: super and dispatch by name")
class Dispatched(Base):
    def doubled(self, h: Tensor) -> Any:
        return h + h

    def tail(self, h: Tensor) -> Any:
        return getattr(self, "doubled")(super().tail(h))  # noqa: B009


@awkward("functions: static and class methods, properties")
class Methods(Base):
    factor = 3.0

    @staticmethod
    def pooled(h: Tensor) -> Tensor:
        return h.mean((2, 3), keepdim=True)

    @classmethod
    def scaled(cls, h: Tensor) -> Tensor:
        return h * cls.factor + h

    @property
    def shift(self) -> Tensor:
        return self.b.bias.view(1, -1, 1, 1)

    def tail(self, h: Tensor) -> Any:
        return self.scaled(self.b(h)) * self.pooled(h) + self.shift


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 2

    return wrapper


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    results: dict[Any, Any] = {}

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if args not in results:
            results[args] = function(*args, **kwargs)
        return results[args]

    return wrapper


@awkward("functions: decorators")
class Decorated(Base):
    @staticmethod
    @cached
    def table(rows: int) -> Tensor:
        return torch.zeros(1, 8, rows, rows) + torch.ones(())

    @logged
    def tail(self, h: Tensor) -> Any:
        return h + self.table(h.shape[2]) + self.b(h)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.c(self.a(x))


@awkward("functions: generators")
class Generators(Base):
    def stages(self, h: Tensor) -> Iterator[Tensor]:
        for _ in range(2):
            h = h + self.b(h)
            yield h

    def tail(self, h: Tensor) -> Any:
        return sum(y * 2 for y in self.stages(h))


class NotYet(Exception):
    """What tells the caller to take another way."""


@awkward("functions: exceptions")
class Exceptions(Base):
    def first(self, h: Tensor) -> Any:
        h += 1
        doubled = h + h
        raise NotYet(doubled)

    def tail(self, h: Tensor) -> Any:
        try:
            return self.first(h)
        except NotYet as error:
            return self.b(h) + error.args[0]
        finally:
            h.add_(1)


@awkward("functions: contexts")
class Contexts(Base):
    @contextlib.contextmanager
    def scaled(self) -> Iterator[float]:
        yield 2.0

    def tail(self, h: Tensor) -> Any:
        with self.scaled() as scale, torch.autocast("cpu", enabled=False):
            return h * scale + self.b(h) * h


@awkward("functions: checkpoints")
class Checkpointed(Base):
    def tail(self, h: Tensor) -> Any:
        return checkpoint(super().tail, h, use_reentrant=False) + h


@awkward("functions: a branch on shapes")
class Branches(Base):
    def tail(self, h: Tensor) -> Any:
        return h + self.b(h) if h.shape[1] == 8 else h


@awkward("functions: torch.vmap")
class Mapped(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8) / 4)
        self.linear = nn.Linear(8, 8)

    def tail(self, h: Tensor) -> Any:
        rows = h.permute(0, 2, 3, 1)
        rows = torch.vmap(lambda v: F.linear(v, self.weight) * 2 + v.sum())(rows)
        return torch.vmap(self.linear)(rows).permute(0, 3, 1, 2) + self.b(h)


# --- values and containers ------------------------------------------------------------------------


@dataclasses.dataclass
class Features:
    """A result with names."""

    map: Tensor
    pooled: Any = None


class Pair(NamedTuple):
    """Two results."""

    first: Tensor
    second: Tensor


@awkward("values: dataclasses and named tuples")
class Named(Base):
    def features(self, h: Tensor) -> Features:
        return Features(
            h + self.b(h),
            pooled=Pair(h * 2, second=h.mean()),
        )

    def forward(self, x: Tensor) -> Any:
        actual = self.features(self.a(x))
        actual.map += actual.pooled.first
        out = self.c(actual.map * actual.pooled.second)
        return {"out": out, "all": [Features(out + out), Pair(out, out * out)]}


@awkward("values: dictionaries, walrus, stars")
class Dictionaries(Base):
    def joined(self, *maps: Tensor, **options: Any) -> Tensor:
        return torch.cat([*maps], **options)

    def tail(self, h: Tensor) -> Any:
        maps: dict[Any, Any] = collections.defaultdict(lambda: h)
        for level in ("p3", "p4"):
            maps[level] = (step := self.b(maps["start"])) + maps["start"]
            maps["start"] = step
        first, *_ = self.joined(*maps.values(), dim=1).split(8, 1)
        return first + maps["p4"]


@awkward("values: a sparse matrix")
class Sparse(Base):
    links: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("links", torch.eye(8).to_sparse())

    def tail(self, h: Tensor) -> Any:
        links = self.links + self.links * 0.5
        rows = torch.sparse.mm(links, h.transpose(0, 1).flatten(1))
        return rows.unflatten(1, (h.shape[0], *h.shape[2:])).transpose(0, 1) + self.b(h)


@awkward("containers: a Sequential with operators")
class Sequence(Base):
    class Block(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x) + x
            return x

    def __init__(self) -> None:
        super().__init__()
        self.block = self.Block(
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, 8, 1),
        )

    def tail(self, h: Tensor) -> Any:
        h = self.block(h) * len(self.block)
        return self.block[-1](h) + self.block[:1](h)


@awkward("containers: lists and dictionaries of modules with operators")
class Dense(Base):
    class Levels(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            maps = [x]
            for _, layer in self.items():
                maps.append(layer(maps[-1]) + x)
            return torch.cat(maps, 1)

    class Heads(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            total = self[0](x)
            for i in range(1, len(self)):
                total = total + self[i](x)
            return total

    def __init__(self) -> None:
        super().__init__()
        self.levels = self.Levels({str(i): nn.Conv2d(8, 8, 1) for i in range(2)})
        self.heads = self.Heads(nn.Conv2d(24, 8, 1) for _ in range(2))

    def tail(self, h: Tensor) -> Any:
        y = self.heads(self.levels(h))
        names = list(self.levels)
        return y + sum(head(self.levels(h)) for head in self.heads) + len(names)


@awkward("containers: an unusual __getattr__")
class Lookups(Base):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name.removeprefix("my_"))

    def tail(self, h: Tensor) -> Any:
        return self.my_b(h) + h


@awkward("containers: a weight in two calls")
class Twice(Base):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8) / 4)

    def tail(self, h: Tensor) -> Any:
        y = h.permute(0, 2, 3, 1)
        y = F.linear(y, self.weight) + torch.einsum("bhwc,dc->bhwd", y, self.weight)
        return self.b(y.permute(0, 3, 1, 2)) + h


@awkward("containers: parametrized layers")
class Parametrized(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.utils.parametrizations.weight_norm(self.b)
        self.c = nn.utils.parametrizations.spectral_norm(self.c)


@awkward("containers: a graph of torch.fx")
class Graph(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.fx.symbolic_trace(Base())
        self.d = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x)
        return self.inner(self.d(y)) + y[:, :, 1:-1, 1:-1]


# --- hooks, state, noise --------------------------------------------------------------------------


@awkward("hooks: a result that is changed")
def changed() -> nn.Module:
    model = Base()
    model.b.register_forward_hook(lambda module, args, out: out + 3)
    model.c.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model


@awkward("hooks: a result that becomes a tuple")
class Tuples(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_forward_hook(lambda module, args, out: (out, out.sum()))

    def tail(self, h: Tensor) -> Any:
        out, total = self.b(h)
        return out * total + h


@awkward("state: a buffer")
class Past(Base):
    past: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(()))

    def tail(self, h: Tensor) -> Any:
        h = h + self.b(h) * self.past
        self.past.mul_(0.5).add_(h.mean())
        return h


@awkward("state: attributes and objects")
class Attributes(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.last = None
        self.cache = types.SimpleNamespace(items=[])

    def tail(self, h: Tensor) -> Any:
        self.calls += 1
        h = h * self.calls + self.b(h if self.last is None else h + self.last)
        self.last = h.mean()
        self.cache.items.append(h.sum())
        return h + len(self.cache.items)


class Mean:
    """A running mean, as an object that is called."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self, x: Tensor) -> float:
        self.value = (self.value + float(x.mean())) / 2
        return self.value


@awkward("state: an object that is called")
class Called(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mean = Mean()

    def tail(self, h: Tensor) -> Any:
        return h * (1 + self.mean(h)) + self.b(h)


@awkward("noise: torch's and Python's")
class Noise(Base):
    def tail(self, h: Tensor) -> Any:
        h = h + self.b(h + torch.randn_like(h) * 0.1)
        return h * (1 + random.random() * 0.1)


@awkward("noise: generators of its own")
class OwnNoise(Base):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = random.Random(0)
        self.generator = torch.Generator().manual_seed(1)

    def tail(self, h: Tensor) -> Any:
        noise = torch.rand(h.shape, generator=self.generator)
        return h * self.numbers.random() + self.b(h + noise)


@awkward("noise: dropout that is always on")
class Dropout(Base):
    def tail(self, h: Tensor) -> Any:
        return F.dropout(h, 0.2, training=True) + self.b(h)


# --- data decides ---------------------------------------------------------------------------------


@awkward("routing: experts by position")
class Experts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def tail(self, h: Tensor) -> Any:
        rows = h.permute(0, 2, 3, 1).flatten(0, 2)
        chosen = self.gate(rows).argmax(-1)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            out[chosen == number] = expert(rows[chosen == number])
        return self.b((out + rows).view_as(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))


@awkward("routing: tokens above the median")
class Tokens(Base):
    def tail(self, h: Tensor) -> Any:
        mask = h > h.median()
        h = h.clone()
        h[mask] = h[mask] * 2
        return torch.where(mask, h, self.b(h)) + h


@awkward("routing: an early exit")
class Exits(Base):
    def tail(self, h: Tensor) -> Any:
        for _ in range(3):
            h = h + self.b(h)
            if h.abs().mean() > 0.5:
                return h * 2
        return h


@awkward("masks: padding in torch's attention")
class Padded(Base):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def tail(self, h: Tensor) -> Any:
        rows = h.flatten(2).transpose(1, 2)
        padding = torch.zeros(rows.shape[:2], dtype=torch.bool)
        padding[:, -5:] = True
        out, weights = self.attention(rows, rows, rows, key_padding_mask=padding)
        return (out + rows).transpose(1, 2).view_as(h) * weights.sum()


@awkward("masks: attention by functions")
class Masked(Base):
    def tail(self, h: Tensor) -> Any:
        q = h.flatten(2).transpose(1, 2).unflatten(-1, (2, 4)).transpose(1, 2)
        keep = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
        first = F.scaled_dot_product_attention(q, q, q, attn_mask=keep)
        scores = q @ q.transpose(-1, -2) / 2 + (~keep) * -1e4
        y = first + scores.softmax(-1) @ q
        return self.b(y.transpose(1, 2).flatten(2).transpose(1, 2).view_as(h)) + h


@awkward("masks: infinity that is added")
class Infinite(Base):
    def tail(self, h: Tensor) -> Any:
        rows = h.flatten(2).transpose(1, 2)
        scores = rows @ rows.transpose(1, 2)
        later = torch.ones_like(scores[0]).triu(1).bool()
        weights = (scores + torch.zeros(()).masked_fill(later, -torch.inf)).softmax(-1)
        return (weights @ rows).transpose(1, 2).reshape(h.shape) + self.b(h)


@awkward("masks: a transformer with padding")
class Encoder(Base):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def tail(self, h: Tensor) -> Any:
        rows = h.flatten(2).transpose(1, 2)
        padding = torch.zeros(rows.shape[:2], dtype=torch.bool)
        padding[:, -5:] = True
        return (
            self.encoder(rows, src_key_padding_mask=padding).transpose(1, 2).view_as(h)
        )


@awkward("scripted: a part and a function")
def scripted() -> nn.Module:
    class Scripted(Base):
        def __init__(self) -> None:
            super().__init__()
            self.part = torch.jit.script(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()))

        def tail(self, h: Tensor) -> Any:
            return self.part(h) + self.b(h)

    return Scripted()
