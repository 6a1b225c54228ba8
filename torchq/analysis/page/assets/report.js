"use strict";
(() => {
  const { reports } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const color = { accent: "var(--accent)", soft: "var(--accent-soft)", bad: "var(--bad)", trace: "var(--trace)", quiet: "var(--quiet)" };
  const isNarrow = (width) => width < 560;
  const percent = (value) => value === null ? "not finite" : d3.format(value >= 0.1 ? ".0%" : ".2~%")(value);
  const decibel = (value) => value === null ? "exact" : `${value.toFixed(1)} dB`;
  const bytes = (value) => value >= 1048576 ? `${(value / 1048576).toFixed(2)} MB` : value >= 1024 ? `${(value / 1024).toFixed(1)} KB` : `${Math.round(value)} B`;
  const short = (name, most) => name.length > most ? `…${name.slice(-most + 1)}` : name;

  // --- charts; each takes the width and returns an SVG element ---------------------------------

  const plot = (width, options) => Plot.plot({
    width, marginTop: 16, style: { background: "transparent", color: "inherit", fontSize: "12px" }, ...options,
  });

  // The names fit below the bars where there are few of them; a pointer shows the others.
  function nameAxis(names, width) {
    const fits = width / names.length >= 22;
    return { axis: fits ? "bottom" : null, tickRotate: -40, tickSize: 0, label: null, tickFormat: (n) => short(n, 18), domain: names };
  }
  const bottom = (names, width) => width / names.length >= 22 ? Math.min(120, 20 + 4.8 * Math.min(18, d3.max(names, (n) => n.length))) : 24;

  const isBlamed = (report, d) => report.ranking.worst.includes(d.name);

  function errors(report, width) {
    const rows = report.layers, names = rows.map((d) => d.name);
    const title = (d) => [d.name, `by itself ${percent(d.local_error)} (${decibel(d.local_sqnr)})`, `with all before ${percent(d.error)} (${decibel(d.sqnr)})`, d.rank ? `${percent(d.damage)} of the damage at the output` : ""].join("\n");
    return plot(width, {
      height: 300, marginLeft: 46, marginBottom: bottom(names, width), x: nameAxis(names, width),
      y: { label: "error beside the signal", tickFormat: ".0%", grid: true, zero: true, ticks: 5 },
      marks: [
        Plot.barY(rows, { x: "name", y: (d) => d.local_error ?? 0, fill: (d) => isBlamed(report, d) ? color.bad : color.accent, inset: width / rows.length > 6 ? 1 : 0 }),
        Plot.lineY(rows, { x: "name", y: (d) => d.error ?? 0, stroke: color.trace, strokeWidth: 1.75 }),
        Plot.ruleY([0], { stroke: color.quiet }),
        Plot.tip(rows, Plot.pointerX({ x: "name", y: (d) => Math.max(d.local_error ?? 0, d.error ?? 0), title })),
      ],
    });
  }

  function ranking(report, width) {
    const most = isNarrow(width) ? 12 : 20, letters = isNarrow(width) ? 18 : 36;
    const rows = report.layers.filter((d) => d.rank).sort((a, b) => a.rank - b.rank).slice(0, most);
    const left = 14 + 6.6 * Math.min(letters, d3.max(rows, (d) => d.name.length) ?? 4);
    const longest = d3.max(rows, (d) => d.damage) || 1, length = (d) => Math.max(d.damage / longest, 0.004);
    const value = (d) => report.ranking.unit === "dB" ? decibel(d.harm) : d3.format(".3~g")(d.harm ?? 0);
    return plot(width, {
      height: 30 + 24 * rows.length, marginLeft: left, marginRight: 76, x: { axis: null, domain: [0, 1] },
      y: { label: null, domain: rows.map((d) => d.name), tickSize: 0, tickFormat: (n) => short(n, letters) },
      marks: [
        Plot.barX(rows, { y: "name", x: length, fill: (d) => isBlamed(report, d) ? color.bad : color.accent, insetTop: 3, insetBottom: 3, rx: 2 }),
        Plot.text(rows, { y: "name", x: length, text: (d) => percent(d.damage), textAnchor: "start", dx: 6, fill: color.quiet }),
        Plot.tip(rows, Plot.pointerY({ y: "name", x: length, title: (d) => `${d.name} (${d.kind})\n${percent(d.damage)} of the damage\n${report.ranking.metric} ${value(d)} ${report.ranking.unit}\nby itself ${decibel(d.local_sqnr)}` })),
      ],
    });
  }

  function quantity(key, text) {
    return (report, width) => {
      const rows = report.layers, names = rows.map((d) => d.name);
      return plot(width, {
        height: 240, marginLeft: 56, marginBottom: bottom(names, width), x: nameAxis(names, width),
        y: { label: null, grid: true, ticks: 4, tickFormat: (v) => v ? d3.format("~s")(v) + (key === "bytes" ? "B" : "") : "0" },
        marks: [
          key === "bytes" ? Plot.barY(rows, { x: "name", y: "float_bytes", fill: color.soft }) : null,
          Plot.barY(rows, { x: "name", y: key, fill: color.accent }),
          Plot.ruleY([0], { stroke: color.quiet }),
          Plot.tip(rows, Plot.pointerX({ x: "name", y: key, title: (d) => `${d.name}\n${text(d)}` })),
        ],
      });
    };
  }

  function front(report, width) {
    const plan = report.plan, kind = Object.keys(plan.budget)[0], rows = plan.front;
    const used = (d) => [...d3.rollup(Object.values(d.formats), (v) => v.length, (f) => f)].map(([f, n]) => `${n} × ${f}`).join(", ");
    const point = (d) => d.costs[kind], logarithmic = d3.min(rows, (d) => d.damage) > 0;
    return plot(width, {
      height: 300, marginLeft: 60, marginBottom: 40, grid: true, x: { label: kind.replaceAll("_", " ") },
      y: { label: `predicted damage (${plan.metric})`, type: logarithmic ? "log" : "linear", tickFormat: "~g", ticks: 5 },
      marks: [
        Plot.lineY(rows, { x: point, y: "damage", stroke: color.accent, strokeWidth: 2 }),
        Plot.dot(rows, { x: point, y: "damage", fill: color.accent, r: 4 }),
        Plot.dot([plan], { x: point, y: "damage", symbol: "star", fill: color.bad, r: 8 }),
        Plot.tip(rows, Plot.pointer({ x: point, y: "damage", title: (d) => `${kind.replaceAll("_", " ")} ${d3.format(".4~g")(point(d))}\npredicted damage ${d3.format(".3~g")(d.damage)}\n${used(d)}` })),
      ],
    });
  }

  function comparison(report, width) {
    const rows = reports.flatMap((r) => r.layers.map((d) => ({ ...d, label: r.label ?? r.model })));
    const names = [...new Set(rows.map((d) => d.name))], labels = [...new Set(rows.map((d) => d.label))];
    return plot(width, {
      height: 300, marginLeft: 46, marginBottom: bottom(names, width), x: nameAxis(names, width),
      y: { label: "error beside the signal", tickFormat: ".0%", grid: true, zero: true, ticks: 5 },
      color: { domain: labels, range: [color.accent, color.bad], legend: false },
      marks: [
        Plot.ruleY([0], { stroke: color.quiet }),
        Plot.lineY(rows, { x: "name", y: "local_error", stroke: "label", strokeWidth: 1.5 }),
        Plot.dot(rows, { x: "name", y: "local_error", fill: "label", r: 3.5 }),
        Plot.tip(rows, Plot.pointer({ x: "name", y: "local_error", title: (d) => `${d.label}: ${d.name}\nby itself ${percent(d.local_error)} (${decibel(d.local_sqnr)})` })),
      ],
    });
  }

  function histogram(q, width) {
    const gap = (q.high - q.low) / q.counts.length;
    const limit = q.amax ? q.amax[1] : Infinity;
    const bins = q.counts.map((n, i) => ({ n, from: q.low + i * gap, to: q.low + (i + 1) * gap }));
    const outside = (d) => (d.from + d.to) / 2 > limit || (d.from + d.to) / 2 < -limit;
    const marks = Object.entries(q.methods).map(([name, amax]) => ({ name, amax })).sort((a, b) => a.amax - b.amax);
    // Of ranges per channel only the widest is drawn; the chart beside shows the channels.
    const ends = q.amax ? [limit, -limit].filter((a) => a > 0 || a >= q.low - gap) : [];
    const far = d3.max([q.high, ...marks.map((d) => d.amax), q.amax ? q.amax[1] : 0]);
    return plot(width, {
      height: 210, marginLeft: 40, marginTop: 18 + 13 * marks.length, x: { label: null, domain: [Math.min(q.low, 0), far * 1.03], ticks: Math.round(width / 90) },
      y: { type: "sqrt", label: null, ticks: 3, tickFormat: "~s", grid: true },
      marks: [
        Plot.rectY(bins, { x1: "from", x2: "to", y: "n", fill: (d) => outside(d) ? color.bad : color.accent, inset: 0.25 }),
        Plot.ruleX(marks, { x: "amax", stroke: color.quiet, strokeDasharray: "3,3" }),
        ...marks.map((d, i) => Plot.text([d], { x: "amax", text: "name", frameAnchor: "top", lineAnchor: "bottom", textAnchor: "end", dx: 4, dy: -2 - 13 * (marks.length - 1 - i), fill: color.quiet, fontSize: 11 })),
        Plot.ruleX(ends, { stroke: color.trace, strokeWidth: 2 }),
        Plot.ruleY([0], { stroke: color.quiet }),
        Plot.tip(bins, Plot.pointerX({ x: (d) => (d.from + d.to) / 2, y: "n", title: (d) => `${d3.format(".3~g")(d.from)} to ${d3.format(".3~g")(d.to)}\n${d3.format(",")(d.n)} of the sample${outside(d) ? "\nclipped" : ""}` })),
      ],
    });
  }

  function channels(table, width) {
    const rows = table.map(([low, high, low2, high2], i) => ({ i, low, high, low2, high2 }));
    return plot(width, {
      height: 210, marginLeft: 46, x: { type: "band", axis: null }, y: { label: null, grid: true, ticks: 5 },
      marks: [
        Plot.barY(rows, { x: "i", y1: "low", y2: "high", fill: color.accent, fillOpacity: 0.45 }),
        Plot.tickY(rows, { x: "i", y: "low2", stroke: color.bad, strokeWidth: 1.5 }),
        Plot.tickY(rows, { x: "i", y: "high2", stroke: color.bad, strokeWidth: 1.5 }),
        Plot.ruleY([0], { stroke: color.quiet }),
        Plot.tip(rows, Plot.pointerX({ x: "i", y: "high", title: (d) => `channel ${d.i}\nweights ${d3.format(".3~g")(d.low)} to ${d3.format(".3~g")(d.high)}\nrounded ${d3.format(".3~g")(d.low2)} to ${d3.format(".3~g")(d.high2)}` })),
      ],
    });
  }

  const charts = {
    errors, ranking, front, comparison,
    bytes: quantity("bytes", (d) => `${bytes(d.bytes)}, float ${bytes(d.float_bytes)}`),
    operations: quantity("operations", (d) => `${d3.format(".3~s")(d.operations)} multiplications`),
  };

  // --- one report: its charts, its table, and the layer that is looked into --------------------

  function draw(element, make) {
    const width = Math.floor(element.clientWidth);
    if (width > 0) element.replaceChildren(make(width));
  }

  function inspect(article, report, name) {
    const layer = report.layers.find((d) => d.name === name);
    const panels = article.querySelector("[data-panels]");
    if (!layer) return;
    article.querySelector("[data-choice]").value = name;
    article.querySelectorAll("[data-layer]").forEach((row) => row.classList.toggle("chosen", row.dataset.layer === name));
    panels.replaceChildren();
    const waiting = [];  // Widths are known once all panels are there.
    const add = (caption, legend, make) => {
      const figure = document.createElement("figure"), text = document.createElement("figcaption"), chart = document.createElement("div");
      const head = document.createElement("b");
      head.textContent = caption;
      text.append(head, document.createElement("br"), legend);
      chart.className = "chart";
      figure.append(text, chart);
      panels.append(figure);
      waiting.push(() => draw(chart, make));
    };
    for (const path of layer.quantizers) {
      const q = report.quantizers[path];
      if (!q) continue;
      const facts = [q.descriptor, q.amax ? `amax ${d3.format(".4~g")(q.amax[1])}` : "range of each call", `clipped ${percent(q.clipped)}`];
      if (q.all_codes) facts.push(`${q.codes} of ${q.all_codes} codes used`);
      if (q.dead) facts.push(`${q.dead} of ${q.channels} channels lost`);
      if (q.counts.length) add(path, facts.join(", "), (width) => histogram(q, width));
      const table = report.channels[path];
      if (table) add(`${path}, channel by channel`, "bars: range of the weights; red: the same after rounding", (width) => channels(table, width));
    }
    waiting.forEach((drawing) => drawing());
  }

  function sort(article, header) {
    const body = article.querySelector(".layers tbody"), column = [...header.parentNode.children].indexOf(header);
    const ascending = header.getAttribute("aria-sort") !== "ascending";
    header.parentNode.querySelectorAll("th").forEach((th) => th.setAttribute("aria-sort", "none"));
    header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const key = (row) => { const cell = row.children[column]; return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value); };
    const rows = [...body.rows].sort((a, b) => d3.ascending(key(a), key(b)) * (ascending ? 1 : -1));
    body.append(...rows);
  }

  function search(article, text) {
    const wanted = text.trim().toLowerCase(), rows = [...article.querySelectorAll(".layers tbody tr")];
    let shown = 0;
    for (const row of rows) {
      row.hidden = !`${row.cells[0].textContent} ${row.cells[1].textContent}`.toLowerCase().includes(wanted);
      shown += row.hidden ? 0 : 1;
    }
    article.querySelector("[data-count]").textContent = `${shown} of ${rows.length} layers`;
  }

  function redraw(article) {
    const report = reports[Number(article.dataset.report)];
    article.querySelectorAll("[data-chart]").forEach((element) => {
      draw(element, (width) => charts[element.dataset.chart](report, width));
      element.classList.toggle("pick", ["errors", "ranking"].includes(element.dataset.chart));
    });
    inspect(article, report, article.querySelector("[data-choice]").value);
  }

  const articles = [...document.querySelectorAll("article")];
  for (const article of articles) {
    const report = reports[Number(article.dataset.report)];
    const go = (name) => { inspect(article, report, name); article.querySelector("[data-inspector]").scrollIntoView({ block: "start" }); };
    article.querySelectorAll(".layers thead th").forEach((header) => header.firstElementChild.addEventListener("click", () => sort(article, header)));
    article.querySelectorAll(".layers tbody tr").forEach((row) => {
      row.addEventListener("click", () => inspect(article, report, row.dataset.layer));
      row.addEventListener("keydown", (event) => { if (event.key === "Enter") go(row.dataset.layer); });
    });
    article.querySelectorAll('[data-chart="errors"], [data-chart="ranking"]').forEach((element) => {
      element.addEventListener("click", () => { const found = element.querySelector("svg, figure")?.value; if (found) go(found.name); });
    });
    article.querySelector("[data-search]").addEventListener("input", (event) => search(article, event.target.value));
    article.querySelector("[data-choice]").addEventListener("change", (event) => inspect(article, report, event.target.value));
    const worst = report.layers.find((d) => d.rank === 1) ?? report.layers[0];
    article.querySelector("[data-choice]").value = worst.name;
    search(article, "");
  }

  document.querySelectorAll(".copy").forEach((button) => button.addEventListener("click", () => {
    const text = button.previousElementSibling.textContent;
    navigator.clipboard?.writeText(text).then(() => { button.textContent = "Copied"; }, () => { button.textContent = "Select it"; });
  }));

  document.querySelectorAll("[data-tab]").forEach((tab) => tab.addEventListener("click", () => {
    document.querySelectorAll("[data-tab]").forEach((other) => other.setAttribute("aria-selected", String(other === tab)));
    articles.forEach((article) => { article.hidden = article.dataset.report !== tab.dataset.tab; });
    drawAll();
  }));

  // --- theme and size --------------------------------------------------------------------------

  const button = document.getElementById("theme");
  function setTheme(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
  }
  button.addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  function drawAll() {
    document.querySelectorAll('#comparison [data-chart]').forEach((element) => draw(element, (width) => charts.comparison(null, width)));
    articles.filter((article) => !article.hidden).forEach(redraw);
  }
  let waiting, known = 0;
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - known) < 2) return;
    known = entry.contentRect.width;
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, known ? 60 : 0);
  }).observe(document.querySelector("main"));
  drawAll();
  root.dataset.ready = "true";
})();
