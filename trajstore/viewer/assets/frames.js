"use strict";
// Frames of an episode: one image for each field of frames, for the step under the cursor.
(() => {
  const KEPT = 240; // frames in memory
  const AHEAD = 6;

  class FrameField {
    constructor(key, field, onNote) {
      Object.assign(this, { key, field, onNote });
      this.kept = new Map();
      this.wanted = null;
      this.isLoading = false;
      this.image = viewer.h("img", { alt: `${field.path}`, class: "frame", draggable: "false" });
      this.problem = viewer.h("div");
      this.note = viewer.h("small", { class: "quiet" });
      this.element = viewer.h("figure", { class: "frame-field" }, this.image, this.problem, viewer.h("figcaption", {}, field.path, " ", this.note));
    }

    show(step) {
      this.wanted = Math.min(step, this.field.n - 1);
      const known = this.kept.get(this.wanted);
      if (known) this.display(known, this.wanted);
      if (!this.isLoading) this.load();
    }

    display(frame, step) {
      if (this.image.getAttribute("src") !== frame.address) this.image.src = frame.address;
      this.image.alt = `${this.field.path} at step ${step}`;
      this.image.dataset.step = String(step);
      this.note.textContent = frame.note;
      this.problem.replaceChildren();
    }

    // One request at a time: the frame that is wanted now, then those that come next.
    async load() {
      this.isLoading = true;
      try {
        for (let step = this.next(); step !== null; step = this.next()) {
          const frame = await viewer.source.frame({ ...this.key, path: this.field.path, step });
          this.keep(step, frame);
          if (step === this.wanted) this.display(frame, step);
        }
      } catch (error) {
        viewer.replace(this.problem, viewer.problem(error));
        this.failed = this.wanted;
      }
      this.isLoading = false;
      if (this.wanted !== this.failed && this.next() === this.wanted) this.load();
    }

    next() {
      if (!this.kept.has(this.wanted)) return this.wanted;
      if (viewer.exported) return null;
      for (let i = 1; i <= AHEAD; i++) {
        for (const step of [this.wanted + i, this.wanted - i]) {
          if (step >= 0 && step < this.field.n && !this.kept.has(step)) return step;
        }
      }
      return null;
    }

    keep(step, frame) {
      this.kept.set(step, frame);
      if (this.kept.size <= KEPT) return;
      const [oldest, old] = this.kept.entries().next().value;
      this.kept.delete(oldest);
      if (old.address.startsWith("blob:")) URL.revokeObjectURL(old.address);
    }

    remove() {
      for (const { address } of this.kept.values()) if (address.startsWith("blob:")) URL.revokeObjectURL(address);
      this.kept.clear();
    }
  }

  viewer.FrameField = FrameField;
})();
