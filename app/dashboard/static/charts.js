/* The charts over time: uPlot draws them, and each says in words what it shows. */
(function () {
  "use strict";

  const { words, dom } = window.Mill;
  const HEIGHT = 180;
  const INKS = ["--mill-1", "--mill-2", "--mill-3", "--mill-4", "--mill-5", "--mill-6"];
  const CHARTS = [
    { name: "samples", title: "Samples per second", format: words.rate, lines: (s) => [["samples/s", s.samples_per_s]] },
    { name: "tokens", title: "Output tokens per second", format: words.rate, lines: (s) => [["tokens/s", s.tokens_per_s]] },
    { name: "flight", title: "Samples with workers against the bound", format: words.count, lines: (s) => [["with workers", s.in_flight], ["bound", s.bound]] },
    { name: "queue", title: "Queue depth", format: words.count, lines: (s) => [["queued", s.queued]] },
    { name: "latency", title: "Latency, 95 % within", format: words.duration, lines: (s) => [["latency", s.latency_p95_s]] },
    { name: "failures", title: "Failed samples by class", format: words.count, lines: (s) => Object.entries(s.failures), none: "No sample has failed." },
  ];
  const shown = new Map();

  function css(name) {
    return getComputedStyle(dom.id("mill")).getPropertyValue(name).trim();
  }

  function known(values) {
    return values.filter(words.isNumber);
  }

  function last(values) {
    for (let place = values.length - 1; place >= 0; place -= 1) {
      if (words.isNumber(values[place])) {
        return values[place];
      }
    }
    return null;
  }

  /* What the picture shows, for people who do not see it and as a line beneath it. */
  function told(chart, lines) {
    const all = lines.filter(([, values]) => known(values).length);
    if (!all.length) {
      return chart.none || "Nothing is known of this time.";
    }
    if (all.length > 1 || chart.name === "failures") {
      return all.map(([label, values]) => label + " " + chart.format(last(values))).join(" · ");
    }
    const values = known(all[0][1]);
    const mean = values.reduce((sum, one) => sum + one, 0) / values.length;
    return "now " + chart.format(last(all[0][1])) + " · mean " + chart.format(mean) + " · highest " + chart.format(Math.max(...values));
  }

  function frame(chart) {
    const figure = dom.element("figure", "mill-card mill-chart");
    const plot = dom.element("div", "mill-plot");
    plot.setAttribute("role", "img");
    const caption = dom.element("figcaption");
    caption.append(dom.element("h3", "", chart.title), dom.element("p", "mill-told", ""));
    figure.append(caption, plot);
    dom.id("charts").append(figure);
    const state = { chart, figure, plot, told: caption.lastElementChild, sentence: "", uplot: null, labels: "", latest: null };
    new ResizeObserver(() => {
      if (state.uplot && plot.clientWidth) {
        state.uplot.setSize({ width: plot.clientWidth, height: HEIGHT });
      }
    }).observe(plot);
    return state;
  }

  function axes(chart) {
    const ink = css("--mill-ink-quiet");
    const grid = { stroke: css("--mill-line"), width: 1 };
    const font = "12px system-ui, sans-serif";
    const pad = (n) => String(n).padStart(2, "0");
    // The 24-hour clock, as everywhere on the page; the day where it changes.
    const clock = (_plot, splits) => splits.map((at, place) => {
      const date = new Date(at * 1000);
      const before = place ? new Date(splits[place - 1] * 1000) : null;
      const time = pad(date.getHours()) + ":" + pad(date.getMinutes());
      const newDay = before && before.toDateString() !== date.toDateString();
      return newDay ? time + "\n" + date.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) : time;
    });
    return [
      { stroke: ink, grid, ticks: grid, font, size: 32, space: 70, values: clock, incrs: [60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400] },
      { stroke: ink, grid, ticks: grid, font, size: 56, space: 36, values: (_plot, splits) => splits.map((value) => words.large(value) === words.count(value) ? (value % 1 ? words.rate(value) : words.count(value)) : words.large(value)) },
    ];
  }

  function series(chart, lines) {
    return lines.map(([label], place) => ({
      label,
      stroke: css(INKS[place % INKS.length]),
      fill: lines.length === 1 ? css(INKS[place % INKS.length]) + "22" : undefined,
      width: 2,
      dash: label === "bound" ? [6, 4] : undefined,
      points: { show: false },
    }));
  }

  /* Where the pointer is, the line beneath the title says the values there; elsewhere what the chart shows. */
  function point(state, place) {
    if (place === null || place === undefined || !state.latest) {
      dom.text(state.told, state.sentence);
      return;
    }
    const { lines, data } = state.latest;
    const values = lines.map(([label, column]) => (lines.length > 1 ? label + " " : "") + state.chart.format(column[place]));
    dom.text(state.told, words.moment(data[0][place], true) + " · " + values.join(" · "));
  }

  function make(state, lines, data) {
    if (state.uplot) {
      state.uplot.destroy();
    }
    const { chart } = state;
    const top = (_plot, low, high) => [0, high > 0 ? high * 1.1 : 1];
    const options = {
      width: state.plot.clientWidth || 300,
      height: HEIGHT,
      cursor: { sync: { key: "mill" }, y: false, points: { size: 7 }, drag: { x: false, y: false } },
      legend: { show: lines.length > 1, live: false, markers: { width: 0, fill: (_plot, place) => css(INKS[(place - 1) % INKS.length]) } },
      hooks: { setCursor: [(plot) => point(state, plot.cursor.idx)] },
      scales: { y: { range: top } },
      axes: axes(chart),
      series: [{}, ...series(chart, lines)],
    };
    state.uplot = new window.uPlot(options, data, state.plot);
  }

  function draw(columns, spanWords) {
    for (const chart of CHARTS) {
      const state = shown.get(chart.name) || frame(chart);
      shown.set(chart.name, state);
      const lines = chart.lines(columns);
      state.sentence = told(chart, lines);
      dom.attribute(state.plot, "aria-label", chart.title + ", " + spanWords + ": " + state.sentence);
      const some = lines.some(([, values]) => known(values).length);
      state.figure.classList.toggle("mill-no-data", !some);
      const labels = JSON.stringify(lines.map(([label]) => label));
      const data = [columns.t, ...lines.map(([, values]) => values)];
      state.latest = { lines, data };
      if (some && (!state.uplot || state.labels !== labels)) {
        state.labels = labels;
        make(state, lines, data);
      } else if (some) {
        state.uplot.setData(data);
      }
      point(state, some && state.uplot.cursor.left >= 0 ? state.uplot.cursor.idx : null);
    }
  }

  /* Colours come from the style sheet, so another theme means another picture. */
  function repaint() {
    for (const state of shown.values()) {
      if (state.uplot && state.latest) {
        make(state, state.latest.lines, state.latest.data);
      }
    }
  }

  new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-bs-theme"] });
  window.Mill.charts = { draw };
}());
