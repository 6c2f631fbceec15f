/* Changes the page in place: a node is touched only where its text differs, so that nothing flickers or loses focus. */
(function () {
  "use strict";

  function text(node, value) {
    if (!node) {
      return;
    }
    const only = node.childNodes.length === 1 && node.firstChild.nodeType === Node.TEXT_NODE;
    if (only && node.firstChild.data !== value) {
      node.firstChild.data = value;
    } else if (!only && node.textContent !== value) {
      node.textContent = value;
    }
  }

  function attribute(node, name, value) {
    if (value === null) {
      node.removeAttribute(name);
    } else if (node.getAttribute(name) !== String(value)) {
      node.setAttribute(name, value);
    }
  }

  function show(node, visible) {
    if (node && node.hidden === visible) {
      node.hidden = !visible;
    }
  }

  /* One child for each item, found again by its key; children move only where the order has changed. */
  function rows(parent, items, keyOf, make, fill) {
    const focused = document.activeElement;
    const old = new Map();
    for (const child of [...parent.children]) {
      old.set(child.dataset.key, child);
    }
    let place = parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      let child = old.get(key);
      if (child) {
        old.delete(key);
      } else {
        child = make(item);
        child.dataset.key = key;
      }
      if (child === place) {
        place = place.nextElementSibling;
      } else {
        parent.insertBefore(child, place);
      }
      fill(child, item);
    }
    old.forEach((child) => child.remove());
    if (focused && focused !== document.activeElement && focused.isConnected && parent.contains(focused)) {
      focused.focus({ preventScroll: true });
    }
  }

  function field(root, name) {
    return root.querySelector('[data-field="' + name + '"]');
  }

  function fromTemplate(id) {
    return () => document.getElementById(id).content.firstElementChild.cloneNode(true);
  }

  function element(tag, className, content) {
    const node = document.createElement(tag);
    if (className) {
      node.className = className;
    }
    if (content !== undefined) {
      node.textContent = content;
    }
    return node;
  }

  function id(name) {
    return document.getElementById(name);
  }

  window.Mill.dom = { text, attribute, show, rows, field, fromTemplate, element, id };
}());
