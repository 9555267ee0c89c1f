// Series over time, drawn by uPlot (beside this file) from what the page's elements say in `data-chart`. A live chart
// is fed by the page's stream of events: `page.js` hands every event's document to `window.tidegateCharts`.
"use strict";

(() => {
  const KEPT_POINTS = 2000;
  const HEIGHT = 190;
  const LINES = ["--bar", "--watch", "--good", "--bad", "--accent", "--quiet", "--heat3", "--fill"];
  const SIZES = ["B", "KiB", "MiB", "GiB", "TiB"];
  const utc = (seconds) => uPlot.tzDate(new Date(seconds * 1000), "Etc/UTC");
  const moment = (ms) => new Date(ms).toISOString().slice(0, 19).replace("T", " ") + "Z";
  const number = (value, digits) => value.toLocaleString("en-US", { maximumFractionDigits: digits });
  const size = (bytes) => {
    let step = 0;
    for (; Math.abs(bytes) >= 1024 && step < SIZES.length - 1; step++) bytes /= 1024;
    return `${number(bytes, step ? 1 : 0)} ${SIZES[step]}`;
  };
  const short = (value) => value >= 10000 ? new Intl.NumberFormat("en-US", { notation: "compact" }).format(value) : number(value, 2);
  const numbers = [1, 10, 100, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10].flatMap((ten) => [ten, 2 * ten, 5 * ten]);
  const minutes = [1 / 60, 1 / 12, 1 / 6, 1 / 2, 1, 5, 10, 30, 60, 180, 360, 720, 1440, 2880, 7200, 14400, 43200, 525600];
  const STEPS = { number: numbers, rate: numbers, bytes: Array.from({ length: 50 }, (_, power) => 2 ** power), moment: minutes.map((each) => each * 60000) };
  const TICKS = { number: short, rate: short, bytes: size, moment: (ms) => moment(ms).slice(11, 19) };
  // Ticks of an axis of time, as far as they differ; the day stands under the first.
  const times = (_, ticks, __, ___, step) => ticks.map((tick, place) => {
    const at = new Date(tick * 1000).toISOString(), day = at.slice(0, 10);
    if (step >= 86400) return day;
    const clock = step >= 60 ? at.slice(11, 16) : step >= 1 ? at.slice(11, 19) : at.slice(17, 23);
    return place ? clock : `${clock}\n${step >= 1 ? day : at.slice(0, 16).replace("T", " ")}`;
  });
  const WORDS = {
    number: (value) => number(value, 2), rate: (value) => `${number(value, 0)}/s`, bytes: size, moment,
  };
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const found = (point, path) => path.reduce((at, name) => (at === null || at === undefined ? null : at[name] ?? null), point);

  class Series {
    constructor(element) {
      this.element = element;
      this.said = JSON.parse(element.dataset.chart);
      this.data = [this.said.x, ...this.said.lines.map((line) => line.values)];
      this.draw();
    }

    options() {
      const { unit, by, kind, lines } = this.said;
      const axis = { stroke: ink("--quiet"), grid: { stroke: ink("--line"), width: 1 }, ticks: { stroke: ink("--line"), width: 1 }, font: "12px system-ui, sans-serif" };
      const y = { ...axis, space: 22, size: unit === "moment" ? 74 : unit === "bytes" ? 76 : 62, incrs: STEPS[unit], values: (_, ticks) => ticks.map(TICKS[unit]) };
      const x = by === "round" ? { ...axis, incrs: STEPS.number, values: (_, ticks) => ticks.map(String) } : { ...axis, space: 64, values: times };
      const label = by === "round" ? "round" : "at";
      return {
        width: Math.max(200, this.element.clientWidth), height: HEIGHT, tzDate: utc, padding: [8, 24, 0, 0],
        hooks: { draw: [(plot) => queueMicrotask(() => { if (plot.cursor.left < 0) this.rest(plot); })] },
        cursor: { points: { size: 7 }, drag: { x: true, y: false } },
        legend: { live: true },
        scales: { x: { time: by !== "round", range: (_, low, high) => this.reach(low, high) }, y: { range: (_, low, high) => this.height(low, high) } },
        axes: [x, y],
        series: [
          { label, value: (_, value) => value === null ? "–" : by === "round" ? String(value) : moment(value * 1000) },
          ...lines.map((line, place) => ({
            label: line.label, stroke: ink(LINES[place % LINES.length]), width: 2, spanGaps: true, dash: place % 2 ? [7, 5] : undefined,
            fill: kind === "bars" ? ink("--bar") : undefined,
            paths: kind === "bars" ? uPlot.paths.bars({ size: [0.75, 48] }) : undefined,
            points: { show: kind !== "bars" && this.said.x.length < 100, size: 6 },
            value: (_, value) => value === null || value === undefined ? "–" : WORDS[unit](value),
          })),
        ],
      };
    }

    reach(low, high) {
      const points = this.data[0];
      if (!points.length) return [0, 1];
      const gaps = points.slice(1).map((at, place) => at - points[place]).filter((gap) => gap > 0);
      const step = (gaps.length ? Math.min(...gaps) : this.said.by === "round" ? 1 : 60000) / this.unitOfX();
      if (points.length === 1) low = high = points[0] / this.unitOfX();  // uPlot would show years behind it
      return this.said.kind === "bars" ? [low - step * 0.6, high + step * 0.6] : low === high ? [low - step / 2, high + step / 2] : [low, high];
    }

    height(low, high) {
      if (low === null || high === null) return [0, 1];
      if (this.said.unit === "moment") { const room = Math.max(1000, (high - low) * 0.08); return [low - room, high + room]; }
      return [Math.min(0, low), high <= 0 ? 1 : high * 1.08];
    }

    unitOfX() { return this.said.by === "round" ? 1 : 1000; }

    scaled() { const unit = this.unitOfX(); return [this.data[0].map((at) => at / unit), ...this.data.slice(1)]; }

    draw() {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), this.scaled(), this.element);
      const links = this.said.links ?? [];
      if (links.length) {
        this.plot.over.classList.add("leads");
        this.plot.over.addEventListener("click", () => { const at = this.plot.cursor.idx; if (at !== null && links[at]) location.href = links[at]; });
      }
      this.plot.over.addEventListener("mouseleave", () => this.rest(this.plot));
    }

    // Where no pointer is, the legend says the newest values.
    rest(plot) { if (this.data[0].length) plot.setLegend({ idx: this.data[0].length - 1 }); }

    fit() { const width = Math.max(200, this.element.clientWidth); if (width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT }); }

    // Points of an event that are newer than the last one are added, the last one is replaced.
    feed(event) {
      const { at, points, lines } = this.said;
      if (!at || !at.length) return;
      for (const point of points ? event[points] : [event]) {
        const x = found(point, at), last = this.data[0].at(-1), values = lines.map((line) => found(point, line.path));
        if (x === null || (last !== undefined && x < last) || values.every((value) => value === null)) continue;
        if (x === last) { values.forEach((value, place) => { this.data[place + 1][this.data[place + 1].length - 1] = value; }); continue; }
        this.data[0].push(x);
        values.forEach((value, place) => this.data[place + 1].push(value));
      }
      for (const column of this.data) column.splice(0, Math.max(0, column.length - KEPT_POINTS));
      this.plot.setData(this.scaled());
    }
  }

  const charts = [...document.querySelectorAll("[data-chart]")].map((element) => new Series(element));
  const wide = new ResizeObserver(() => charts.forEach((chart) => chart.fit()));
  charts.forEach((chart) => wide.observe(chart.element));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((chart) => chart.draw()));
  window.tidegateCharts = { feed: (event) => charts.forEach((chart) => chart.feed(event)) };
})();
