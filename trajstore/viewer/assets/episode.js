"use strict";
// One episode: frames and charts that share a cursor, its values and its metadata.
(() => {
  const POINTS = 900;
  const SETTLED_MS = 150; // after a zoom, until the part is read in full resolution: several often follow each other
  const SPEEDS = ["5", "15", "30", "60"];

  viewer.episodePage = (parameters) => {
    const key = { stream: parameters.stream || "", episode: parameters.episode || "0" };
    const element = viewer.h("div", { class: "episode" }, viewer.h("div", { class: "waiting" }));
    const page = { element, title: `Episode ${key.episode}`, facts: null, parts: null };

    page.update = async () => {
      let facts;
      try {
        facts = await viewer.source.ask("episode", key);
        if (page.isGone) return;
      } catch (error) {
        if (page.isGone) return;
        if (page.parts) page.parts.remove();
        page.parts = null;
        viewer.replace(element, viewer.h("h1", {}, `Episode ${key.episode}`), viewer.problem(error), viewer.h("p", {}, viewer.link("episodes", {}, "Back to the episodes")));
        return;
      }
      const before = page.facts;
      page.facts = facts;
      if (page.parts && before && sameForm(before, facts)) {
        if (before.n_steps !== facts.n_steps || before.columns.length || facts.row.end !== before.row.end) page.parts.grow(facts);
        else page.parts.describe(facts);
        return;
      }
      if (page.parts) page.parts.remove();
      page.parts = new Parts(key, facts);
      viewer.replace(element, page.parts.element);
      page.parts.start(Number(parameters.step) || facts.first_step);
    };
    page.onKey = (event) => page.parts && page.parts.onKey(event);
    page.remove = () => {
      page.isGone = true;
      if (page.parts) page.parts.remove();
    };
    return page;
  };

  const sameForm = (a, b) => a.first_step === b.first_step && a.fields.length === b.fields.length && a.columns.length === b.columns.length;

  class Parts {
    constructor(key, facts) {
      Object.assign(this, { key, facts });
      this.together = new viewer.Together();
      this.together.owner = true;
      this.together.left = 52;
      this.together.snap = (x) => this.clamp(Math.round(x));
      this.together.on((what) => what === "cursor" && this.onCursor());
      this.together.on((what) => what === "range" && this.onRange());
      this.heading = viewer.h("div", { class: "episode-head" });
      this.frames = facts.fields.filter((f) => f.is_frames).map((f) => new viewer.FrameField(key, f));
      this.charts = this.plotted().map((field) => new FieldChart(this, field));
      this.scrubber = viewer.h("input", {
        type: "range",
        class: "scrubber",
        min: facts.first_step,
        max: this.last,
        step: 1,
        "aria-label": "Step",
        oninput: () => this.goTo(Number(this.scrubber.value)),
      });
      this.play = viewer.h("button", { type: "button", class: "play", "aria-label": "Play", onclick: () => this.toggle() }, "▶");
      this.speed = viewer.h("select", { "aria-label": "Steps a second" }, SPEEDS.map((value) => viewer.h("option", { value, selected: value === "15" }, `${value}/s`)));
      this.where = viewer.h("output", { class: "where-now" });
      this.values = viewer.h("tbody");
      this.valueBox = viewer.h("details", { class: "values", ontoggle: () => this.showValues() }, viewer.h("summary", {}, "Values at this step"), viewer.h("table", {}, this.values));
      this.metadata = viewer.h("div", { class: "metadata" });
      this.zoomed = viewer.h("button", { type: "button", class: "plain", hidden: true, onclick: () => this.together.zoom(null) }, "Show all steps");
      this.element = this.build();
      this.describe(facts);
      this.watcher = new IntersectionObserver((entries) => entries.forEach((e) => e.isIntersecting && e.target.chart.load()), { rootMargin: "300px" });
    }

    get last() {
      const n = Math.max(1, ...this.facts.fields.map((f) => f.n));
      return this.facts.first_step + n - 1;
    }

    clamp(step) {
      return Math.max(this.facts.first_step, Math.min(this.last, step));
    }

    plotted() {
      const derived = this.facts.columns.map((c) => ({ ...c, isDerived: true }));
      const size = (field) => field.shape.reduce((a, b) => a * b, 1);
      const order = (field) => (field.is_reward ? 0 : field.isDerived ? 2 : size(field) > 1 ? 3 : 1);
      return [...this.facts.fields.filter((f) => !f.is_frames), ...derived].sort((a, b) => order(a) - order(b));
    }

    build() {
      const controls = viewer.h("div", { class: "controls" }, this.play, this.scrubber, this.where, this.speed);
      const images = viewer.h("div", { class: "images" }, this.frames.map((f) => f.element));
      const left = viewer.h("div", { class: "stage card" }, this.frames.length ? images : "", controls);
      const overlays = this.facts.columns.filter((c) => !c.shape.length);
      const overlay = overlays.length
        ? viewer.h("label", { class: "overlay-choice" }, "Behind the charts ", viewer.h("select", { onchange: (e) => this.setOverlay(e.target.value) }, viewer.h("option", { value: "" }, "nothing"), overlays.map((c) => viewer.h("option", { value: c.path }, c.path))))
        : "";
      const tools = viewer.h("div", { class: "chart-tools" }, viewer.h("h2", {}, "Fields over time"), this.zoomed, overlay);
      const right = viewer.h("div", { class: "charts card" }, tools, this.charts.map((c) => c.element), this.charts.length ? "" : viewer.h("p", { class: "quiet" }, "No field but frames."));
      const side = viewer.h("div", { class: "side" }, left, viewer.h("div", { class: "card about" }, this.valueBox, viewer.h("h2", {}, "About this episode"), this.metadata));
      return viewer.h("div", {}, this.heading, viewer.h("div", { class: this.frames.length ? "split" : "split no-frames" }, side, right));
    }

    describe(facts) {
      const { row } = facts;
      const to = (neighbour, text, label) => (neighbour ? viewer.h("a", { class: "button", href: viewer.address("episode", { stream: neighbour[0], episode: neighbour[1] }), "aria-label": label, title: label }, text) : viewer.h("span", { class: "button off", "aria-hidden": "true" }, text));
      viewer.replace(
        this.heading,
        viewer.h("div", { class: "crumbs" }, viewer.link("episodes", {}, "Episodes"), viewer.h("span", { "aria-hidden": "true" }, " / "), viewer.h("span", { title: row.stream }, viewer.shortId(row.stream))),
        viewer.h("div", { class: "title-line" }, viewer.h("h1", {}, `Episode ${row.episode}`), viewer.h("span", { class: "end big" }, viewer.h("span", { class: `dot ${viewer.endColour(row.end)}` }), row.end), viewer.h("span", { class: "spacer" }), viewer.h("span", { class: "steps" }, to(facts.previous, "←", "Previous episode (p)"), viewer.h("small", { class: "quiet" }, `${viewer.count(facts.position + 1)} of ${viewer.count(facts.n_episodes)}`), to(facts.next, "→", "Next episode (n)"))),
        viewer.h("dl", { class: "facts" }, fact("Return", viewer.number(row.return)), fact("Steps", viewer.count(row.length)), fact("Environment", viewer.count(row.env)), fact("Last written", viewer.fullDate(row.time)), facts.first_step ? fact("First step still stored", viewer.count(facts.first_step)) : ""),
      );
      const known = new Set(["stream", "episode", "env", "length", "end", "return", "has_final", "is_headless", "time", "metadata"]);
      const about = { stream: row.stream, spans: facts.n_spans, "final observation": row.has_final };
      for (const [name, value] of Object.entries(row)) if (!known.has(name)) about[name] = value;
      const damage = Object.entries(facts.damaged || {}).map(([name, said]) => viewer.problem(new viewer.Problem("damaged", `${name}: ${said}`)));
      viewer.replace(this.metadata, damage, viewer.tree({ ...about, ...(facts.metadata_note ? { metadata: facts.metadata_note } : row.metadata) }));
    }

    start(step) {
      for (const chart of this.charts) {
        chart.element.chart = chart;
        this.watcher.observe(chart.element);
      }
      this.goTo(step);
    }

    goTo(step) {
      this.together.pinned = this.clamp(step);
      this.together.point(this.clamp(step), "page");
    }

    onCursor() {
      const step = this.together.cursor;
      if (step === null) return;
      const { first_step: first } = this.facts;
      this.scrubber.value = step;
      this.scrubber.setAttribute("aria-valuetext", `step ${step} of ${this.last}`);
      this.where.textContent = `${viewer.count(step)} / ${viewer.count(this.last)}`;
      for (const field of this.frames) field.show(step - first);
      clearTimeout(this.valueTimer);
      this.valueTimer = setTimeout(() => this.showValues(), 90);
    }

    onRange() {
      this.zoomed.hidden = !this.together.range;
      this.redraw(); // what is known, at once
      clearTimeout(this.zoomTimer);
      this.zoomTimer = setTimeout(() => this.charts.forEach((chart) => chart.reload()), SETTLED_MS);
    }

    async showValues() {
      if (!this.valueBox.open || this.together.cursor === null) return;
      const step = this.together.cursor;
      try {
        const found = await viewer.source.ask("values", { ...this.key, step: step - this.facts.first_step });
        if (step !== this.together.cursor) return;
        viewer.replace(this.values, Object.entries(found).map(([path, numbers]) => viewer.h("tr", {}, viewer.h("th", { scope: "row" }, path), viewer.h("td", {}, numbers.map(viewer.number).join("  ")))));
      } catch (error) {
        viewer.replace(this.values, viewer.h("tr", {}, viewer.h("td", {}, viewer.problem(error))));
      }
    }

    async setOverlay(path) {
      this.overlaid = this.charts.find((c) => c.field.isDerived && c.field.path === path) || null;
      if (this.overlaid) await this.overlaid.load();
      this.redraw();
    }

    // The chosen column, as it was read last: again after a zoom, and when steps were added.
    get overlay() {
      const { answer, xs } = this.overlaid || {};
      if (!answer || answer.kind !== "lines") return null;
      return { xs, y: answer.lines[0].high || answer.lines[0].low };
    }

    redraw() {
      for (const chart of this.charts) chart.show();
    }

    grow(facts) {
      const follows = this.together.pinned === this.last;
      this.facts = facts;
      this.describe(facts);
      this.scrubber.max = this.last;
      facts.fields.filter((f) => f.is_frames).forEach((f, i) => (this.frames[i].field = f));
      const now = this.plotted();
      this.charts.forEach((chart, i) => {
        chart.field = now[i];
        chart.reload();
      });
      if (follows) this.goTo(this.last);
      else this.onCursor();
    }

    toggle() {
      if (this.timer) return this.stop();
      if (this.together.pinned >= this.last) this.goTo(this.facts.first_step);
      this.play.textContent = "❚❚";
      this.play.setAttribute("aria-label", "Pause");
      let due = performance.now();
      const next = (now) => {
        const wait = 1000 / Number(this.speed.value);
        const n = Math.floor((now - due) / wait);
        if (n > 0) {
          due += n * wait;
          this.goTo(this.together.pinned + Math.min(n, 8));
        }
        if (this.together.pinned >= this.last) this.stop();
        else this.timer = requestAnimationFrame(next);
      };
      this.timer = requestAnimationFrame(next);
      return undefined;
    }

    stop() {
      cancelAnimationFrame(this.timer);
      this.timer = null;
      this.play.textContent = "▶";
      this.play.setAttribute("aria-label", "Play");
    }

    onKey(event) {
      const { first_step: first } = this.facts;
      const size = event.shiftKey ? 10 : 1;
      const now = this.together.pinned ?? first;
      const steps = { ArrowLeft: now - size, ArrowRight: now + size, Home: first, End: this.last, PageUp: now - 100, PageDown: now + 100 };
      if (event.key in steps) {
        this.stop();
        this.goTo(steps[event.key]);
      } else if (event.key === " ") this.toggle();
      else if (event.key === "Escape" && this.together.range) this.together.zoom(null);
      else if (event.key === "+" || event.key === "-") this.zoomBy(event.key === "+" ? 0.5 : 2);
      else if ((event.key === "n" && this.facts.next) || (event.key === "p" && this.facts.previous)) {
        const [stream, episode] = event.key === "n" ? this.facts.next : this.facts.previous;
        viewer.go("episode", { stream, episode });
      } else return false;
      return true;
    }

    zoomBy(factor) {
      const [low, high] = this.together.range || [this.facts.first_step, this.last];
      const middle = this.together.pinned ?? (low + high) / 2;
      const from = Math.max(this.facts.first_step, middle - (middle - low) * factor);
      const to = Math.min(this.last, middle + (high - middle) * factor);
      this.together.zoom(from <= this.facts.first_step && to >= this.last ? null : to - from >= 2 ? [from, to] : this.together.range);
    }

    remove() {
      this.stop();
      clearTimeout(this.zoomTimer);
      this.watcher.disconnect();
      for (const field of this.frames) field.remove();
    }
  }

  const fact = (name, value) => viewer.h("div", {}, viewer.h("dt", {}, name), viewer.h("dd", {}, value));

  // The chart of one field. Loads when it is near the screen, again when the range changes or steps were added.
  class FieldChart {
    constructor(parts, field) {
      Object.assign(this, { parts, field });
      this.note = viewer.h("span", { class: "chart-note" });
      this.box = viewer.h("div", { class: "chart-box" });
      this.element = viewer.h("div", { class: "field-chart" }, this.box, this.note);
      this.loading = null;
      this.answer = null;
    }

    reload() {
      this.loading = null;
      const near = this.element.getBoundingClientRect();
      if (this.answer || this === this.parts.overlaid || near.top < innerHeight + 300) this.load();
    }

    load() {
      this.loading ||= this.fetch();
      return this.loading;
    }

    async fetch() {
      const { key, facts, together } = this.parts;
      const asked = { ...key, path: this.field.path, points: POINTS };
      const range = together.range;
      if (range) {
        asked.start = Math.max(0, Math.floor(range[0] - facts.first_step));
        asked.stop = Math.max(asked.start, Math.ceil(range[1] - facts.first_step) + 1);
      }
      try {
        const answer = await viewer.source.ask(this.field.isDerived ? "column" : "series", asked);
        if (range !== together.range) return;
        this.answer = answer;
        this.show();
        if (this === this.parts.overlaid) this.parts.redraw();
      } catch (error) {
        this.answer = null;
        this.chart = null;
        viewer.replace(this.box, viewer.h("div", { class: "chart-name" }, this.field.path), viewer.problem(error));
      }
    }

    show() {
      const { answer, field, parts } = this;
      if (!answer) return;
      const isMap = answer.kind === "map";
      if (!this.chart) {
        const options = { title: field.path, detail: field.isDerived ? `${viewer.shape(field)}, derived` : viewer.shape(field), together: parts.together, xKind: "count", zooms: true, height: isMap ? 130 : 112 };
        this.chart = new (isMap ? viewer.ColourMap : viewer.LineChart)(options);
        viewer.replace(this.box, this.chart.element);
      }
      const first = parts.facts.first_step;
      const whole = [first, Math.max(first + 1, parts.last)];
      const xRange = parts.together.range || whole;
      if (isMap) this.chart.set({ ...answer, start: answer.start + first, together: answer.together }, xRange);
      else this.showLines(answer, first, xRange);
      this.note.textContent = notes(answer);
    }

    showLines(answer, first, xRange) {
      const { field } = this;
      const n = answer.lines[0].low.length;
      this.xs = Array.from({ length: n }, (_, i) => first + answer.start + i * answer.width);
      const isStepped = /^(bool|u?int)/.test(field.dtype);
      const lines = answer.lines.map((l, i) => ({ name: l.name, colour: `line${i % 6}`, isDashed: i >= 6, ...(l.high ? { low: l.low, high: l.high } : { y: l.low }) }));
      const isWhole = /^(u?int)/.test(field.dtype);
      const overlay = this === this.parts.overlaid ? null : this.parts.overlay;
      this.chart.set(this.xs, lines, { xRange, isStepped, isWhole, overlay });
    }
  }

  function notes(answer) {
    const found = [];
    if (answer.width > 1) found.push(`least and greatest of ${viewer.count(answer.width)} steps each`);
    if (answer.is_sampled) found.push("only the first steps of each part were read");
    if (answer.n_not_finite) found.push(`${viewer.plural(answer.n_not_finite, "value")} not finite`);
    return found.join("; ");
  }

  // Nested values as a list that folds.
  viewer.tree = (value, depth = 0) => {
    if (value === null || typeof value !== "object") return viewer.h("span", { class: "value" }, long(typeof value === "number" ? viewer.number(value) : String(value)));
    const entries = Object.entries(value);
    if (!entries.length) return viewer.h("span", { class: "quiet" }, Array.isArray(value) ? "[]" : "{}");
    if (Array.isArray(value) && value.every((v) => typeof v === "number")) return viewer.h("span", { class: "value" }, long(value.map(viewer.number).join(", ")));
    const items = entries.slice(0, 200).map(([name, inner]) => {
      const isNested = inner !== null && typeof inner === "object" && Object.keys(inner).length && depth < 12;
      if (isNested) return viewer.h("li", {}, viewer.h("details", { open: depth < 1 }, viewer.h("summary", {}, name), viewer.tree(inner, depth + 1)));
      return viewer.h("li", {}, viewer.h("span", { class: "name" }, name), depth < 12 ? viewer.tree(inner, depth + 1) : "…");
    });
    if (entries.length > 200) items.push(viewer.h("li", { class: "quiet" }, `and ${viewer.count(entries.length - 200)} more`));
    return viewer.h("ul", { class: "tree" }, items);
  };

  const long = (text) => (text.length > 2000 ? `${text.slice(0, 2000)}… (${viewer.count(text.length)} characters)` : text);
})();
