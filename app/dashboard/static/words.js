/* Numbers, times and states as words, the same everywhere on the page. */
(function () {
  "use strict";

  const UNKNOWN = "—";
  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const three = new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 });
  const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });
  const pad = (n) => String(n).padStart(2, "0");
  const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  function count(value) {
    return isNumber(value) ? whole.format(value) : UNKNOWN;
  }

  function rate(value) {
    if (!isNumber(value)) {
      return UNKNOWN;
    }
    return value >= 100 ? whole.format(value) : three.format(value);
  }

  function large(value) {
    return isNumber(value) ? (value < 10000 ? whole.format(value) : compact.format(value)) : UNKNOWN;
  }

  /* Two units at most: what is further behind changes nothing for the reader. */
  function duration(seconds) {
    if (!isNumber(seconds)) {
      return UNKNOWN;
    }
    const s = Math.max(0, seconds);
    if (s < 10) {
      return three.format(Math.round(s * 10) / 10) + " s";
    }
    if (s < 59.5) {
      return Math.round(s) + " s";
    }
    const minutes = Math.round(s / 60);
    if (s < 600) {
      const rest = Math.round(s);
      return Math.floor(rest / 60) + " min" + (rest % 60 ? " " + (rest % 60) + " s" : "");
    }
    if (minutes < 60) {
      return minutes + " min";
    }
    const hours = Math.floor(minutes / 60);
    if (hours < 24) {
      return hours + " h" + (minutes % 60 ? " " + (minutes % 60) + " min" : "");
    }
    const roundHours = Math.round(s / 3600);
    return Math.floor(roundHours / 24) + " d" + (roundHours % 24 ? " " + (roundHours % 24) + " h" : "");
  }

  /* A guess is not known to the second: whole minutes above two, five minutes above five hours, hours above two days. */
  function coarse(seconds) {
    const s = Math.max(0, seconds);
    const to = s < 10 ? 1 : s < 120 ? 5 : s < 18000 ? 60 : s < 172800 ? 300 : 3600;
    return duration(Math.max(to, Math.round(s / to) * to));
  }

  function range(low, high) {
    const from = coarse(low);
    const to = coarse(high);
    if (from === to) {
      return "about " + to;
    }
    // "6 – 9 min": one unit is said once.
    const [, n, unit] = /^([\d.]+) (\S+)$/.exec(from) || [];
    const same = unit && to.endsWith(" " + unit) && to.split(" ").length === 2;
    return (same ? n : from) + " – " + to;
  }

  /* A moment by the reader's own clock; the date unless it is today's. */
  function moment(at, withSeconds) {
    if (!isNumber(at)) {
      return UNKNOWN;
    }
    const date = new Date(at * 1000);
    const clock = pad(date.getHours()) + ":" + pad(date.getMinutes()) + (withSeconds ? ":" + pad(date.getSeconds()) : "");
    if (date.toDateString() === new Date().toDateString()) {
      return clock;
    }
    return date.toLocaleDateString("en-GB", { weekday: "short", day: "numeric", month: "short" }) + " " + clock;
  }

  /* A range, and beside it the moment or what else there is to say. */
  function eta(part) {
    if (part.state === "done") {
      return { text: "finished", sub: part.last_record_at ? "at " + moment(part.last_record_at) : "" };
    }
    if (part.state === "empty") {
      return { text: UNKNOWN, sub: "nothing to do" };
    }
    const guess = part.eta || {};
    if (!isNumber(guess.seconds)) {
      return { text: "unknown", sub: guess.reason || "" };
    }
    const known = isNumber(guess.low_s) && isNumber(guess.high_s);
    const text = known ? range(guess.low_s, guess.high_s) : "about " + coarse(guess.seconds);
    return { text, sub: isNumber(guess.at) ? "most likely at " + moment(guess.at) : "" };
  }

  function state(word) {
    return String(word || "").replace(/_/g, " ");
  }

  window.Mill = { words: { UNKNOWN, isNumber, count, rate, large, duration, range, moment, eta, state } };
}());
