"use strict";
// The first page: what the store is, how the episodes went, where the bytes are.
(() => {
  const ENDS = { terminated: "end-terminated", truncated: "end-truncated", cut: "end-cut", aborted: "end-aborted", open: "end-open" };
  viewer.endColour = (end) => ENDS[end] || "end-cut";

  const tile = (name, value, detail) =>
    viewer.h("div", { class: "tile" }, viewer.h("dt", {}, name), viewer.h("dd", {}, value, detail ? viewer.h("small", {}, detail) : ""));

  viewer.overviewPage = () => {
    const tiles = viewer.h("dl", { class: "tiles", "aria-label": "The store in numbers" });
    const panels = [progress(), histogram("return", "Returns"), histogram("length", "Lengths"), ends(), fields(), history(), streams(), schema()];
    const facts = { update: () => loadFacts(tiles) };
    const element = viewer.h("div", { class: "overview" }, viewer.h("h1", { class: "sr" }, "Overview"), tiles, viewer.h("div", { class: "panels" }, panels.map((p) => p.element)));
    return { element, title: "Overview", update: () => Promise.all([facts, ...panels].map((p) => p.update())) };
  };

  async function loadFacts(tiles) {
    let facts;
    try {
      facts = await viewer.source.ask("facts");
    } catch (error) {
      viewer.replace(tiles, viewer.problem(error));
      return;
    }
    const mean = facts.n_episodes ? facts.n_steps / facts.n_episodes : null;
    viewer.replace(
      tiles,
      tile("Episodes", viewer.short(facts.n_episodes), facts.n_episodes >= 1e4 ? viewer.count(facts.n_episodes) : ""),
      tile("Steps", viewer.short(facts.n_steps), mean === null ? "" : `${viewer.number(Number(mean.toPrecision(3)))} an episode`),
      tile("Streams", viewer.short(facts.n_streams), facts.n_open_streams ? `${viewer.count(facts.n_open_streams)} open` : facts.n_streams ? "all sealed" : ""),
      tile("Fields", viewer.count(facts.fields.length), facts.columns.length ? `and ${viewer.plural(facts.columns.length, "derived column")}` : ""),
      tile("Last commit", viewer.ago(facts.committed_at), facts.committed_at ? viewer.date(facts.committed_at) : ""),
      tile("Created", viewer.day(facts.created_at), `${viewer.clock(facts.created_at)}, format ${facts.format}`),
    );
  }

  const AXES = { episodes: ["Episodes", "count"], steps: ["Steps", "count"], times: ["Time", "time"] };

  // Returns and lengths share the answer, the axis and the cursor with the ends.
  const shared = { axis: "episodes", together: null, answer: null, loading: null };

  function plots() {
    shared.loading ||= viewer.source.ask("plots").finally(() => (shared.loading = null));
    return shared.loading;
  }

  function progress() {
    shared.together = new viewer.Together();
    shared.together.left = 44; // so that charts that share the cursor share their edges
    const charts = {};
    for (const [name, title] of [["return", "Return"], ["length", "Length"]]) {
      charts[name] = new viewer.LineChart({ title, together: shared.together, height: 150 });
    }
    const choice = viewer.choice("Axis", Object.entries(AXES).map(([value, [label]]) => [value, label]), shared.axis, (axis) => {
      shared.axis = axis;
      shared.together.pinned = null;
      shared.together.point(null, "axis");
      redraw();
    });
    const redraw = () => {
      const { answer, axis } = shared;
      if (!answer) return;
      for (const [name, chart] of Object.entries(charts)) {
        chart.xKind = AXES[axis][1];
        chart.xReadout = axis === "times" ? viewer.fullDate : (x) => `${AXES[axis][0].toLowerCase()} ${viewer.count(x)}`;
        const { mean, low, high } = answer[name];
        const n = Math.round(answer.n_episodes / Math.max(1, mean.length));
        chart.detail.textContent = n > 1 ? `mean and range of ${viewer.count(n)} episodes each` : "";
        chart.set(answer[axis], [{ name: "", colour: name === "return" ? "line0" : "line1", y: mean, low, high }]);
      }
      if (shared.redrawEnds) shared.redrawEnds();
    };
    return viewer.panel(
      "Progress",
      async (panel) => {
        shared.answer = await plots();
        if (!shared.answer.n_episodes) return viewer.replace(panel.body, viewer.h("p", { class: "quiet" }, "No episodes yet."));
        if (!charts.return.element.isConnected) viewer.replace(panel.body, Object.values(charts).map((c) => c.element));
        return redraw();
      },
      { wide: true, note: choice },
    );
  }

  function ends() {
    const chart = new viewer.Shares({ title: "Over time", together: shared.together, height: 96 });
    const legend = viewer.h("ul", { class: "legend" });
    shared.redrawEnds = () => {
      const { answer, axis } = shared;
      // Shares of few episodes jump between nothing and all, so these buckets are wider than those of the lines.
      const together = Math.max(1, Math.ceil(answer.episodes.length / 60), Math.ceil((5 * answer.episodes.length) / answer.n_episodes));
      const shares = Object.entries(answer.ends).map(([name, counts]) => ({ name, counts: grouped(counts, together, (part) => part.reduce((a, b) => a + b, 0)), colour: viewer.endColour(name) }));
      chart.xKind = AXES[axis][1];
      chart.set(grouped(answer[axis], together, (part) => part[part.length - 1]), shares);
    };
    return viewer.panel("How episodes ended", async (panel) => {
      const answer = await plots();
      shared.answer = answer;
      if (!answer.n_episodes) return viewer.replace(panel.body, viewer.h("p", { class: "quiet" }, "No episodes yet."));
      const totals = Object.entries(answer.ends).map(([name, counts]) => [name, counts.reduce((a, b) => a + b, 0)]);
      const rows = totals.map(([name, n]) =>
        viewer.h("li", {}, viewer.h("span", { class: `dot ${viewer.endColour(name)}` }), viewer.link("episodes", viewer.exported ? { filter: name } : { filter: `end == ${name}` }, name), viewer.h("b", {}, viewer.count(n)), viewer.h("small", {}, share(n, answer.n_episodes))),
      );
      viewer.replace(legend, rows);
      if (!legend.isConnected) viewer.replace(panel.body, legend, chart.element);
      return shared.redrawEnds();
    });
  }

  const grouped = (values, n, reduce) => Array.from({ length: Math.ceil(values.length / n) }, (_, i) => reduce(values.slice(i * n, (i + 1) * n)));

  const share = (n, total) => (n === total ? "all" : n / total < 0.001 ? "< 0.1 %" : `${((100 * n) / total).toFixed(n / total < 0.1 ? 1 : 0)} %`);

  function histogram(name, title) {
    const chart = new viewer.Histogram({ title: "", label: title, height: 150 });
    return viewer.panel(title, async (panel) => {
      const { histograms } = await plots();
      if (!histograms[name]) return viewer.replace(panel.body, viewer.h("p", { class: "quiet" }, "No values yet."));
      if (!chart.element.isConnected) {
        viewer.replace(panel.body, chart.element);
        viewer.replace(panel.extra, chart.readout);
      }
      return chart.set(histograms[name]);
    });
  }

  const MEASURED_MS = 60_000; // listing all objects of a remote store takes requests, so not after every commit

  function fields() {
    let measured = -Infinity;
    return viewer.panel("Storage by field", async (panel) => {
      if (performance.now() - measured < MEASURED_MS) return undefined;
      const answer = await viewer.source.ask("storage");
      measured = answer.n_streams ? performance.now() : -Infinity;
      if (!answer.n_streams) return viewer.replace(panel.body, viewer.h("p", { class: "quiet" }, "Nothing is stored yet."));
      const total = answer.fields.reduce((sum, f) => sum + f.stored_bytes, answer.other_bytes);
      const most = Math.max(1, ...answer.fields.map((f) => f.stored_bytes));
      const rows = [...answer.fields]
        .sort((a, b) => b.stored_bytes - a.stored_bytes)
        .map((f) => {
          const bar = viewer.h("span", { class: "bar-fill" });
          bar.style.width = `${(100 * f.stored_bytes) / most}%`;
          const ratio = f.stored_bytes && f.decoded_bytes ? f.decoded_bytes / f.stored_bytes : null;
          const saved = ratio === null ? "" : ratio >= 1.05 ? `${viewer.number(Number(ratio.toPrecision(2)))}x smaller` : "not smaller";
          return viewer.h("li", {}, viewer.h("span", { class: "field-name" }, f.field), viewer.h("span", { class: "bar-track" }, bar), viewer.h("b", {}, viewer.bytes(f.stored_bytes)), viewer.h("small", {}, saved));
        });
      const part = answer.n_measured < answer.n_streams ? ` of the newest ${viewer.count(answer.n_measured)} of ${viewer.count(answer.n_streams)} streams` : "";
      viewer.replace(panel.extra, viewer.h("span", { class: "quiet" }, `${viewer.bytes(total)}${part}`));
      const other = answer.other_bytes ? viewer.h("p", { class: "quiet" }, `${viewer.bytes(answer.other_bytes)} are records, spans and derived columns.`) : "";
      return viewer.replace(panel.body, viewer.h("ul", { class: "sizes" }, rows), other);
    });
  }

  function history() {
    return viewer.panel("Sessions and checkpoints", async (panel) => {
      viewer.replace(panel.body, viewer.h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Sessions and checkpoints" }, viewer.historyGraph(await viewer.source.ask("history"))));
    }, { wide: true });
  }

  function streams() {
    return viewer.panel("Streams", async (panel) => {
      const { streams: found, n_streams: n } = await viewer.source.ask("streams");
      if (!found.length) return viewer.replace(panel.body, viewer.h("p", { class: "quiet" }, "No streams yet."));
      viewer.replace(panel.extra, viewer.h("span", { class: "quiet" }, found.length < n ? `the newest ${viewer.count(found.length)} of ${viewer.count(n)}` : viewer.count(n)));
      const has = (name) => found.some((s) => s[name]);
      const columns = [
        ["Stream", (s) => viewer.h("span", { title: s.id }, viewer.shortId(s.id))],
        ["State", (s) => viewer.h("span", { class: `tag ${s.state}` }, s.state)],
        ["Rows", (s) => viewer.count(s.rows), true],
        ["Commits", (s) => viewer.count(s.commits), true],
        has("evicted_rows") && ["Evicted", (s) => (s.evicted_rows ? viewer.count(s.evicted_rows) : ""), true],
        has("abandoned_rows") && ["Abandoned", (s) => (s.abandoned_rows ? viewer.count(s.abandoned_rows) : ""), true],
        found.some((s) => s.rank !== null) && ["Rank", (s) => (s.rank === null ? "" : s.world_size ? `${s.rank}/${s.world_size}` : s.rank), true],
        ["Last commit", (s) => viewer.h("span", { title: viewer.fullDate(s.committed_at) }, viewer.ago(s.committed_at)), true],
      ];
      return viewer.replace(panel.body, viewer.table("Streams", columns.filter(Boolean), found));
    }, { wide: true });
  }

  function schema() {
    return viewer.panel("Schema", async (panel) => {
      const facts = await viewer.source.ask("facts");
      if (!facts.fields.length) return viewer.replace(panel.body, viewer.h("p", { class: "quiet" }, "No fields are declared, and nothing is committed yet."));
      const columns = [
        ["Field", (f) => f.field],
        ["Values", (f) => viewer.shape(f)],
        ["Final", (f) => (f.final ? "yes" : "")],
        ["Chunk rows", (f) => f.chunk_rows.map(viewer.count).join(", "), true],
        ["Codec", (f) => f.codecs.join(", ")],
      ];
      const more = [];
      const declared = Object.entries(facts.episode_columns);
      if (declared.length) more.push(viewer.h("p", { class: "below" }, "Episode columns: ", declared.map(([name, kind]) => `${name} (${kind})`).join(", ")));
      for (const c of facts.columns) more.push(viewer.h("p", { class: "below" }, "Derived column ", viewer.h("b", {}, c.name), `: ${viewer.shape(c)}, ${viewer.plural(c.rows, "row")}`));
      return viewer.replace(panel.body, viewer.table("Schema", columns, facts.fields), more);
    }, { wide: true });
  }

  // A table of plain rows: each column has a heading, a function from a row to a cell, and whether it is a number.
  viewer.table = (label, columns, rows) =>
    viewer.h(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
      viewer.h(
        "table",
        {},
        viewer.h("thead", {}, viewer.h("tr", {}, columns.map(([name, , isNumber]) => viewer.h("th", { scope: "col", class: isNumber ? "number" : "" }, name)))),
        viewer.h("tbody", {}, rows.map((row) => viewer.h("tr", {}, columns.map(([, cell, isNumber]) => viewer.h("td", { class: isNumber ? "number" : "" }, cell(row)))))),
      ),
    );

  viewer.choice = (label, options, chosen, onChoice) => {
    const buttons = options.map(([value, text]) =>
      viewer.h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => choose(value) }, text),
    );
    const choose = (value) => {
      buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(options[i][0] === value)));
      onChoice(value);
    };
    return viewer.h("div", { class: "choice", role: "group", "aria-label": label }, buttons);
  };
})();
