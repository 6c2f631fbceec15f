/* Shows a snapshot: what each number is called and where it stands. */
(function () {
  "use strict";

  const { words, dom } = window.Mill;
  const COUNTS = [
    ["accepted", "accepted"],
    ["rejected", "rejected"],
    ["failed", "failed"],
    ["in_flight", "with workers"],
    ["queued", "queued"],
    ["missing", "missing"],
  ];
  const FINISHED = new Set(["done", "empty"]);

  function bar(node, part) {
    const counts = part.counts;
    const total = counts.samples || 0;
    // Without Redis nobody knows what is queued: the rest of the bar stays open.
    const shown = COUNTS.filter(([name]) => words.isNumber(counts[name]));
    dom.rows(node, shown, ([name]) => name, ([name]) => dom.element("span", "mill-part mill-part-" + name), (span, [name]) => {
      const width = total ? (100 * counts[name]) / total : 0;
      span.style.width = width.toFixed(3) + "%";
      dom.show(span, counts[name] > 0);
    });
    dom.attribute(node, "aria-valuenow", part.percent === null || part.percent === undefined ? null : part.percent);
    dom.attribute(node, "aria-valuetext", percent(part) + ", " + done(part));
  }

  function percent(part) {
    return words.isNumber(part.percent) ? part.percent.toFixed(1) + " %" : words.UNKNOWN;
  }

  function done(part) {
    return words.count(part.counts.samples - part.counts.left) + " of " + words.count(part.counts.samples) + (part.counts.samples === 1 ? " sample" : " samples");
  }

  /* Missing samples and refused rows are shown only where there are some: their absence is no news. */
  function counts(list, part) {
    const usual = (name) => name !== "missing" && name !== "refused";
    const shown = [...COUNTS, ["refused", "refused rows"]].filter(([name]) => usual(name) || part.counts[name]);
    const make = ([name, label]) => {
      const group = dom.element("div", "mill-count mill-count-" + name);
      group.append(dom.element("dt", "", label), dom.element("dd", "", ""));
      group.lastElementChild.dataset.field = name;
      return group;
    };
    dom.rows(list, shown, ([name]) => name, make, (group, [name]) => {
      dom.text(group.lastElementChild, words.count(part.counts[name]));
      group.classList.toggle("mill-zero", part.counts[name] === 0);
    });
  }

  function latency(part) {
    const known = part.latency || {};
    if (!words.isNumber(known.mean_s)) {
      return { text: words.UNKNOWN, sub: part.counts.accepted ? "" : "no answer yet" };
    }
    return { text: words.duration(known.mean_s), sub: "95 % within " + words.duration(known.p95_s) };
  }

  function lengths(part) {
    const known = part.tokens || {};
    if (!words.isNumber(known.mean)) {
      return { text: words.UNKNOWN, sub: "no accepted answer yet" };
    }
    const p95 = words.isNumber(known.p95) ? "95 % up to " + words.large(known.p95) : "";
    return { text: words.large(known.mean), sub: p95 };
  }

  function pill(node, state) {
    dom.text(node, words.state(state));
    dom.attribute(node, "data-state", state);
  }

  function totals(snapshot) {
    const part = snapshot.totals;
    const card = document.querySelector(".mill-total");
    dom.text(dom.field(card, "percent"), percent(part));
    dom.text(dom.field(card, "done"), done(part));
    bar(card.querySelector(".mill-bar"), part);
    counts(dom.id("total-counts"), part);
    const eta = words.eta(part);
    figure("eta", eta.text, eta.sub);
    const rates = part.rates;
    const both = (name) => "5 min " + words.rate(rates.five_minutes[name]) + " · run " + words.rate(rates.run[name]);
    figure("samples", words.rate(rates.now.samples_per_s), both("samples_per_s"));
    figure("tokens", words.rate(rates.now.tokens_per_s), both("tokens_per_s"));
    flight(snapshot);
    figure("latency", latency(part).text, latency(part).sub);
    figure("length", lengths(part).text, [lengths(part).sub, part.tokens.total ? words.large(part.tokens.total) + " in all" : ""].filter(Boolean).join(" · "));
    pill(dom.id("state"), part.state);
  }

  function flight(snapshot) {
    const asked = snapshot.endpoints.reduce((sum, endpoint) => sum + endpoint.in_flight, 0);
    const bounds = snapshot.endpoints.map((endpoint) => endpoint.bound).filter(words.isNumber);
    const bound = bounds.reduce((sum, one) => sum + one, 0);
    const oldest = snapshot.totals.oldest_in_flight_s;
    const text = snapshot.broker.reachable ? words.count(asked) + (bounds.length ? " of " + words.count(bound) : "") : words.UNKNOWN;
    figure("flight", text, words.isNumber(oldest) ? "oldest sample " + words.duration(oldest) : "");
  }

  function figure(name, text, sub) {
    dom.text(dom.id("t-" + name), text);
    dom.text(dom.id("t-" + name + "-sub"), sub);
  }

  function datasets(snapshot) {
    const items = Object.entries(snapshot.datasets).map(([name, part]) => ({ name, part }));
    items.sort((a, b) => FINISHED.has(a.part.state) - FINISHED.has(b.part.state));
    dom.rows(dom.id("datasets"), items, (item) => item.name, dom.fromTemplate("dataset-template"), (card, item) => {
      dataset(card, item.name, item.part);
    });
    options(dom.id("chart-dataset"), ["", ...Object.keys(snapshot.datasets)]);
    options(dom.id("find-dataset"), Object.keys(snapshot.datasets));
  }

  function dataset(card, name, part) {
    const set = (field, value) => dom.text(dom.field(card, field), value);
    set("name", name);
    pill(dom.field(card, "state"), part.state);
    set("percent", percent(part));
    set("done", done(part));
    const progress = card.querySelector(".mill-bar");
    dom.attribute(progress, "aria-label", name);
    bar(progress, part);
    counts(card.querySelector(".mill-counts"), part);
    const eta = words.eta(part);
    dom.show(card.querySelector(".mill-key"), !FINISHED.has(part.state));
    set("eta", eta.text);
    set("eta-sub", eta.sub ? "(" + eta.sub + ")" : "");
    dom.attribute(card.querySelector(".mill-rates"), "aria-label", "Rates of " + name);
    for (const [letter, field] of [["s", "samples_per_s"], ["t", "tokens_per_s"]]) {
      set(letter + "-now", words.rate(part.rates.now[field]));
      set(letter + "-five", words.rate(part.rates.five_minutes[field]));
      set(letter + "-run", words.rate(part.rates.run[field]));
    }
    set("latency", [latency(part).text, latency(part).sub].filter(Boolean).join(", "));
    set("length", [lengths(part).text, lengths(part).sub].filter(Boolean).join(", "));
    set("tokens", words.large(part.tokens.total));
    set("oldest", words.isNumber(part.oldest_in_flight_s) ? words.duration(part.oldest_in_flight_s) : words.UNKNOWN);
    const button = card.querySelector('[data-act="pause"]');
    if (button) {
      const paused = part.state === "paused";
      dom.text(button, paused ? "Resume" : "Pause");
      dom.attribute(button, "aria-label", (paused ? "Resume " : "Pause ") + name);
      dom.show(button, !FINISHED.has(part.state));
      button.dataset.order = JSON.stringify({ action: paused ? "resume" : "pause", dataset: name });
    }
  }

  function options(select, names) {
    const before = select.value;
    dom.rows(select, names, (name) => name || "*", (name) => new Option(name || "all", name), () => {});
    if (names.includes(before)) {
      select.value = before;
    }
  }

  function notes(snapshot) {
    const said = snapshot.totals.notes.map((text) => ({ text }));
    for (const [dataset, part] of Object.entries(snapshot.datasets)) {
      said.push(...part.notes.map((text) => ({ dataset, text })));
    }
    dom.rows(dom.id("notes-list"), said, (note) => (note.dataset || "") + "\n" + note.text, () => dom.element("li"), (node, note) => {
      if (!node.firstChild) {
        if (note.dataset) {
          node.append(dom.element("strong", "", note.dataset + ": "));
        }
        node.append(note.text);
      }
    });
    dom.show(dom.id("notes"), said.length > 0);
    dom.show(dom.id("calm"), said.length === 0 && Object.keys(snapshot.datasets).length > 0);
  }

  function failures(data, control) {
    const url = dom.id("mill").dataset.url + "/sample?";
    dom.show(dom.id("retry-head"), control);
    dom.rows(dom.id("failures"), data.failures, (one) => [one.dataset, one.kind, one.reason].join("\n"),
      dom.fromTemplate("failure-template"), (row, one) => {
        const set = (field, value) => dom.text(dom.field(row, field), value);
        set("reason", one.reason);
        set("kind", one.kind);
        dom.attribute(dom.field(row, "kind"), "data-state", one.kind);
        set("dataset", one.dataset);
        set("count", words.count(one.count));
        set("first", words.moment(one.first_at));
        set("last", words.moment(one.last_at));
        set("error", one.error);
        const link = (sample) => {
          const node = dom.element("a", "", sample);
          node.href = url + new URLSearchParams({ dataset: one.dataset, id: sample });
          return node;
        };
        dom.rows(row.querySelector(".mill-ids"), one.ids, (sample) => sample, link, () => {});
        const button = row.querySelector('[data-act="retry"]');
        if (button) {
          dom.attribute(button, "aria-label", "Ask again: " + one.kind + " samples of " + one.dataset + ", " + one.reason);
          const order = { action: "retry", dataset: one.dataset, kind: one.kind, reason: one.reason };
          button.dataset.order = JSON.stringify(order);
        }
      });
    dom.show(dom.id("failures-card"), data.failures.length > 0);
    dom.show(dom.id("no-failures"), data.failures.length === 0);
    dom.show(dom.id("reading"), data.reading);
    dom.show(dom.id("more-failures"), data.more_failures > 0);
    dom.text(dom.id("more-failures"), data.more_failures + " more classes are in producer status.");
    const faults = Object.entries(data.snapshot.totals.call_faults || {}).sort((a, b) => b[1] - a[1]);
    dom.show(dom.id("call-faults"), faults.length > 0);
    const told = faults.map(([kind, n]) => kind + " " + words.count(n)).join(", ");
    dom.text(dom.id("call-faults"), "Calls that failed, those that were asked again included: " + told + ".");
  }

  function endpoints(snapshot) {
    dom.rows(dom.id("endpoints"), snapshot.endpoints, (one) => one.name, dom.fromTemplate("endpoint-template"), (row, one) => {
      const set = (field, value) => dom.text(dom.field(row, field), value);
      set("url", one.url || one.name);
      pill(dom.field(row, "state"), one.state);
      const since = one.since ? "since " + words.moment(one.since, true) : "";
      set("words", one.state === "up" ? "" : [since, one.reason].filter(Boolean).join(": "));
      set("flight", words.count(one.in_flight) + (words.isNumber(one.bound) ? " of " + words.count(one.bound) : ""));
      set("latency", words.duration(one.latency_s));
      set("gauges", gauges(one.gauges));
    });
    const none = snapshot.endpoints.length === 0;
    dom.show(dom.id("endpoints-card"), !none);
    dom.show(dom.id("no-endpoints"), none);
    const why = snapshot.broker.reachable ? "No worker has used a model server yet." : "Without Redis nobody can tell.";
    dom.text(dom.id("no-endpoints"), why);
  }

  function gauges(said) {
    if (!said) {
      return "no /metrics";
    }
    const items = [];
    if (words.isNumber(said.running)) {
      items.push(words.count(said.running) + " running");
    }
    if (words.isNumber(said.waiting)) {
      items.push(words.count(said.waiting) + " waiting");
    }
    if (words.isNumber(said.kv)) {
      items.push("KV cache " + Math.round(100 * said.kv) + " %");
    }
    return items.join(", ") || words.UNKNOWN;
  }

  function workers(snapshot) {
    dom.rows(dom.id("workers"), snapshot.workers, (one) => String(one.owner || one.node), dom.fromTemplate("worker-template"), (row, one) => {
      const set = (field, value) => dom.text(dom.field(row, field), value);
      set("node", String(one.node || one.owner));
      set("where", [one.host, one.pid ? "pid " + one.pid : ""].filter(Boolean).join(", "));
      pill(dom.field(row, "state"), one.state || "running");
      set("note", one.note || "");
      set("slots", words.count(one.busy) + " of " + words.count(one.slots));
      set("beat", words.isNumber(one.at) ? words.duration(Math.max(0, snapshot.at - one.at)) + " ago" : words.UNKNOWN);
      set("uptime", words.isNumber(one.started_at) ? words.duration(snapshot.at - one.started_at) : words.UNKNOWN);
      set("version", String(one.version || words.UNKNOWN));
    });
    const none = snapshot.workers.length === 0;
    dom.show(dom.id("workers-card"), !none);
    dom.show(dom.id("no-workers"), none);
    const why = snapshot.broker.reachable
      ? "No worker is running. Start some with producer up --workers 2, or celery -A app worker."
      : "Without Redis nobody can tell who works.";
    dom.text(dom.id("no-workers"), why);
  }

  function all(data, control) {
    const snapshot = data.snapshot;
    const none = Object.keys(snapshot.datasets).length === 0;
    dom.show(dom.id("empty"), none);
    dom.id("mill").classList.toggle("mill-none", none);
    totals(snapshot);
    datasets(snapshot);
    notes(snapshot);
    failures(data, control);
    endpoints(snapshot);
    workers(snapshot);
    const offline = !snapshot.broker.reachable;
    dom.show(dom.id("offline"), offline);
    dom.text(dom.id("offline"), "Redis does not answer. These numbers come from the files: what is recorded is right, "
      + "what is queued or in flight is unknown.");
    dom.id("mill").dataset.source = offline ? "files" : "all";
  }

  /* One sentence for people who listen: it is read out when it changes, so it holds nothing that changes all the time. */
  function sentence(data) {
    const part = data.snapshot.totals;
    const tenth = words.isNumber(part.percent) ? Math.floor(part.percent / 5) * 5 + " percent done" : "no samples";
    const failed = part.counts.failed ? ", " + words.count(part.counts.failed) + " failed" : "";
    return "Pipeline " + words.state(part.state) + ", " + tenth + failed + ".";
  }

  window.Mill.view = { all, sentence };
}());
