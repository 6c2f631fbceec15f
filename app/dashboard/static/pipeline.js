/* Keeps the page alive: asks for the numbers, says how old they are, sends what a person presses. */
(function () {
  "use strict";

  const { words, dom, view, charts } = window.Mill;
  const EVERY_MS = 2000;
  const LONGEST_MS = 15000;
  const TIMEOUT_MS = 10000;
  const STALE_S = 10;
  const CHARTS_EVERY_MS = { "15m": 5000, "6h": 30000, run: 60000 };
  const SPANS = { "15m": "the last 15 minutes", "6h": "the last 6 hours", run: "the whole run" };
  const ANNOUNCE_MS = 30000;
  const SAID_MS = 8000;
  const SAID_BAD_MS = 20000;

  const root = dom.id("mill");
  const base = root.dataset.url;
  const control = root.dataset.control === "yes";
  const now = { received: null, age: 0, failures: 0, lostAt: null, why: "", announced: 0 };
  const timers = { data: null, charts: null, said: null };
  let span = "15m";

  async function ask(path, options) {
    const patience = new AbortController();
    const timer = setTimeout(() => patience.abort(), TIMEOUT_MS);
    try {
      const answer = await fetch(base + path, { cache: "no-store", credentials: "same-origin", signal: patience.signal, ...options });
      const body = await answer.json().catch(() => null);
      if (!answer.ok) {
        throw new Error((body && body.error) || "Flower answers " + answer.status + ".");
      }
      return { body, age: Number(answer.headers.get("X-Age-S")) || 0 };
    } finally {
      clearTimeout(timer);
    }
  }

  function again(name, work, delay) {
    clearTimeout(timers[name]);
    timers[name] = document.hidden ? null : setTimeout(work, delay);
  }

  async function poll() {
    try {
      const { body, age } = await ask("/data");
      now.failures = 0;
      now.lostAt = null;
      now.why = "";
      if (body.snapshot) {
        now.received = performance.now();
        now.age = age;
        view.all(body, control);
        bound(body.bound);
        announce(view.sentence(body));
      } else {
        now.why = body.trouble;
        now.lostAt = now.lostAt || Date.now();
      }
    } catch (error) {
      now.failures += 1;
      now.lostAt = now.lostAt || Date.now();
      // What fetch itself throws says nothing to people.
      now.why = error instanceof TypeError || error.name === "AbortError" ? "Flower does not answer." : error.message;
    }
    fresh();
    again("data", poll, Math.min(LONGEST_MS, EVERY_MS * 2 ** Math.min(now.failures, 3)));
  }

  async function pollCharts() {
    const dataset = dom.id("chart-dataset").value;
    const wanted = span;
    try {
      const { body } = await ask("/history?" + new URLSearchParams({ span: wanted, dataset }));
      if (wanted === span && dataset === dom.id("chart-dataset").value) {
        charts.draw(body, SPANS[span]);
        hint("");
      }
    } catch (error) {
      hint(error instanceof TypeError || error.name === "AbortError" ? "" : error.message);
    }
    again("charts", pollCharts, CHARTS_EVERY_MS[span]);
  }

  function hint(text) {
    dom.text(dom.id("chart-hint"), text);
    dom.show(dom.id("chart-hint"), Boolean(text));
  }

  /* How old the numbers are, every second, whether new ones come or not. */
  function fresh() {
    const seen = now.received !== null;
    const age = seen ? now.age + (performance.now() - now.received) / 1000 : 0;
    const lost = Boolean(now.why);
    const live = lost ? "lost" : !seen ? "loading" : age > STALE_S ? "stale" : "live";
    dom.attribute(root, "data-live", live);
    const updated = seen ? "Updated " + (age < 1.5 ? "just now" : words.duration(Math.round(age)) + " ago") : "No numbers yet";
    dom.text(dom.id("fresh"), live === "loading" ? "Reading the numbers…" : updated);
    dom.show(dom.id("lost"), lost);
    if (lost) {
      const old = seen ? " The numbers below are " + words.duration(Math.round(age)) + " old." : "";
      const since = " (since " + words.moment(now.lostAt / 1000, true) + ").";
      dom.text(dom.id("lost"), now.why.replace(/\.$/, "") + since + old + " Trying again.");
      announce("The page is not up to date. " + now.why);
    }
  }

  function announce(sentence) {
    const due = Date.now() - now.announced > ANNOUNCE_MS;
    if (due && dom.id("summary").textContent !== sentence) {
      now.announced = Date.now();
      dom.text(dom.id("summary"), sentence);
    }
  }

  function wake() {
    if (document.hidden) {
      clearTimeout(timers.data);
      clearTimeout(timers.charts);
      timers.data = timers.charts = null;
    } else if (timers.data === null) {
      poll();
      pollCharts();
    }
  }

  // What a person presses

  function cookie(name) {
    const found = document.cookie.split("; ").find((one) => one.startsWith(name + "="));
    return found ? decodeURIComponent(found.slice(name.length + 1)) : "";
  }

  function say(sentence, bad) {
    const node = dom.id("said");
    dom.text(node, sentence);
    dom.attribute(node, "data-kind", bad ? "bad" : "good");
    dom.show(node, true);
    dom.text(dom.id("summary"), sentence);
    clearTimeout(timers.said);
    timers.said = setTimeout(() => dom.show(node, false), bad ? SAID_BAD_MS : SAID_MS);
  }

  async function send(order, button) {
    button.setAttribute("aria-busy", "true");
    try {
      const { body } = await ask("/control", {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-XSRFToken": cookie("_xsrf") },
        body: JSON.stringify(order),
        signal: undefined, // a large retry takes longer than a look
      });
      say(body.said, false);
    } catch (error) {
      say(error instanceof TypeError ? "Flower does not answer; nothing may have changed." : error.message, true);
    } finally {
      button.removeAttribute("aria-busy");
      poll();
    }
  }

  function bound(value) {
    const node = dom.id("bound-now");
    if (node) {
      dom.text(node, words.isNumber(value) ? "Set by hand: " + words.count(value) + "." : "Not set by hand: MILL_MAX_IN_FLIGHT of the workers counts.");
    }
  }

  root.addEventListener("click", (event) => {
    const button = event.target.closest("[data-order]");
    if (button && button.getAttribute("aria-busy") !== "true") {
      send(JSON.parse(button.dataset.order), button);
    }
  });
  if (control) {
    dom.id("bound-form").addEventListener("submit", (event) => {
      event.preventDefault();
      send({ action: "set_bound", bound: Number(dom.id("bound").value) }, event.submitter || dom.id("bound-form"));
    });
    dom.id("bound-back").addEventListener("click", (event) => send({ action: "set_bound", bound: null }, event.currentTarget));
  }
  document.querySelectorAll("[data-span]").forEach((button) => {
    button.addEventListener("click", () => {
      span = button.dataset.span;
      document.querySelectorAll("[data-span]").forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
      pollCharts();
    });
  });
  dom.id("chart-dataset").addEventListener("change", pollCharts);
  document.addEventListener("visibilitychange", wake);
  setInterval(() => document.hidden || fresh(), 1000);
  wake();
}());
