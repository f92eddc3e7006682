"use strict";
// The frame of the page: routes, keys, and the poll for changes.
(() => {
  const POLL_MS = 2000;
  const KEYS = [
    ["/", "filter the episodes"],
    ["g o, g e", "overview, episodes"],
    ["↑ ↓ Enter", "choose an episode of the table and open it"],
    ["← →", "previous and next page, point or step; with Shift ten steps"],
    ["Home End", "first and last step"],
    ["Space", "play and pause"],
    ["p n", "previous and next episode"],
    ["+ − Esc", "zoom in, out, and back; dragging over a chart zooms too"],
    ["?", "this list"],
  ];
  const PAGES = { "": viewer.overviewPage, overview: viewer.overviewPage, episodes: viewer.episodesPage, episode: viewer.episodePage };
  const main = document.getElementById("main");
  const bar = document.getElementById("bar");
  const banner = document.getElementById("banner");
  let page = null;
  let number = null;
  let prefix = "";
  let isAsking = false;

  const chip = viewer.h("span", { class: "chip", role: "status" });
  const links = { overview: viewer.link("overview", {}, "Overview"), episodes: viewer.link("episodes", {}, "Episodes") };
  const storeName = viewer.h("span", { class: "store" });
  const help = viewer.h(
    "dialog",
    { class: "help", "aria-label": "Keys" },
    viewer.h("h2", {}, "Keys"),
    viewer.h("dl", {}, KEYS.map(([keys, what]) => [viewer.h("dt", {}, keys.split(", ").map((k, i) => [i ? ", " : "", viewer.h("kbd", {}, k)])), viewer.h("dd", {}, what)])),
    viewer.h("form", { method: "dialog" }, viewer.h("button", {}, "Close")),
  );
  document.body.append(help);
  viewer.replace(
    bar,
    viewer.h("a", { class: "brand", href: "#/overview", "aria-label": "trajstore, overview" }, mark(), "trajstore"),
    storeName,
    viewer.h("nav", { "aria-label": "Pages" }, links.overview, links.episodes),
    viewer.h("span", { class: "spacer" }),
    chip,
    viewer.h("button", { type: "button", class: "round", "aria-label": "Keys", title: "Keys (?)", onclick: () => help.showModal() }, "?"),
  );

  function mark() {
    return viewer.svg("svg", { viewBox: "0 0 32 32", width: 22, height: 22, "aria-hidden": "true" }, viewer.svg("rect", { width: 32, height: 32, rx: 8, class: "mark" }), viewer.svg("path", { d: "M6 22c5 0 5-11 10-11s5 7 10 7", class: "mark-line" }));
  }

  viewer.go = (path, parameters) => {
    const address = viewer.address(path, parameters);
    if (location.hash === address) route();
    else location.hash = address;
  };

  async function route() {
    const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
    if (!Object.hasOwn(PAGES, path)) {
      if (location.hash === "#main") return main.focus();
      return viewer.go("overview");
    }
    prefix = "";
    if (page && page.remove) page.remove();
    page = PAGES[path](Object.fromEntries(new URLSearchParams(query || "")));
    viewer.replace(main, page.element);
    viewer.forgetCharts();
    const current = path === "" ? "overview" : path === "episode" ? "episodes" : path;
    for (const [name, link] of Object.entries(links)) name === current ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
    document.title = `${page.title} · ${storeName.dataset.name || "trajstore"}`;
    scrollTo(0, 0);
    await page.update();
    return undefined;
  }

  viewer.refresh = () => poll(true);

  async function poll(always) {
    if (isAsking || (document.hidden && !always)) return; // a slow storage is not asked twice at once
    isAsking = true;
    try {
      const version = await viewer.source.ask("version");
      viewer.replace(banner, version.problem ? viewer.problem(new viewer.Problem("storage", `${version.problem}; what you see is what was read last.`)) : "");
      showState(version);
      const isNew = number !== null && version.number !== number;
      number = version.number;
      if (isNew && page) await page.update();
    } catch (error) {
      viewer.replace(banner, viewer.problem(error));
      setState("stopped", "not connected", "");
    } finally {
      isAsking = false;
    }
  }

  function showState({ n_open_streams: nOpen, committed_at: committed }) {
    const age = committed ? Date.now() / 1000 - committed : Infinity;
    if (!committed) setState("idle", "empty", "Nothing is committed yet");
    else if (nOpen && age < 120) setState("writing", "writing", `Last commit ${viewer.age(age)} ago; this page follows`);
    else if (nOpen) setState("idle", `idle ${viewer.age(age)}`, "A stream is open, but nothing was committed for a while");
    else setState("sealed", "complete", "All writers have ended");
  }

  function setState(kind, text, title) {
    chip.className = `chip ${kind}`;
    chip.title = title;
    if (chip.textContent !== text) chip.textContent = text;
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || help.open) return;
    const { target } = event;
    const typing = target.closest("input:not([type=range]), select, textarea");
    if (typing) {
      if (event.key === "Escape") target.blur();
      return;
    }
    if (event.key === " " && target.closest("button, summary, a")) return;
    if (event.key.startsWith("Arrow") && target.closest(".choice, .scroll:focus")) return;
    if (handle(event)) event.preventDefault();
  });

  function handle(event) {
    if (prefix === "g") {
      prefix = "";
      const to = { o: "overview", e: "episodes" }[event.key];
      if (to) viewer.go(to);
      return Boolean(to);
    }
    if (event.key === "g") return Boolean((prefix = "g"));
    if (event.key === "?") {
      help.showModal();
      return true;
    }
    if (page && page.onKey && page.onKey(event)) return true;
    if (event.key === "/") {
      viewer.go("episodes");
      setTimeout(() => document.getElementById("filter")?.focus(), 0);
      return true;
    }
    return false;
  }

  function showName(url) {
    const name = url.replace(/\/+$/, "").split("/").pop() || url;
    storeName.dataset.name = name;
    storeName.title = url;
    storeName.textContent = name;
    document.title = `${page ? page.title : "Overview"} · ${name}`;
  }

  const foot = document.getElementById("foot");
  if (viewer.exported) {
    setState("sealed", "exported", `Written ${viewer.fullDate(viewer.exported.written_at)}`);
    viewer.replace(foot, viewer.h("p", {}, viewer.exported.note));
  } else {
    setInterval(poll, POLL_MS);
    document.addEventListener("visibilitychange", () => poll(false));
    poll(true);
  }
  addEventListener("hashchange", route);
  route();
  viewer.source.ask("facts").then((facts) => showName(facts.url), () => undefined);
})();
