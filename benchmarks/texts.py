"""Sentences of the documentation of installed packages, and a small BERT that tells whose they are.

Docstrings are read from source files, nothing is imported. Sentences are cut into words and signs,
of which the most frequent have a number; a line of numbers begins with that of the class token and
is filled up with zeros, which attention does not read.
"""

from __future__ import annotations

import ast
import importlib.util
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Whose sentences there are: packages, and folders of the standard library.
SOURCES = ("torch", "numpy", "scipy", "sklearn", "email", "asyncio")
#: Sentences of each, at most, and their words.
_SENTENCES, _FEWEST_WORDS, _MOST_WORDS = 4000, 5, 31
#: Numbers of words, the first three of which stand for what is no word.
_WORDS = 4000
_FILLED_UP, _UNKNOWN, _CLASS = 0, 1, 2
_LENGTH = _MOST_WORDS + 1


@dataclass(frozen=True)
class Texts:
    """Sentences as numbers of words (n, length), and the number of the source of each."""

    words: Tensor
    labels: Tensor

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return some sentences and their labels, as training takes them."""
        return self.words[index], self.labels[index]

    def parts(self) -> tuple[Tensor, Tensor]:
        """Return both tensors, as a file holds them."""
        return self.words, self.labels


def _docstrings(folder: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for path in sorted(folder.rglob("*.py")):
        if "tests" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, kinds):
                yield ast.get_docstring(node) or ""


def _sentences(source: str) -> list[list[str]]:
    """Return different sentences of a source, each as its words."""
    spec = importlib.util.find_spec(source)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{source} is not installed, whose sentences a network reads")
    found: dict[tuple[str, ...], None] = {}
    for text in _docstrings(Path(spec.submodule_search_locations[0])):
        for sentence in re.split(r"[.:]\s|\n\s*\n", text):
            words = re.findall(r"[a-z]+|[^\sa-z]", sentence.lower())
            if _FEWEST_WORDS <= len(words) <= _MOST_WORDS:
                found[tuple(words)] = None
        if len(found) >= 2 * _SENTENCES:
            break
    chosen = list(map(list, found))
    random.Random(0).shuffle(chosen)
    return chosen[:_SENTENCES]


def read_texts() -> tuple[Texts, Texts]:
    """Return sentences to train and calibrate with, and a fifth of all to test with."""
    labelled = [
        (words, label)
        for label, source in enumerate(SOURCES)
        for words in _sentences(source)
    ]
    random.Random(1).shuffle(labelled)
    test_size = len(labelled) // 5
    counts = Counter(word for words, _ in labelled[test_size:] for word in words)
    frequent = counts.most_common(_WORDS - _CLASS - 1)
    number_of = {word: n for n, (word, _) in enumerate(frequent, _CLASS + 1)}
    lines = torch.full((len(labelled), _LENGTH), _FILLED_UP)
    for line, (words, _) in zip(lines, labelled, strict=True):
        numbers = [_CLASS, *(number_of.get(word, _UNKNOWN) for word in words)]
        line[: len(numbers)] = torch.tensor(numbers)
    labels = torch.tensor([label for _, label in labelled])
    test = Texts(lines[:test_size], labels[:test_size])
    return Texts(lines[test_size:], labels[test_size:]), test


class _Block(nn.Module):
    """A layer of BERT: attention and two linear layers, with a norm behind each sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, is_read: Tensor) -> Tensor:
        samples, positions, width = x.shape

        def by_head(y: Tensor) -> Tensor:
            size = (samples, positions, self.heads, width // self.heads)
            return y.view(size).transpose(1, 2)

        y = F.scaled_dot_product_attention(
            by_head(self.query(x)),
            by_head(self.key(x)),
            by_head(self.value(x)),
            attn_mask=is_read,
        )
        y = self.output(y.transpose(1, 2).reshape(samples, positions, width))
        x = self.norm1(x + self.drop(y))
        return self.norm2(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class Bert(nn.Module):
    """A small BERT (Devlin et al., 1810.04805) that says from which source a sentence is."""

    def __init__(self, width: int = 128, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.places = nn.Embedding(_LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(depth))
        self.pooler = nn.Linear(width, width)
        self.head = nn.Linear(width, len(SOURCES))
        self.register_buffer("positions", torch.arange(_LENGTH))

    def forward(self, words: Tensor) -> Tensor:
        """Return the logits (n, sources) of numbers of words (n, length)."""
        is_read = (words != _FILLED_UP)[:, None, None, :]
        x = self.norm(self.words(words) + self.places(self.positions))
        for block in self.blocks:
            x = block(x, is_read)
        return self.head(self.pooler(x[:, 0]).tanh())
