"use strict";
// Building blocks. Text of a store only ever becomes a text node or the value of a harmless attribute.
const viewer = {};

(() => {
  const SVG = "http://www.w3.org/2000/svg";

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else element.setAttribute(name, value === true ? "" : String(value));
    }
    append(element, children);
    return element;
  }

  function append(element, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : document.createTextNode(String(child)));
    }
    return element;
  }

  viewer.h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  viewer.svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
  viewer.replace = (element, ...children) => {
    element.replaceChildren();
    return append(element, children);
  };

  viewer.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  viewer.link = (path, parameters, ...children) =>
    viewer.h("a", { href: viewer.address(path, parameters) }, ...children);

  viewer.address = (path, parameters = {}) => {
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value != null));
    const text = query.toString();
    return `#/${path}${text ? `?${text}` : ""}`;
  };

  const WORDS = {
    damaged: "Damaged",
    expired: "No longer stored",
    missing: "Not here",
    storage: "The storage does not answer",
    question: "Not understood",
    refused: "Refused",
    gone: "The viewer has stopped",
    left_out: "Not in this file",
  };

  viewer.problem = (error) =>
    viewer.h(
      "div",
      { class: `problem ${error.kind || ""}`, role: "alert" },
      viewer.h("strong", {}, WORDS[error.kind] || "Error"),
      viewer.h("span", {}, error.message),
    );

  // A box with a heading whose content arrives later, and is replaced when the store has changed.
  viewer.panel = (title, load, { id, note, wide } = {}) => {
    const body = viewer.h("div", { class: "panel-body", "aria-busy": "true" }, viewer.h("div", { class: "waiting" }));
    const heading = viewer.h("h2", {}, title);
    const extra = viewer.h("div", { class: "panel-extra" }, note || "");
    const element = viewer.h(
      "section",
      { class: `panel${wide ? " wide" : ""}`, id, "aria-label": title },
      viewer.h("div", { class: "panel-head" }, heading, extra),
      body,
    );
    const panel = { element, body, extra };
    panel.update = async () => {
      try {
        await load(panel);
      } catch (error) {
        if (!error.kind) console.error(error);
        viewer.replace(body, viewer.problem(error));
      }
      body.removeAttribute("aria-busy");
    };
    return panel;
  };
})();
