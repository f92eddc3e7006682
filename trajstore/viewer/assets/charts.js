"use strict";
// Charts on a canvas: lines with ranges, bars, stacked shares, maps of colours. All share one frame and one cursor.
(() => {
  const FONT = "11px system-ui, sans-serif";
  const MAX_BAR = 56; // pixels of width
  const MAX_LEFT = 110; // pixels for the labels of the y axis
  const charts = new Set();

  // What the charts of a page have in common: the cursor, and the part of the x axis that is shown.
  viewer.Together = class {
    constructor() {
      this.cursor = null;
      this.range = null;
      this.listeners = new Set();
    }
    on(listener) {
      this.listeners.add(listener);
    }
    point(x, origin) {
      if (x === this.cursor) return;
      this.cursor = x;
      for (const listener of this.listeners) listener("cursor", origin);
    }
    // Makes room for labels, in all charts, so that their cursors stay one below the other.
    widen(left) {
      this.left = left;
      for (const listener of this.listeners) listener("left", null);
    }
    zoom(range) {
      this.range = range;
      for (const listener of this.listeners) listener("range", null);
    }
  };

  class Chart {
    constructor({ title, label, detail, together, xKind, height, zooms }) {
      this.label = label || title;
      this.together = together || new viewer.Together();
      this.xKind = xKind || "number";
      this.zooms = Boolean(zooms);
      this.height = height || 150;
      this.canvas = viewer.h("canvas", { tabindex: "0", role: "img" });
      this.readout = viewer.h("span", { class: "readout" });
      this.name = viewer.h("span", { class: "chart-name" }, title);
      this.detail = viewer.h("span", { class: "chart-detail" }, detail || "");
      const caption = viewer.h("figcaption", {}, this.name, this.detail, this.readout);
      this.element = viewer.h("figure", { class: "chart" }, caption, this.canvas);
      this.together.on((what) => what !== "range" && this.canvas.isConnected && this.draw());
      this.listen();
      charts.add(this);
      new ResizeObserver(() => this.draw()).observe(this.canvas);
    }

    listen() {
      const { canvas } = this;
      let from = null;
      const at = (event) => event.clientX - canvas.getBoundingClientRect().left;
      canvas.addEventListener("pointermove", (event) => {
        if (!this.x) return;
        if (event.pointerType === "touch" && from === null) return;
        this.selection = from !== null && Math.abs(at(event) - from) > 5 ? [from, at(event)] : null;
        this.together.point(this.nearest(this.x.invert(at(event))), "pointer");
        if (this.selection) this.draw();
      });
      canvas.addEventListener("pointerdown", (event) => {
        if (!this.x || event.button) return;
        from = at(event);
        this.together.point(this.nearest(this.x.invert(from)), "pointer");
        this.together.pinned = this.together.cursor;
        canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointerup", () => {
        const chosen = this.selection;
        from = this.selection = null;
        if (chosen && this.zooms) this.together.zoom(chosen.map((pixel) => this.x.invert(pixel)).sort((a, b) => a - b));
        else if (chosen) this.draw();
      });
      canvas.addEventListener("pointerleave", () => {
        if (from === null) this.together.point(this.together.pinned ?? null, "pointer");
      });
      canvas.addEventListener("dblclick", () => this.zooms && this.together.zoom(null));
      canvas.addEventListener("keydown", (event) => this.onKey(event));
    }

    onKey(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const positions = this.positions();
      if (!step || this.together.owner || !positions.length) return;
      const now = this.together.cursor === null ? (step > 0 ? -1 : positions.length) : this.indexOf(this.together.cursor);
      const next = Math.max(0, Math.min(positions.length - 1, now + step * (event.shiftKey ? 10 : 1)));
      this.together.pinned = positions[next];
      this.together.point(positions[next], "key");
      event.preventDefault();
    }

    positions() {
      return [];
    }

    indexOf(x) {
      const positions = this.positions();
      let low = 0;
      let high = positions.length - 1;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (positions[middle] < x) low = middle + 1;
        else high = middle;
      }
      return low > 0 && x - positions[low - 1] < positions[low] - x ? low - 1 : low;
    }

    nearest(x) {
      return this.together.snap ? this.together.snap(x) : x;
    }

    describe(text) {
      this.canvas.setAttribute("aria-label", text);
    }

    // Sets up the canvas, the frame and the axes; returns null while it has no size.
    begin(xRange, yRange, yTicks) {
      const width = this.canvas.clientWidth;
      if (!width) return null;
      const ratio = window.devicePixelRatio || 1;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(this.height * ratio);
      this.canvas.style.height = `${this.height}px`;
      const context = this.canvas.getContext("2d");
      context.scale(ratio, ratio);
      context.font = FONT;
      const labels = yTicks ? viewer.tickLabels(yTicks) : [];
      const needed = Math.min(MAX_LEFT, Math.max(34, ...labels.map((l) => Math.ceil(context.measureText(l).width) + 12)));
      if (this.together.left < needed) queueMicrotask(() => this.together.left < needed && this.together.widen(needed));
      const left = this.together.left || needed;
      const area = { left, right: width - 8, top: 6, bottom: this.height - 20 };
      this.area = area;
      this.x = viewer.scale(xRange[0], xRange[1], area.left, area.right);
      this.y = viewer.scale(yRange[0], yRange[1], area.bottom, area.top);
      this.axes(context, xRange, yTicks || [], labels);
      return context;
    }

    axes(context, xRange, yTicks, labels) {
      const { area } = this;
      context.lineWidth = 1;
      context.textBaseline = "middle";
      context.textAlign = "right";
      yTicks.forEach((tick, i) => {
        const y = Math.round(this.y(tick)) + 0.5;
        if (y < area.top - 1 || y > area.bottom + 1) return;
        context.strokeStyle = viewer.colour("grid");
        line(context, area.left, y, area.right, y);
        context.fillStyle = viewer.colour("muted");
        context.fillText(labels[i], area.left - 7, y, area.left - 9);
      });
      context.textBaseline = "top";
      context.textAlign = "center";
      context.fillStyle = viewer.colour("muted");
      const n = Math.max(2, Math.floor((area.right - area.left) / 90));
      const isTime = this.xKind === "time";
      const ticks = isTime ? viewer.timeTicks(...xRange, n) : viewer.ticks(...xRange, n, { isWhole: this.xKind === "count" });
      const texts = isTime ? ticks.map(viewer.timeTick(xRange[1] - xRange[0])) : viewer.tickLabels(ticks);
      ticks.forEach((tick, i) => {
        const x = this.x(tick);
        const half = context.measureText(texts[i]).width / 2;
        if (x >= area.left - 1 && x <= area.right + 1) {
          context.fillText(texts[i], Math.min(Math.max(x, half), this.canvas.clientWidth - half), area.bottom + 6);
        }
      });
    }

    finish(context) {
      const { area, together } = this;
      if (this.selection && this.zooms) {
        context.fillStyle = viewer.colour("selection");
        context.fillRect(this.selection[0], area.top, this.selection[1] - this.selection[0], area.bottom - area.top);
      }
      if (together.cursor === null) return;
      const x = Math.round(this.x(together.cursor)) + 0.5;
      if (x < area.left - 1 || x > area.right + 1) return;
      context.strokeStyle = viewer.colour("cursor");
      line(context, x, area.top, x, area.bottom);
    }

    remove() {
      charts.delete(this);
    }
  }

  function line(context, x1, y1, x2, y2) {
    context.beginPath();
    context.moveTo(x1, y1);
    context.lineTo(x2, y2);
    context.stroke();
  }

  const rangeOf = (lists) => {
    let [low, high] = [Infinity, -Infinity];
    for (const list of lists) {
      for (const value of list) {
        if (value === null) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    return [low, high];
  };

  // Lines over x. Each has `y`, or `low` and `high` for a range, and `y` as well for the mean of a range.
  viewer.LineChart = class extends Chart {
    set(xs, lines, { xRange, isStepped, isWhole, overlay } = {}) {
      Object.assign(this, { xs, lines, xRange, isStepped, isWhole, overlay });
      this.element.classList.toggle("many", lines.length > 4);
      const [low, high] = rangeOf(lines.flatMap((l) => [l.y, l.low, l.high].filter(Boolean)));
      const what = low <= high ? `from ${viewer.number(low)} to ${viewer.number(high)}` : "no finite values";
      this.describe(`${this.label}: ${xs.length} points, ${what}. Arrow keys move the cursor.`);
      this.yRange = low <= high ? viewer.padded(low, high) : [0, 1];
      this.draw();
    }

    positions() {
      return this.xs || [];
    }

    draw() {
      if (!this.xs) return;
      const xRange = this.xRange || [this.xs[0] ?? 0, this.xs[this.xs.length - 1] ?? 1];
      const yTicks = viewer.ticks(...this.yRange, Math.max(2, Math.floor(this.height / 34)), { isWhole: this.isWhole });
      const context = this.begin(xRange, this.yRange, yTicks);
      if (!context) return;
      context.save();
      context.beginPath();
      context.rect(this.area.left, 0, this.area.right - this.area.left, this.height);
      context.clip();
      if (this.overlay) this.drawOverlay(context);
      this.lines.forEach((l) => this.drawLine(context, l));
      context.restore();
      this.finish(context);
      this.read(context);
    }

    drawOverlay(context) {
      const { xs, y } = this.overlay;
      const [, high] = rangeOf([y]);
      const scale = viewer.scale(0, high > 0 ? high : 1, this.area.bottom, this.area.top + 4);
      context.fillStyle = viewer.colour("overlay");
      for (const run of runs(y)) {
        context.beginPath();
        context.moveTo(this.x(xs[run[0]]), this.area.bottom);
        for (const i of run) context.lineTo(this.x(xs[i]), scale(Math.max(0, y[i])));
        context.lineTo(this.x(xs[run[run.length - 1]]), this.area.bottom);
        context.fill();
      }
    }

    drawLine(context, l) {
      const colour = viewer.colour(l.colour);
      const points = (values, indices) => indices.map((i) => [this.x(this.xs[i]), this.y(values[i])]);
      context.strokeStyle = context.fillStyle = colour;
      context.lineJoin = "round";
      if (l.high) {
        context.globalAlpha = l.y ? 0.16 : 0.32;
        for (const run of runs(l.low)) {
          path(context, [...points(l.high, run), ...points(l.low, run).reverse()]);
          context.fill();
          if (!l.y) {
            context.globalAlpha = 0.9;
            for (const edge of [l.high, l.low]) {
              path(context, points(edge, run));
              context.stroke();
            }
            context.globalAlpha = 0.32;
          }
        }
        context.globalAlpha = 1;
      }
      const values = l.y || (l.high ? null : l.low);
      if (!values) return;
      context.lineWidth = 1.5;
      context.setLineDash(l.isDashed ? [5, 3] : []);
      for (const run of runs(values)) {
        const found = points(values, run);
        if (found.length === 1) {
          context.beginPath();
          context.arc(...found[0], 2, 0, 7);
          context.fill();
        }
        path(context, this.isStepped ? stepped(found) : found);
        context.stroke();
      }
      context.lineWidth = 1;
      context.setLineDash([]);
    }

    read(context) {
      const { cursor } = this.together;
      if (cursor === null || !this.xs.length) {
        viewer.replace(this.readout);
        return;
      }
      const i = this.indexOf(cursor);
      const parts = this.lines.slice(0, 12).map((l) => {
        const value = l.y || l.low;
        if (value[i] !== null) {
          context.fillStyle = viewer.colour(l.colour);
          context.beginPath();
          context.arc(this.x(this.xs[i]), this.y(value[i]), 2.5, 0, 7);
          context.fill();
        }
        const text = l.high && !l.y && l.high[i] !== l.low[i] ? `${viewer.number(l.low[i])} to ${viewer.number(l.high[i])}` : viewer.number(value[i]);
        return viewer.h("span", { class: `key ${l.colour}${l.isDashed ? " dashed" : ""}` }, l.name ? `${l.name} ` : "", viewer.h("b", {}, text));
      });
      const where = this.xReadout ? viewer.h("span", { class: "where" }, this.xReadout(this.xs[i])) : "";
      viewer.replace(this.readout, where, parts);
    }
  };

  function runs(values) {
    const found = [];
    let run = [];
    values.forEach((value, i) => {
      if (value !== null) run.push(i);
      else if (run.length) {
        found.push(run);
        run = [];
      }
    });
    if (run.length) found.push(run);
    return found;
  }

  function path(context, points) {
    context.beginPath();
    points.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  }

  function stepped(points) {
    return points.flatMap(([x, y], i) => (i ? [[x, points[i - 1][1]], [x, y]] : [[x, y]]));
  }

  // Counts of values in equal parts of a range.
  viewer.Histogram = class extends Chart {
    set({ low, high, counts, median, is_whole: isWhole }) {
      const half = isWhole ? 0.5 : 0; // the bar of an integer is around it
      Object.assign(this, { low: low - half, high: high - half, counts, median, isWhole });
      this.xKind = isWhole ? "count" : "number";
      const total = counts.reduce((sum, n) => sum + n, 0);
      this.describe(`${this.label}: ${viewer.count(total)} episodes from ${viewer.number(low)} to ${viewer.number(high)}, median ${viewer.number(median)}.`);
      this.together.snap = (x) => this.low + (this.bin(x) + 0.5) * this.width;
      this.draw();
    }
    get width() {
      return (this.high - this.low) / this.counts.length;
    }
    bin(x) {
      return Math.max(0, Math.min(this.counts.length - 1, Math.floor((x - this.low) / this.width)));
    }
    positions() {
      return (this.counts || []).map((_, i) => this.low + (i + 0.5) * this.width);
    }
    // What a bar has, as text: 3, 3 to 5, or 0.25 to 0.5.
    span(i) {
      const [from, to] = [this.low + i * this.width, this.low + (i + 1) * this.width];
      if (!this.isWhole) return `${viewer.number(from)} to ${viewer.number(to)}`;
      return to - from > 1 ? `${viewer.number(from + 0.5)} to ${viewer.number(to - 0.5)}` : viewer.number(from + 0.5);
    }
    draw() {
      if (!this.counts) return;
      const most = Math.max(1, ...this.counts);
      const context = this.begin([this.low, this.high], [0, most * 1.06], viewer.ticks(0, most, 2, { isWhole: true }));
      if (!context) return;
      const chosen = this.together.cursor === null ? -1 : this.bin(this.together.cursor);
      this.counts.forEach((n, i) => {
        const left = this.x(this.low + i * this.width);
        const right = this.x(this.low + (i + 1) * this.width);
        context.fillStyle = viewer.colour(i === chosen ? "accent" : "bar");
        const width = Math.min(MAX_BAR, Math.max(1, right - left - 1));
        context.fillRect((left + right - width) / 2, this.y(n), width, this.area.bottom - this.y(n));
      });
      const x = Math.round(this.x(this.median)) + 0.5;
      context.strokeStyle = viewer.colour("text");
      context.setLineDash([3, 3]);
      line(context, x, this.area.top, x, this.area.bottom);
      context.setLineDash([]);
      const text =
        chosen < 0
          ? viewer.h("span", {}, "median ", viewer.h("b", {}, viewer.number(this.median)))
          : viewer.h("span", {}, `${this.span(chosen)}: `, viewer.h("b", {}, viewer.plural(this.counts[chosen], "episode")));
      viewer.replace(this.readout, text);
    }
  };

  // Shares of a whole over x, one above the other.
  viewer.Shares = class extends Chart {
    set(xs, shares) {
      Object.assign(this, { xs, shares });
      this.totals = xs.map((_, i) => shares.reduce((sum, share) => sum + share.counts[i], 0) || 1);
      this.describe(`${this.label}: shares of ${shares.map((s) => s.name).join(", ")}.`);
      this.draw();
    }
    positions() {
      return this.xs || [];
    }
    draw() {
      if (!this.xs) return;
      const { xs } = this;
      const n = xs.length;
      const context = this.begin([xs[0] ?? 0, xs[n - 1] ?? 1], [0, 1], null);
      if (!context) return;
      // A column for each point, from the middle between it and the one before to the middle after it.
      const edges = xs.map((x, i) => Math.round(this.x(i ? (xs[i - 1] + x) / 2 : x))).concat(Math.round(this.x(xs[n - 1])));
      const below = new Array(n).fill(0);
      for (const share of this.shares) {
        context.fillStyle = viewer.colour(share.colour);
        share.counts.forEach((count, i) => {
          const from = below[i];
          below[i] += count / this.totals[i];
          context.fillRect(edges[i], this.y(below[i]), edges[i + 1] - edges[i], this.y(from) - this.y(below[i]));
        });
      }
      this.finish(context);
      if (this.together.cursor === null) {
        viewer.replace(this.readout);
        return;
      }
      const i = this.indexOf(this.together.cursor);
      const parts = this.shares.filter((s) => s.counts[i]).map((s) => viewer.h("span", { class: `key ${s.colour}` }, `${s.name} `, viewer.h("b", {}, `${Math.round((100 * s.counts[i]) / this.totals[i])} %`)));
      viewer.replace(this.readout, parts);
    }
  };

  // Many components over x, as colours.
  const STOPS = [[30, 22, 74], [46, 76, 140], [38, 130, 142], [92, 186, 112], [236, 222, 72]];
  viewer.ColourMap = class extends Chart {
    set(answer, xRange) {
      Object.assign(this, { answer, xRange });
      const bytes = Uint8Array.from(atob(answer.values), (c) => c.charCodeAt(0));
      this.image = viewer.h("canvas", { width: answer.columns, height: answer.rows });
      const context = this.image.getContext("2d");
      const pixels = context.createImageData(answer.columns, answer.rows);
      bytes.forEach((value, i) => pixels.data.set(value ? [...colourOf((value - 1) / 254), 255] : [0, 0, 0, 0], 4 * i));
      context.putImageData(pixels, 0, 0);
      this.bytes = bytes;
      this.describe(`${this.label}: ${answer.n_components} components from ${viewer.number(answer.low)} to ${viewer.number(answer.high)}, as colours.`);
      this.draw();
    }
    positions() {
      return (this.answer && Array.from({ length: this.answer.columns }, (_, i) => this.answer.start + i * this.answer.width)) || [];
    }
    draw() {
      if (!this.answer) return;
      const { rows, together: t } = this.answer;
      const context = this.begin(this.xRange, [rows * t, 0], viewer.ticks(0, rows * t, 3, { isWhole: true }));
      if (!context) return;
      context.imageSmoothingEnabled = false;
      const from = this.x(this.answer.start);
      const to = this.x(this.answer.start + this.answer.columns * this.answer.width);
      context.drawImage(this.image, from, this.area.top, Math.max(1, to - from), this.area.bottom - this.area.top);
      this.finish(context);
      viewer.replace(this.readout, viewer.h("span", {}, `${viewer.number(this.answer.low)} `, viewer.h("i", { class: "ramp" }), ` ${viewer.number(this.answer.high)}`));
    }
  };

  function colourOf(share) {
    const place = share * (STOPS.length - 1);
    const i = Math.min(STOPS.length - 2, Math.floor(place));
    return STOPS[i].map((from, k) => Math.round(from + (STOPS[i + 1][k] - from) * (place - i)));
  }

  viewer.Chart = Chart;
  viewer.redrawAll = () => {
    for (const chart of charts) {
      if (chart.canvas.isConnected) chart.draw();
    }
  };
  viewer.forgetCharts = () => {
    for (const chart of charts) {
      if (!chart.canvas.isConnected) charts.delete(chart);
    }
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", viewer.redrawAll);
})();
