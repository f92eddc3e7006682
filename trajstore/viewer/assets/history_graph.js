"use strict";
// Sessions and checkpoints as a graph: a row for each, a lane for the sessions that write together.
(() => {
  const ROW = 34;
  const MAX_LANES = 24; // drawn side by side; more share the last one, without lines

  viewer.historyGraph = ({ nodes, n_lanes: nLanes, n_left_out: nLeftOut }) => {
    if (!nodes.length) return viewer.h("p", { class: "quiet" }, "No sessions and no checkpoints yet.");
    const lanes = Math.min(nLanes, MAX_LANES);
    const shown = [...nodes].reverse(); // newest first
    const place = (i) => nodes.length - 1 - i;
    const size = lanes > 8 ? 12 : 22; // pixels of a lane
    const x = (node) => 14 + size * Math.min(node.lane, lanes - 1);
    const y = (i) => ROW * place(i) + ROW / 2;
    const width = 28 + size * (lanes - 1);
    const drawing = viewer.svg("svg", { class: "graph", width, height: ROW * nodes.length, "aria-hidden": "true" });
    nodes.forEach((node, i) => {
      if (node.parent === null || node.parent === undefined || node.lane >= MAX_LANES) return;
      const [x1, y1, x2, y2] = [x(nodes[node.parent]), y(node.parent), x(node), y(i)];
      const bend = Math.min(ROW, (y1 - y2) / 2);
      const way = x1 === x2 ? `M${x1} ${y1}L${x2} ${y2}` : `M${x1} ${y1}C${x1} ${y1 - bend} ${x2} ${y1} ${x2} ${y1 - bend}L${x2} ${y2}`;
      drawing.append(viewer.svg("path", { d: way, class: `edge lane${node.world % 6}` }));
    });
    nodes.forEach((node, i) => drawing.append(dot(node, x(node), y(i))));
    const rows = shown.map((node) => viewer.h("li", { class: "node" }, describe(node)));
    const list = viewer.h("ol", { class: "nodes", "aria-label": "Sessions and checkpoints, newest first" }, rows);
    const note = nLeftOut ? viewer.h("p", { class: "quiet" }, `${viewer.count(nLeftOut)} older ones are not shown.`) : "";
    return [viewer.h("div", { class: "history" }, drawing, list), note];
  };

  function dot(node, x, y) {
    const lane = `lane${node.world % 6}`;
    if (node.kind === "checkpoint") return viewer.svg("circle", { cx: x, cy: y, r: 5, class: `checkpoint ${lane}` });
    return viewer.svg("circle", { cx: x, cy: y, r: 6, class: `session ${lane}` });
  }

  function describe(node) {
    const time = viewer.h("time", { title: viewer.fullDate(node.time) }, viewer.date(node.time));
    if (node.kind === "checkpoint") {
      const ranks = node.ranks > 1 ? `, ${viewer.count(node.ranks)} ranks` : "";
      return [
        viewer.h("span", { class: "node-name", title: node.id }, node.name),
        viewer.h("span", { class: "node-facts" }, `checkpoint of ${viewer.plural(node.rows, "row")}${ranks}`),
        time,
      ];
    }
    const title = node.kind === "writers" ? "Writers" : "Session";
    const state = node.is_open ? viewer.h("span", { class: "tag open" }, "open") : "";
    const lost = node.abandoned_rows ? viewer.h("span", { class: "tag quiet-tag", title: "Written after the checkpoint from which a later session resumed" }, `${viewer.short(node.abandoned_rows)} abandoned`) : "";
    const from = node.from ? ` from ${viewer.shortId(node.from)}` : "";
    return [
      viewer.h("span", { class: "node-name", title: node.id }, title, state, lost),
      viewer.h("span", { class: "node-facts" }, `${viewer.plural(node.streams, "stream")}, ${viewer.plural(node.rows, "row")}${from}`),
      time,
    ];
  }
})();
