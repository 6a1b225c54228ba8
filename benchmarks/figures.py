"""Print the tables of measured figures into README and docs/benchmarks.md.

A page holds ``<!-- NAME -->`` and ``<!-- end -->`` around each table. Every figure is read from the
newest line in benchmarks/results/ that fits, so a new run of a benchmark and a new run of this
program renew a page.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md")
TABLE = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
ZOO = ("torchvision", "timm", "ultralytics", "smp", "transformers")


@dataclass(frozen=True)
class Measured:
    """The result lines of all benchmarks, the newest last."""

    rows: Sequence[Mapping[str, Any]]

    def all(self, bench: str, **wanted: object) -> list[Mapping[str, Any]]:
        """Return the lines of a benchmark that have all ``wanted`` values."""
        of_bench = (row for row in self.rows if row["bench"] == bench)
        return [
            row for row in of_bench if all(row.get(k) == v for k, v in wanted.items())
        ]

    def value(self, key: str, bench: str, **wanted: object) -> Any:
        """Return one figure of the newest line that has all ``wanted`` values.

        Raises:
            LookupError: no line has them; the benchmark wrote something else than is shown.
        """
        rows = [row for row in self.all(bench, **wanted) if key in row]
        if not rows:
            raise LookupError(f"no line of {bench} has {key} and {wanted}")
        return rows[-1][key]


def read_results(folder: Path = ROOT / "benchmarks" / "results") -> Measured:
    """Return every result line of a folder."""
    return Measured(
        [row for path in sorted(folder.glob("*.jsonl")) for row in read_file(path).rows]
    )


def read_file(path: Path) -> Measured:
    """Return every result line of a file."""
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return Measured([row for row in rows if row["kind"] == "result"])


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _span(values: Iterable[float], text: str = "{:.1f}") -> str:
    """Return the least and the largest value, or the one that both are."""
    ordered = sorted(values)
    low = text.format(ordered[0])
    high = text.format(ordered[-1])
    return low if low == high else f"{low} to {high}"


# --- single figures, which the pictures show too ------------------------------------------------


def accuracies(measured: Measured) -> tuple[float, float]:
    """Return the accuracy of ResNet-20 in FP32, and the one in INT8 with the range by MSE."""
    lookup = {"key": "accuracy", "bench": "accuracy_qat", "network": "resnet20"}
    plain = measured.value(widths="fp32", method="fp32", **lookup)
    return plain, measured.value(widths="w8a8", method="ptq mse", **lookup)


def latencies(measured: Measured) -> list[float]:
    """Return the ms that ResNet-50 takes for one image in FP32 and deployed on torch."""
    image = {"bench": "deploy_native", "model": "resnet50", "batch": 1, "threads": 1}
    names = ("fp32 eager", "torch quantized, own placement")
    return [1e3 * measured.value("median_s", candidate=name, **image) for name in names]


def memories(measured: Measured) -> list[float]:
    """Return the MiB that ResNet-50 takes in FP32 and deployed, once it has run."""
    lookup = {"bench": "deploy_memory", "model": "resnet50"}
    key = "one_size_anonymous_mib"
    return [measured.value(key, candidate=name, **lookup) for name in ("fp32", "int8")]


def speedup(measured: Measured, model: str, batch: int, candidate: str) -> float:
    """Return how much faster than FP32 eager a network runs on one thread."""
    lookup = {"model": model, "batch": batch, "threads": 1, "candidate": candidate}
    ratio: float = measured.value("speedup", "deploy_native", **lookup)
    return ratio


def _int8(measured: Measured) -> str:
    rows = measured.all("accuracy_qat", network="resnet20", widths="w8a8")
    return (
        _span(row["accuracy"] for row in rows if row["method"].startswith("ptq")) + " %"
    )


def answers_kept(row: Mapping[str, Any]) -> float:
    """Return the share of answers that quantization keeps, in %; of detections the worse one."""
    if "same" in row:
        return float(row["same"])
    return 100 * float(min(row["precision_with_slack"], row["recall_with_slack"]))


def untouched(
    measured: Measured, network: str, recipe: str, method: str = "untouched"
) -> str:
    """Return the least and the largest share of images with the answer of the float network."""
    rows = measured.all("accuracy", network=network, recipe=recipe, method=method)
    return _span(row["same"] for row in rows) + " %"


def _step(measured: Measured, network: str, tool: str) -> str:
    """Return the ratio of a training step, and that of the compiled one in brackets."""
    lookup = {"bench": "qat_step", "model": network}
    eager = f"{measured.value('ratio', mode='eager', candidate=tool, **lookup):.2f}"
    compiled = measured.all(mode="compiled", candidate=f"{tool} compiled", **lookup)
    return f"{eager} ({compiled[-1]['ratio']:.2f})" if compiled else eager


# --- tables ---------------------------------------------------------------------------------------


def overview(measured: Measured) -> str:
    plain, _ = accuracies(measured)
    solved = untouched(measured, "resnet20", "w4a4")
    before, after = (f"{mib:.0f} MiB" for mib in memories(measured))
    accuracy = "ResNet-20, accuracy on 10,000 CIFAR-10 images"
    mobile = untouched(measured, "mobilenet", "int8, onnxruntime")
    four = "ResNet-20, untouched, the same answers"
    slow, fast = (f"{ms:.0f} ms" for ms in latencies(measured))
    step = _step(measured, "ResNet-20", "torchq").split()[0]
    rows = [
        (accuracy, f"{plain:.1f} %", _int8(measured), "", "benchmarks/training.py"),
        (
            "MobileNet, untouched, the same answers",
            "100 %",
            mobile,
            "",
            "benchmarks/accuracy.py",
        ),
        (four, "100 %", "", solved, "benchmarks/accuracy.py"),
        (
            "ResNet-50, time of one image, `deploy`",
            slow,
            fast,
            "",
            "benchmarks/deploy.py",
        ),
        ("ResNet-50, memory", before, after, "", "benchmarks/deploy_memory.py"),
        (
            "ResNet-20, a step of training",
            "1",
            f"{step} times as long",
            "",
            "benchmarks/qat_step.py",
        ),
    ]
    head = ("measured on one CPU thread", "FP32", "INT8", "4 bits", "program")
    return markdown(head, rows)


def fake_quant(measured: Measured) -> str:
    tools = ("torchq", "torchq compiled", "aten", "modelopt", "torchao", "brevitas")
    head = (
        "torchq",
        "torchq, compiled",
        "torch's own operator",
        "ModelOpt",
        "torchao",
        "Brevitas",
    )
    lookup = {"bench": "fake_quant", "case": "int8 per tensor"}
    rows = [
        (
            mode,
            *(
                f"{measured.value('ratio', mode=mode, candidate=t, **lookup):.1f}"
                for t in tools
            ),
        )
        for mode in ("forward", "training", "backward")
    ]
    return markdown(("mode", *head), rows)


def qat_step(measured: Measured) -> str:
    networks = ("ResNet-20", "ResNet-18", "ViT-Tiny")
    tools = ("torchq", "aten", "modelopt", "brevitas")
    rows = [
        (network, *(_step(measured, network, tool) for tool in tools))
        for network in networks
    ]
    return markdown(
        ("network", "torchq", "torch's own operators", "ModelOpt", "Brevitas"), rows
    )


def calibration(measured: Measured) -> str:
    lookup = {"bench": "calibration", "what": "estimate"}

    def seconds(**wanted: object) -> str:
        return f"{1000 * measured.value('median_s', **lookup, **wanted):,.0f} ms"

    rows = [
        (
            "a tensor",
            *(seconds(method="entropy", candidate=c) for c in ("torchq", "ModelOpt")),
        ),
        ("512 channels", seconds(channels=512, candidate="entropy"), ""),
    ]
    return markdown(("entropy range of 2048 bins", "torchq", "ModelOpt"), rows)


def fuse(measured: Measured) -> str:
    exact = {row["network"]: row for row in measured.all("fuse", part="exact")}
    rows = []
    for network in dict.fromkeys([*exact, "repvgg_a0"]):
        error = f"{exact[network]['error_float64']:.0e}" if network in exact else ""
        latencies = measured.all("fuse", part="latency", network=network)
        by_tool = {row["candidate"]: f"{row['ratio']:.2f}" for row in latencies}
        rows.append(
            (network, error, by_tool.get("torchq", ""), by_tool.get("torch", ""))
        )
    return markdown(
        ("network", "error in float64", "time", "time, torch.fx's fuse"), rows
    )


def folds(measured: Measured) -> str:
    """Networks that were folded after training, over checkpoints in float32 and float16."""
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in measured.all("fold_after_training"):
        if "integers_folded_first" in row:
            cells.setdefault((row["network"], row["target"]), []).append(row)
    rows = []
    for (network, target), cases in cells.items():
        folded, refused, counted, beyond = (
            "/".join(dict.fromkeys(str(count) for count in counts))
            for counts in (
                [row["folded"] for row in cases],
                [len(row["refused"]) for row in cases],
                [row["counted"] for row in cases],
                [row["changed_beyond"] for row in cases],
            )
        )
        codes = (
            f"{counted} counted, {beyond} beyond, of {cases[-1]['codes'] / 1e6:.2f} M"
        )
        error = f"{max(row['layer_error'] for row in cases):.0e}"
        integers = "/".join(dict.fromkeys(str(row["integers"]) for row in cases))
        first = f"{integers} of {cases[-1]['layers']} ({cases[-1]['integers_folded_first']})"
        rows.append((network, target, folded, refused, codes, error, first))
    head = (
        "network",
        "target",
        "folded",
        "refused",
        "codes changed",
        "largest error of a layer",
    )
    return markdown((*head, "layers on integers (folded first)"), rows)


def folded_accuracy(measured: Measured) -> str:
    """The accuracy of a network after training, after the fold, and of its file."""
    rows = []
    for row in measured.all("fold_after_training"):
        if "accuracy" in row:
            shares = [row["accuracy"][name] for name in ("trained", "folded", "file")]
            rows.append((row["target"], row["steps"], f"{row['images']:,}", *shares))
    return markdown(("target", "steps", "images", "trained", "folded", "file"), rows)


def accuracy(measured: Measured) -> str:
    """Return the means over draws of benchmarks/accuracy.py, a column for each network."""
    rows = measured.all("accuracy")
    networks = list(dict.fromkeys(row["network"] for row in rows))
    by_method: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        by_network = by_method.setdefault((row["recipe"], row["method"]), {})
        by_network.setdefault(row["network"], []).append(row)
    table = [
        (
            recipe,
            method,
            *(_accuracy_cell(cells.get(network, [])) for network in networks),
        )
        for (recipe, method), cells in sorted(
            by_method.items(), key=lambda item: item[0][0] == "peers"
        )
    ]
    times = (
        [r["ratio"] for r in rows if r["network"] == n and r["method"] == "untouched"]
        for n in networks
    )
    ratios = (f"{mean(values):.1f}" if values else "" for values in times)
    table.append(("CPU time of `untouched`", "over `ranges`", *ratios))
    return markdown(("bits", "how", *networks), table)


def _accuracy_cell(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return lost points, same answers and divergence; or precision and recall, with slack."""
    if not rows or "missing" in rows[-1]:
        return rows[-1]["missing"] if rows else ""

    def of(key: str) -> float:
        return mean(row[key] for row in rows)

    if "kl" in rows[0]:
        return f"{of('drop') + 0.0:.1f} / {of('same'):.1f} % / {of('kl'):.4f}"
    slack = f"{of('precision_with_slack'):.3f}, {of('recall_with_slack'):.3f}"
    return f"{slack} ({of('precision'):.3f}, {of('recall'):.3f})"


def training(measured: Measured) -> str:
    rows = []
    for widths in ("w8a8", "w4a8", "w4a4", "w3a3", "w2a2"):
        lookup = {"bench": "accuracy_qat", "network": "resnet20", "widths": widths}
        trained = measured.all(method="lsq, distilled", **lookup)[-1]
        plain = measured.value("accuracy", method="ptq mse", **lookup)
        steps = f"{trained['steps']:,}"
        rows.append(
            (widths.upper(), f"{plain:.1f} %", f"{trained['accuracy']:.1f} %", steps)
        )
    return markdown(("ResNet-20", "calibrated", "trained", "steps"), rows)


def methods(measured: Measured) -> str:
    accuracies: dict[str, list[float]] = {}
    for row in measured.all("accuracy_qat", network="resnet20", widths="w4a4"):
        if row["method"].startswith("short: "):
            accuracies.setdefault(row["method"].removeprefix("short: "), []).append(
                row["accuracy"]
            )
    rows = [
        (name, f"{mean(values):.1f} %", len(values))
        for name, values in accuracies.items()
    ]
    return markdown(("method", "accuracy", "seeds"), rows)


def factors(measured: Measured) -> str:
    """Return what factors of channels bring on transformers: means over draws."""
    cells: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in measured.all("linear_factors"):
        versions = cells.setdefault((row["network"], row["target"]), {})
        versions.setdefault(row["version"], []).append(row)

    def of(rows: Sequence[Mapping[str, Any]]) -> str:
        if not rows:
            return ""
        decibels = mean(row["decibels"] for row in rows)
        return f"{decibels:.1f} dB, {mean(row['same'] for row in rows):.1f} %"

    rows = []
    for (network, target), versions in cells.items():
        plain, tried = versions["no factors"], versions["untouched"]
        seconds = [mean(row["seconds"] for row in some) for some in (tried, plain)]
        layers = _span((row["layers"] for row in tried), "{:.0f}")
        shown = [
            of(versions.get(name, [])) for name in ("no factors", "untouched", "NNCF")
        ]
        time = f"{seconds[0] / seconds[1]:.2f}"
        rows.append((network, target, str(len(tried)), *shown, layers, time))
    head = ("network", "target", "draws", "no factors", "untouched", "NNCF")
    return markdown((*head, "layers with factors", "time"), rows)


def minilm(measured: Measured) -> str:
    """Return a MiniLM for OpenVINO beside NNCF's: means over draws, and their standard errors."""
    drawn = list(measured.all("sentences"))

    def of(values: Sequence[float], digits: int) -> str:
        error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return f"{mean(values):.{digits}f} ± {error:.{digits}f}"

    rows = []
    for figure, key, digits in (
        ("same neighbour, %", "same", 2),
        ("dB", "decibels", 2),
    ):
        own, peer = (
            [row[f"{name}_{key}"] for row in drawn] for name in ("torchq", "nncf")
        )
        ahead = [a - b for a, b in zip(own, peer, strict=True)]
        rows.append((figure, of(own, digits), of(peer, digits), of(ahead, digits)))
    ratios = [row["time"] for row in drawn]
    rows.append(("time at 384 tokens", of(ratios, 3), "1", ""))
    return markdown((f"{len(drawn)} draws", "torchq", "NNCF", "difference"), rows)


def attention(measured: Measured) -> str:
    """Return which part of the work of transformers is on integers."""
    outside: dict[str, list[float]] = {}
    in_modules: dict[str, dict[str, str]] = {}
    for row in measured.all("attention"):
        if row["version"] == "outside":
            outside.setdefault(row["network"], []).append(row["share"])
        else:
            cells = in_modules.setdefault(row["network"], {})
            cells[row["target"]] = f"{row['share']:.1f} %"
    targets = list(dict.fromkeys(t for cells in in_modules.values() for t in cells))
    rows = [
        (
            network,
            _span(outside[network], "{:.1f} %"),
            *(cells.get(target, "") for target in targets),
        )
        for network, cells in in_modules.items()
    ]
    heads = (f"in modules, {target}" for target in targets)
    return markdown(("network", "outside, each target", *heads), rows)


def own_pictures(measured: Measured) -> str:
    """Return how near a MobileNetV2 with real weights stays: means over draws."""
    cells: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in measured.all("own_pictures"):
        case = (row["recipe"], row["target"], row["method"])
        cells.setdefault(case, []).append(row)
    rows = []
    for case, draws in cells.items():
        found = [row for row in draws if "same" in row]
        if not found:
            rows.append((*case, str(len(draws)), draws[-1]["missing"], *[""] * 4))
            continue
        same, divergence, signal, seconds = (
            mean(row[key] for row in found)
            for key in ("same", "kl", "decibels", "seconds")
        )
        # Rows that were measured before clear answers were counted have none.
        clear = [row["clear"] for row in found if "clear" in row]
        of_clear = f"{mean(clear):.1f} %" if clear else ""
        figures = (f"{same:.1f} %", of_clear, f"{divergence:.3f}", f"{signal:.1f} dB")
        rows.append((*case, str(len(found)), *figures, f"{seconds:.0f}"))
    head = ("bits", "target", "how", "draws", "same", "clear", "KL", "outputs", "CPU s")
    return markdown(head, rows)


def rounding(measured: Measured) -> str:
    """Return what steps of adaround_ gain over gptq_: means over draws."""
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in measured.all("rounding"):
        cells.setdefault((row["network"], row["method"]), []).append(row)
    rows = []
    for case, draws in cells.items():
        means = {
            key: mean(row[key] for row in draws)
            for key in ("decibels", "seconds", "same", "precision", "recall")
            if key in draws[0]
        }
        near = (
            f"{means['same']:.1f} %"
            if "same" in means
            else f"{means['precision']:.3f}, {means['recall']:.3f}"
        )
        signal = f"{means['decibels']:.1f} dB"
        rows.append((*case, str(len(draws)), signal, near, f"{means['seconds']:.0f}"))
    head = ("network", "method", "draws", "outputs", "as the float network", "CPU s")
    return markdown(head, rows)


def added_time(measured: Measured) -> str:
    """Return the time of files with added operators over that of the layers alone."""
    cells: dict[str, dict[str, str]] = {}
    for row in measured.all("added_time"):
        network = row["network"].rpartition("/")[2]
        ratio = "one file"
        if "ratio" in row:
            ratio = f"{row['ratio']:.2f} ± {row['noise']:.2f}"
        cells.setdefault(network, {})[row["target"]] = ratio
    rows = [
        (network, *(cell.get(target, "") for target in ("onnxruntime", "openvino")))
        for network, cell in cells.items()
    ]
    return markdown(("network", "ONNX Runtime", "OpenVINO"), rows)


def zoo(measured: Measured) -> str:
    """Return how many networks of each library pass each check of those made."""
    merged: dict[str, dict[str, Any]] = {}
    for row in measured.all("sweep_zoo"):
        merged.setdefault(row["model"], {}).update(row)
    libraries = [
        [r for m, r in merged.items() if m.startswith(f"{name}/")] for name in ZOO
    ]
    rows: list[Sequence[object]] = [("networks", *map(len, libraries))]
    checks = ("plan", "quantize", "off", "restore", "save", "fuse")
    for check in (*checks, "export", "deploy"):
        outcomes = [
            [row[check] for row in library if check in row] for library in libraries
        ]
        rows.append(
            (check, *(f"{values.count('ok')} of {len(values)}" for values in outcomes))
        )
    in_float, total = (
        [sum(row.get(key, 0) for row in library) for library in libraries]
        for key in ("left_float", "products")
    )
    counts = (f"{a} of {b}" for a, b in zip(in_float, total, strict=True))
    return markdown(("check", *ZOO), [*rows, ("products left float", *counts)])


def conformance(measured: Measured) -> str:
    """Return the counts of the newest run of each section, of ONNX files that are read."""
    names = ("cases", "right", "refused", "wrong")
    rows = [
        (row["section"], *(row[name] for name in names))
        for row in measured.all("conformance_onnx")
        if "cases" in row
    ]
    newest = {row[0]: row for row in rows}
    return markdown(("section", *names), newest.values())


def fuzz(measured: Measured) -> str:
    counts: dict[str, list[int]] = {}
    for row in measured.all("fuzz_files"):
        sums = counts.setdefault(row["reader"], [0, 0, 0])
        read = row["results"].get("read", 0)
        failed = row["results"].get("FAIL", 0)
        total = sum(row["results"].values())
        for place, count in enumerate((read, total - read - failed, failed)):
            sums[place] += count
    rows = [
        (f"`{reader}`", *map("{:,}".format, sums)) for reader, sums in counts.items()
    ]
    return markdown(("reader", "read", "named error", "other"), rows)


NETWORKS = {
    "ResNet-18": "resnet18",
    "ResNet-50": "resnet50",
    "MobileNetV2": "mobilenet_v2",
    "encoder": "encoder",
    "U-Net": "unet",
    "ViT-B/16": "vit_b_16",
}


def files(measured: Measured) -> str:
    makers = {"onnxruntime": "onnxruntime.quantization", "openvino": "nncf"}
    rows = []
    for runtime, maker in makers.items():
        cells = []
        for model in NETWORKS.values():
            names = (f"{runtime} float", f"{runtime} quantized", maker)
            plain, ours, theirs = (speedup(measured, model, 1, name) for name in names)
            cells.append(f"{ours / plain:.1f}x ({theirs / plain:.1f}x)")
        rows.append((f"{runtime} ({maker})", *cells))
    return markdown(("runtime (its quantizer)", *NETWORKS), rows)


def export_time(measured: Measured) -> str:
    """Return what an export costs beside torch's own of the float network."""
    head = (
        "network",
        "quantizers",
        "torch, float",
        "torchq",
        "calls, torchq / torch",
        "`dynamo=False`",
        "`verify_onnx`",
    )
    newest = {row["network"]: row for row in measured.all("export_time")}
    rows = [
        (
            row["network"],
            row["quantizers"],
            f"{row['torch_float_s']:.1f} s",
            f"{row['torchq_s']:.1f} s",
            f"{row['ratio']:.2f}",
            f"{row['torchq_torchscript_s']:.1f} s",
            f"{row['verify_s']:.1f} s",
        )
        for row in newest.values()
    ]
    return markdown(head, rows)


def screens(measured: Measured) -> str:
    """Return the lines that each call and command prints, by network."""
    lines: dict[str, dict[str, int]] = {}
    for row in measured.all("screens"):
        lines.setdefault(row["call"], {})[row["network"]] = row["lines"]
    networks = list(dict.fromkeys(name for cells in lines.values() for name in cells))
    rows = [
        (f"`{call}`", *(cells.get(network, "") for network in networks))
        for call, cells in lines.items()
    ]
    return markdown(("call", *networks), rows)


def executorch(measured: Measured) -> str:
    def quality(found: Mapping[str, float]) -> str:
        if "drop" in found:
            return f"{found['float_accuracy'] - found['drop']:.2f} %"
        return f"{found['precision']:.3f}, {found['recall']:.3f}"

    rows = []
    newest = {
        row["network"]: row for row in measured.all("executorch", candidate="int8")
    }
    for row in newest.values():
        plain = measured.all("executorch", candidate="float32", network=row["network"])[
            -1
        ]
        layers = f"{row['integer']} of {row['integer'] + len(row['in_float'])}"
        figures = (
            quality(plain["file"]),
            quality(row["simulation"]),
            quality(row["file"]),
        )
        size = f"{row['kilobytes'] / plain['kilobytes']:.2f}"
        rows.append((row["network"], layers, *figures, f"{row['ratio']:.2f}", size))
    head = ("network", "layers on integers", "float file", "simulation", "INT8 file")
    return markdown((*head, "time", "size"), rows)


def deploy(measured: Measured) -> str:
    rows = []
    for batch, name in ((1, "one image"), (32, "32 images")):
        cells = []
        for model in NETWORKS.values():
            if not measured.all("deploy_native", model=model, batch=batch, threads=1):
                cells.append("")
                continue
            candidates = ("torch quantized, own placement", "fastest")
            placed, fastest = (speedup(measured, model, batch, c) for c in candidates)
            cells.append(f"{placed:.1f}x ({fastest:.1f}x)")
        rows.append((name, *cells))
    return markdown(("setting", *NETWORKS), rows)


def memory(measured: Measured) -> str:
    names = {
        "FP32": "fp32",
        "deployed": "int8",
        "deployed, mapped file": "int8, mapped",
    }
    key = "one_size_anonymous_mib"
    rows = []
    for title in ("ResNet-50", "ViT-B/16", "encoder"):
        lookup = {"bench": "deploy_memory", "model": NETWORKS[title]}
        sizes = (
            measured.value(key, candidate=name, **lookup) for name in names.values()
        )
        rows.append((title, *(f"{mib:.0f}" for mib in sizes)))
    return markdown(("MiB", *names), rows)


def agreement(measured: Measured) -> str:
    rows = []
    for row in measured.all("accuracy_deploy"):
        if row["engine"] not in ("fp32", "simulation"):
            planned = row["planned_for"] or "any"
            accuracy = f"{100 * row['accuracy']:.2f} %"
            case = ("network", "recipe", "planned_for", "images", "keep")
            simulated = measured.value(
                "accuracy",
                bench="accuracy_deploy",
                engine="simulation",
                **{key: row[key] for key in case if key in row},
            )
            recipe = row["recipe"]
            if row.get("keep"):
                recipe += ", operators kept"
            # Older rows do not have it.
            equal = f"{100 * row['equal']:.2f} %" if "equal" in row else ""
            shares = (
                f"{100 * simulated:.2f} %",
                accuracy,
                f"{100 * row['same_class']:.2f} %",
                equal,
            )
            rows.append((row["network"], recipe, planned, row["engine"], *shares))
    head = (
        "network",
        "recipe",
        "planned for",
        "engine",
        "accuracy simulated",
        "deployed",
    )
    return markdown((*head, "same class", "equal to the last bit"), rows)


def snapdragon(measured: Measured) -> str:
    """Networks on the emulator of a Snapdragon, in dB, beside onnxruntime.quantization's files."""
    by_network: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for row in measured.all("qnn_networks"):
        cases = by_network.setdefault(row["network"], {})
        cases[row["by"], row["bits"]] = row
    rows = []
    for network, cases in by_network.items():
        of_8_bits = cases["torchq", 8]
        rows.append(
            (
                network.rpartition("/")[2],
                "yes" if of_8_bits["whole"] else "no",
                f"{of_8_bits['seconds']:.0f}",
                f"{of_8_bits['worst_share']:.1%}",
                f"{of_8_bits['emulator_to_simulation']:.1f}",
                *(
                    _on_chip(cases.get((by, bits)))
                    for bits in (8, 16)
                    for by in ("torchq", "onnxruntime")
                ),
            )
        )
    head = ("network", "whole", "s", "worst layer", "chip, simulation")
    return markdown(
        (*head, "chip, float", "peer's", "16 bits: chip, float", "peer's"), rows
    )


def _on_chip(row: dict[str, Any] | None) -> str:
    """Return how near a file on the emulator is to float; marked where it is not whole."""
    if row is None:
        return ""
    if "emulator_to_float" not in row:
        return "no"
    return f"{row['emulator_to_float']:.1f}{'' if row['whole'] else ' *'}"


#: What tables call the recipes of some programs.
_RECIPE_NAMES = {"int8": "INT8", "asymmetric": "zero points", "w4a4": "W4A4"}


def evaluation(measured: Measured) -> str:
    """Images that evaluation and a default session agree on, and the time over float."""
    rows = [
        (
            row["network"],
            _RECIPE_NAMES[row["recipe"]],
            _percent(row["equal"]),
            _percent(row["close"]),
            f"{row['time']:.2f}",
            row["islands"],
        )
        for row in measured.all("evaluation")
    ]
    head = ("network", "recipe", "equal to the last bit", "to 1e-4", "time", "in float")
    return markdown(head, rows)


def first_differences(measured: Measured) -> str:
    """Images of another class in a W4A4 file, and the sum on a tie that turned each."""
    rows = []
    for row in measured.all("first_differences"):
        if row["image"] is not None:
            layer = row["quantizer"].removesuffix("_quantizer")
            ulps = (row[name] for name in ("from_tie", "simulation", "file"))
            cells = (str(row["image"]), layer, f"{row['steps']:.7f}")
            rows.append((*cells, *(f"{value:.1f}" for value in ulps)))
    head = ("image", "codes", "exact sum, in steps", "from the tie", "torch", "file")
    return markdown(head, rows)


def evaluation_elsewhere(measured: Measured) -> str:
    """The same of ExecuTorch's files and of the engine torch, INT8."""
    rows = []
    for target in ("executorch", "torch"):
        for row in measured.all(f"evaluation_{target}"):
            shares = _percent(row["equal"]), _percent(row["close"])
            cells = (target, row["network"], str(row["images"]), *shares)
            rows.append((*cells, f"{row['time']:.2f}", row["layers"]))
    head = ("target", "network", "images", "equal to the last bit", "to 1e-4", "time")
    return markdown((*head, "layers whose results are codes"), rows)


def forwards(measured: Measured) -> str:
    """Time of quantized forwards and steps over the same in float, by the size of the batch."""
    by_case: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in measured.all("forwards"):
        case = row["network"], row["what"], row["batch"]
        by_case.setdefault(case, {})[row["candidate"]] = row["ratio"]
    rows = []
    for (network, what, batch), ratios in by_case.items():
        tools = ("torchq", "simulated", "aten")
        cells = (f"{ratios[tool]:.2f}" if tool in ratios else "" for tool in tools)
        rows.append((network, what, str(batch), *cells))
    header = (
        "network",
        "what",
        "images",
        "torchq",
        "simulated",
        "torch's own operators",
    )
    return markdown(header, rows)


TABLES: dict[str, Callable[[Measured], str]] = {
    table.__name__: table
    for table in (
        *(overview, fake_quant, qat_step, calibration, fuse, folds, folded_accuracy),
        *(accuracy, training, methods, factors, minilm, attention),
        *(own_pictures, rounding, added_time, zoo),
        *(
            conformance,
            fuzz,
            files,
            export_time,
            screens,
            executorch,
            deploy,
            memory,
            agreement,
            first_differences,
            evaluation,
            evaluation_elsewhere,
            forwards,
        ),
        snapdragon,
    )
}


def filled(page: str, measured: Measured) -> str:
    """Return the text of a page with all its tables anew."""
    return TABLE.sub(
        lambda found: found[1] + TABLES[found[2]](measured) + found[3], page
    )


def main() -> None:
    """Print the tables into the pages."""
    measured = read_results()
    for path in PAGES:
        path.write_text(filled(path.read_text("utf-8"), measured), encoding="utf-8")


if __name__ == "__main__":
    main()
