/* Times of a sample by the reader's own clock. */
(function () {
  "use strict";
  document.querySelectorAll("time[data-at]").forEach((node) => {
    const at = Number(node.dataset.at);
    if (Number.isFinite(at)) {
      node.dateTime = new Date(at * 1000).toISOString();
      node.textContent = window.Mill.words.moment(at, true);
    }
  });
}());
