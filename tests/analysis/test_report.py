"""The report: its figures, its verdict, its three forms, and the page in a real browser."""

import copy
import json
import math
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq.analysis import Report, SensitivityReport, SensitivityRow
from torchq.analysis.doctor import culprits, damage_shares
from torchq.analysis.layers import line_with
from torchq.errors import ConfigError

pytest.importorskip("jinja2")


class Classifier(nn.Module):
    """Four layers, of which ``middle`` is planted to be the bad one. Input (N, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.middle = nn.Linear(24, 24)
        self.last = nn.Linear(24, 8)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x).relu()).relu())


def labelled(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = [torch.randn(64, 16, generator=generator) for _ in range(2)]
    with torch.no_grad():
        return [(x, model(x).argmax(1)) for x in images]


def accuracy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output.argmax(1) == batch[1]).float().mean()


def planted(bits: int = 3) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(8)
    model = Classifier().eval()
    batches = labelled(model)
    coarse = torchq.QuantDescriptor(bits)
    rule = torchq.Rule("middle", input=coarse, weight=coarse)
    simulated(
        model, batches, torchq.recipes.int8().with_rules(rule), exclude=["unused"]
    )
    return model, batches


@cache
def usual() -> Report:
    model, batches = planted()
    return torchq.report(model, batches, metric=accuracy, progress=False)


def test_the_verdict_names_the_culprit_and_the_call() -> None:
    actual = usual().data["verdict"]
    assert actual["grade"] == "poor"
    assert actual["sentence"].startswith(
        "Quantization damages this model: accuracy 1 becomes 0."
    )
    assert actual["blame"].startswith(
        "Most of the damage at the output comes from middle ("
    )
    exclusion = actual["advice"][-2]
    assert "select_quantizers(model, ['middle'])" in exclusion["code"]
    rows = usual().data["layers"]
    assert sum(row["damage"] for row in rows) == pytest.approx(1, rel=1e-3)
    share = next(row["damage"] for row in rows if row["name"] == "middle")
    assert f"takes away {share:.0%} of the damage" in exclusion["text"]


def test_the_lines_of_a_page_can_be_pasted() -> None:
    """They were for a float model, and quantize_ refused the model of the page."""
    model, batches = planted()
    inputs = [x for x, _ in batches]
    names = {"torchq": torchq, "model": model, "batches": inputs}
    exclusion = usual().data["verdict"]["advice"][-2]
    before = usual().data["outputs"]["agreement"]
    exec(exclusion["code"], names)
    after = torchq.report(model, inputs, progress=False, plan=False).data["outputs"]
    assert after["agreement"] > before
    names["config"] = torchq.recipes.int8()
    exec(line_with("config, exclude=['unused']"), names)
    again = torchq.report(model, inputs, progress=False, plan=False).data["outputs"]
    assert again["agreement"] > before


def test_the_head_says_the_target_with_time_and_size_beside_float() -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(8)
    model = Classifier().eval()
    del model.unused
    batches = [torch.randn(64, 16) for _ in range(2)]
    simulated(model, batches, target="onnxruntime", example=batches[0])
    report = torchq.report(model, batches, progress=False, plan=False)
    speed = report.data["speed"]
    assert speed["gain"] == pytest.approx(speed["float_ms"] / speed["ms"], rel=1e-3)
    line = str(report).splitlines()[2]
    assert line.startswith(f"for onnxruntime: {speed['ms']:.3g} ms, float ")
    assert f"{speed['bytes'] / 1e6:.3g} MB" in line
    head = report.to_html().partition("<h1>")[0].rpartition('<p class="over">')[2]
    assert "measured on 128 inputs, for onnxruntime, " in head
    assert "for no target" in str(usual())
    assert usual().data["speed"] is None


@pytest.mark.parametrize("bits", [4, 8])
def test_formats_that_are_advised_have_more_bits_than_the_model(bits: int) -> None:
    """A damaged INT8 model was to get 6 bits on average."""
    recipe = torchq.recipes.integer(bits, bits)
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(8)]
    model = nn.Sequential(*layers).eval()
    inputs = [torch.randn(32, 16)]
    # One channel leaves few of 256 codes for the others.
    inputs[0][:, 0] *= 60
    with torch.no_grad():
        layers[0].weight[:, 0] /= 60
    torchq.quantize_(model, recipe)
    torchq.calibrate(model, inputs, progress=False)
    report = torchq.report(model, inputs, progress=False, plan=False)
    verdict = report.data["verdict"]
    assert verdict["grade"] != "good"
    names: dict[str, Any] = {"torchq": torchq, "model": model, "batches": inputs}
    exec(verdict["advice"][-1]["code"], names)
    config = names["config"]
    assert bits < config.costs["mean_bits"] <= 1.5 * bits
    torchq.restore_(model)
    torchq.quantize_(model, config)
    torchq.calibrate(model, inputs, progress=False)
    after = torchq.report(model, inputs, progress=False, plan=False).data["outputs"]
    assert after["sqnr"] > report.data["outputs"]["sqnr"]


def test_a_good_model_needs_nothing() -> None:
    model, batches = planted(16)
    actual = torchq.report(model, batches, progress=False, plan=False).data["verdict"]
    assert actual["grade"] == "good"
    assert actual["advice"][0] == {
        "text": "Nothing needs to be done: export or deploy it.",
        "code": "",
    }
    assert all(
        "To come closer still" in advice["text"] for advice in actual["advice"][1:]
    )


def ranked(values: list[float], unit: str = "nat") -> SensitivityReport:
    rows = tuple(
        SensitivityRow(f"layer{number}", value) for number, value in enumerate(values)
    )
    return SensitivityReport(rows, "", unit, unit == "dB", "layer", 0.0)


@pytest.mark.parametrize(
    ("values", "unit", "blamed"),
    [
        ([6.0, 2.0, 1.0, 1.0], "nat", 1),
        ([4.0, 2.0, 1.0, 1.0, 1.0, 1.0], "nat", 2),
        ([2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0], "nat", 3),
        ([1.0] * 8, "nat", 0),
        ([10.0, 20.0, 20.0], "dB", 1),
        ([math.nan, 3.0, 1.0], "nat", 1),
        ([0.0, 0.0], "nat", 0),
    ],
)
def test_the_fewest_layers_that_do_half_of_the_damage_are_blamed(
    values: list[float], unit: str, blamed: int
) -> None:
    ranking = ranked(values, unit)
    assert culprits(damage_shares(ranking)) == [
        f"layer{number}" for number in range(blamed)
    ]
    assert sum(damage_shares(ranking).values()) == pytest.approx(float(any(values)))


def test_few_predictions_are_not_trusted() -> None:
    model, batches = planted()
    actual = torchq.report(model, [batches[0][0][:8]], progress=False, plan=False).data
    assert actual["outputs"]["predictions"] == 8
    assert actual["verdict"]["grade"] != "good"
    sentence = actual["verdict"]["sentence"]
    assert "signal to noise is " in sentence
    assert sentence.endswith(
        "of 8 predictions are those of the float model, too few to be sure."
    )


def test_errors_of_the_doctor_come_first() -> None:
    model, batches = planted(16)
    model.first.weight_quantizer.amax[0] = 99.0
    actual = torchq.report(model, batches, progress=False, plan=False).data
    assert actual["verdict"]["grade"] == "poor"
    assert actual["verdict"]["advice"][0]["text"].startswith(
        "Mend first.weight_quantizer: "
    )
    assert actual["findings"][0]["kind"] == "wrong_order"


def test_the_figures_are_those_of_the_other_functions() -> None:
    model, batches = planted()
    data = usual().data
    errors = torchq.layer_errors(model, batches, progress=False)
    ranking = torchq.sensitivity(model, batches, "fisher", progress=False)
    assert [row["name"] for row in data["layers"]] == [row.name for row in errors.rows]
    for row, error in zip(data["layers"], errors.rows, strict=True):
        assert row["local_sqnr"] == pytest.approx(error.local_sqnr, rel=1e-4)
    ranks = {row["name"]: row["rank"] for row in data["layers"]}
    assert [
        name for name, _ in sorted(ranks.items(), key=lambda i: i[1])
    ] == ranking.worst(3)
    middle = data["layers"][1]
    assert (middle["weights"], middle["weight_bits"], middle["input_bits"]) == (
        576,
        3,
        3,
    )
    assert (middle["bytes"], middle["float_bytes"]) == (216, 2304)
    assert middle["operations"] == 576
    assert data["outputs"]["float_score"] == 1.0


def test_histograms_hold_the_ranges_of_every_method() -> None:
    data = usual().data
    q = data["quantizers"]["middle.input_quantizer"]
    assert set(q["methods"]) == {"max", "percentile", "mse", "entropy"}
    assert (
        q["methods"]["mse"] < q["methods"]["max"] == pytest.approx(q["high"], rel=1e-4)
    )
    assert sum(q["counts"]) == 2 * 64 * 24
    assert data["quantizers"]["middle.weight_quantizer"]["is_weight"]
    channels = data["channels"]["first.weight_quantizer"]
    assert len(channels) == 24
    assert all(low <= high for low, high, _, _ in channels)


def test_the_plan_is_made_given_or_left_out() -> None:
    assert len(usual().data["plan"]["front"]) >= 2
    model, batches = planted()
    without = torchq.report(model, batches, progress=False, plan=False).data
    assert without["plan"] is None
    assert "torchq.mixed_precision" in without["plan_note"]


def test_forms(tmp_path: Path) -> None:
    report = usual()
    for name in ("a.html", "a.json", "a.txt", "a.md"):
        report.save(tmp_path / name)
    assert json.loads((tmp_path / "a.json").read_text()) == report.data
    message = (tmp_path / "a.txt").read_text()
    assert "1     middle" in message
    assert "select_quantizers(model, ['middle'])" in message
    page = (tmp_path / "a.html").read_text()
    assert page.count("<html") == 1
    with pytest.raises(ConfigError, match=r"got suffix '\.pdf'; expected \.html"):
        report.save(tmp_path / "a.pdf")


def test_the_page_needs_no_network() -> None:
    page = usual().to_html()
    own = page[: page.index("<script type=")]
    assert re.findall(r"<(?:link|img|iframe|object)\b|\bsrc=|@import|url\(", own) == []
    scripts = re.findall(r"<script([^>]*)>", page)
    assert scripts == [' type="application/json" id="data"', "", "", ""]


def test_names_cannot_break_the_page() -> None:
    data = copy.deepcopy(usual().data)
    data["model"] = "</script><script>alert(1)</script>"
    data["layers"][0]["name"] = '"><img src=x onerror=alert(1)>'
    page = Report(data).to_html()
    assert "<script>alert" not in page
    assert "<img" not in page[: page.index("<script type=")]
    shown = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert shown is not None
    assert json.loads(shown[1])["reports"][0]["model"] == data["model"]


def many_layers(count: int) -> Report:
    """Return the usual report with its middle layer repeated."""
    data = copy.deepcopy(usual().data)
    row = data["layers"][1]
    for number in range(count - len(data["layers"])):
        prefix = f"stage{number // 50}.block{number}.conv"
        names = [f"{prefix}.{q.rpartition('.')[2]}" for q in row["quantizers"]]
        data["layers"].append(
            {**row, "name": prefix, "rank": number + 4, "quantizers": names}
        )
        for new, old in zip(names, row["quantizers"], strict=True):
            data["quantizers"][new] = data["quantizers"][old]
            if old in data["channels"]:
                data["channels"][new] = [[-0.1234, 0.1234, -0.1234, 0.1234]] * 128
    return Report(data)


def test_a_comparison_holds_both() -> None:
    (a, batches), (b, _) = planted(3), planted(6)
    actual = torchq.analysis.compare(
        a, b, batches, metric=accuracy, labels=("W3", "W6"), progress=False
    )
    assert [data["label"] for data in actual.reports] == ["W3", "W6"]
    scores = [data["outputs"]["score"] for data in actual.reports]
    assert scores[0] < scores[1]
    assert "W3: Quantization damages" in str(actual)
    assert actual.to_html().count("<article") == 2


def test_models_without_classes_are_reported() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 1),
    )
    torchq.quantize_(model)
    batches = [torch.randn(16, 4)]
    torchq.calibrate(model, batches, progress=False)
    data = torchq.report(model, batches, progress=False).data
    assert data["outputs"]["agreement"] is None
    assert data["ranking"]["metric"] == "sqnr"
    assert data["plan_note"].startswith("There is no plan: ")
    assert "signal to noise at its output" in data["verdict"]["sentence"]


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright drives the browser"
    )
    chromium = next(
        filter(None, map(shutil.which, ("chromium", "google-chrome"))), None
    )
    if chromium is None:
        pytest.skip("there is no Chromium on this machine")
    with api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


def opened(browser: Any, report: Report, folder: Path, width: int = 1280) -> Any:
    path = folder / "report.html"
    report.save(path)
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("request", lambda request: page.problems.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-ready]")
    return page


def first_names(page: Any) -> list[str]:
    names: list[str] = page.locator(
        ".layers tbody tr:not([hidden]) th"
    ).all_text_contents()
    return names


def test_charts_tables_and_theme_work(browser: Any, tmp_path: Path) -> None:
    page = opened(browser, usual(), tmp_path)
    for chart in ("errors", "ranking", "bytes", "operations", "front"):
        assert page.locator(f'[data-chart="{chart}"] svg').count() == 1
        assert page.locator(f'[data-chart="{chart}"] svg [aria-label]').count() > 0
    assert first_names(page)[0] == "middle"
    page.click(".layers thead button:text('layer')")
    assert first_names(page) == ["first", "last", "middle"]
    page.click(".layers thead button:text('layer')")
    assert first_names(page) == ["middle", "last", "first"]
    page.fill("[data-search]", "LAST")
    assert first_names(page) == ["last"]
    assert page.locator("[data-count]").text_content() == "1 of 3 layers"
    page.click('.layers tbody tr[data-layer="last"]')
    assert (
        page.locator("[data-panels] figcaption b").first.text_content()
        == "last.input_quantizer"
    )
    page.locator('[data-chart="errors"] svg').hover()
    tip = page.locator('[data-chart="errors"] [aria-label="tip"]')
    assert "by itself" in tip.text_content()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    # The file itself is the one request; nothing else was asked for, and nothing was logged.
    assert page.problems == [(tmp_path / "report.html").as_uri()]
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_its_window(browser: Any, tmp_path: Path, width: int) -> None:
    page = opened(browser, many_layers(500), tmp_path, width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.locator(".layers tbody tr").count() == 500
    (room, needed) = page.locator(".layers").first.evaluate(
        "t => [t.closest('.scroll').clientWidth, t.scrollWidth]"
    )
    assert needed <= room  # No column is cut; on a phone those that say most are shown.
    columns = page.locator(".layers thead th:visible").count()
    assert columns == (5 if width == 390 else 13)
    page.close()


def test_the_print_has_whole_tables_and_no_controls(
    browser: Any, tmp_path: Path
) -> None:
    page = opened(browser, many_layers(40), tmp_path, 794)
    page.emulate_media(media="print")
    for control in ("#theme", ".top nav", "[data-search]", "[data-choice]"):
        assert not page.locator(control).is_visible(), control
    table = page.locator(".layers").first
    room, needed = table.evaluate(
        "t => [t.closest('.scroll').clientWidth, t.scrollWidth]"
    )
    assert needed <= room
    assert page.locator(".layers tbody tr").last.is_visible()
    page.close()


def test_a_comparison_switches(browser: Any, tmp_path: Path) -> None:
    both = Report(
        {
            "reports": [
                {**usual().data, "label": "A"},
                {**many_layers(9).data, "label": "B"},
            ]
        }
    )
    page = opened(browser, both, tmp_path)
    assert page.locator('[data-chart="comparison"] svg').count() == 1
    page.click('[data-tab="1"]')
    assert page.locator("article:visible").count() == 1
    assert page.locator("article:visible .layers tbody tr").count() == 9
    assert page.locator('article:visible [data-chart="errors"] svg').count() == 1
    page.close()


class Called(Classifier):
    """Its last layer is a call of a function, for which it gets a class of another name."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x).relu()).relu()
        return nn.functional.linear(x, self.last.weight)


def test_the_report_names_the_class_that_the_author_wrote() -> None:
    model = Called().eval()
    x = torch.randn(8, 16)
    torchq.quantize_(model, example=x, exclude=["unused"])
    torchq.calibrate(model, [x], progress=False)
    assert type(model).__name__ != "Called"
    first_line = str(torchq.report(model, [x], progress=False)).splitlines()[0]
    assert first_line.startswith("Called: ")
