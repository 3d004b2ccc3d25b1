/* Live parts of a page: choices, a worker that runs the course's own formulas, and SVG. */
"use strict";
(() => {
if (window.COURSE_LIVE.runs) return; // a page with two parts has this file twice
window.COURSE_LIVE.runs = true;
const { inks, series, ranks, parts, lacks } = window.COURSE_LIVE;
const HERE = document.currentScript.src;
const NS = "http://www.w3.org/2000/svg";
const ROW = 26, TEXT = 13;

function tag(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "polyline", "path", "text", "pattern"].includes(name);
  const node = svg ? document.createElementNS(NS, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const short = (x) => x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3
  ? x.toExponential(0).replace("e+", "e") : String(Number(x.toPrecision(3)));
const wide = (words) => words.length * TEXT * 0.56;
const halo = { stroke: "#fff", "stroke-width": 4, "paint-order": "stroke" }; // over a line
const word = (x, y, words, more = {}) => tag("text", { x, y, "font-size": TEXT, ...more }, words);

/* Ticks of an axis: round numbers, or on a logarithmic one the powers of ten or the values. */
function ticksOf(low, high, log, values) {
  if (log && high / low > 2000) {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    return Array.from({ length: last - first + 1 }, (_, k) => 10 ** (first + k));
  }
  if (log) return values;
  const raw = (high - low) / 4 || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 5, 10].find((k) => k * size >= raw * 0.999);
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, k) => k * step);
}

function axis(svg, left, right, y, most, label, ticks) {
  const at = (x) => left + (right - left) * x / (most || 1);
  svg.append(tag("line", { x1: left, x2: right, y1: y, y2: y, stroke: "#000" }));
  for (const tick of ticks) {
    svg.append(tag("line", { x1: at(tick), x2: at(tick), y1: y, y2: y + 4, stroke: "#000" }));
    const x = Math.min(at(tick), right + 12 - wide(short(tick)) / 2); // not cut off at the edge
    svg.append(word(x, y + 17, short(tick), { "text-anchor": "middle" }));
  }
  svg.append(word((left + right) / 2, y + 35, label, { "text-anchor": "middle" }));
  return at;
}

function box(svg, x, y, width, height, ink, words) {
  const frame = { x, y, width: Math.max(width, 1), height, stroke: "#fff", "stroke-width": 1 };
  svg.append(tag("rect", { ...frame, fill: ink.fill }));
  if (ink.hatch) svg.append(tag("rect", { ...frame, fill: "url(#live-hatch)" }));
  if (words && wide(words) < width + 1) {
    const place = { "text-anchor": "middle", fill: ink.text };
    svg.append(word(x + width / 2, y + height / 2 + TEXT * 0.36, words, place));
  }
}

/* Colors with their words, in as many lines as they need; returns the height. */
function legend(svg, entries, width, top = 4) {
  let x = 2, y = top;
  for (const [name, ink] of entries) {
    if (x + wide(name) + 30 > width && x > 2) { x = 2; y += 20; }
    box(svg, x, y, 16, 14, ink, "");
    svg.append(word(x + 21, y + 12, name));
    x += wide(name) + 40;
  }
  return entries.length ? y + 22 : top;
}
const inkOf = (kind) => inks[kind] ?? { fill: "#0072B2", text: "#fff" };
const leftOf = (names, width) => Math.min(Math.max(...names.map(wide)) + 20, width * 0.47);
const rowName = (svg, left, y, name) => {
  const room = Math.max(3, Math.floor((left - 8) / (TEXT * 0.53)));
  const cut = name.length > room ? name.slice(0, room - 1) + "…" : name;
  const node = word(left - 6, y, cut, { "text-anchor": "end" });
  node.append(tag("title", {}, name));
  svg.append(node);
};

const DRAW = {
  Lanes(svg, panel, width) {
    const names = Object.keys(panel.rows), left = leftOf(names, width), right = width - 12;
    const boxes = Object.values(panel.rows).flat();
    const kinds = [...new Set(boxes.map(([, , kind]) => kind))];
    const top = legend(svg, kinds.map((kind) => [kind.replace(/_/g, " "), inkOf(kind)]), width);
    const most = Math.max(0, ...boxes.map(([, end]) => end)), bottom = top + ROW * names.length + 2;
    const at = axis(svg, left, right, bottom, most, panel.x_label, ticksOf(0, most));
    names.forEach((name, row) => {
      rowName(svg, left, top + ROW * row + 17, name);
      for (const [start, end, kind, label] of panel.rows[name]) {
        const words = wide(label) < at(end) - at(start) - 2 ? label : inkOf(kind).letter;
        box(svg, at(start), top + ROW * row, at(end) - at(start), ROW - 3, inkOf(kind), words);
      }
    });
    return bottom + 42;
  },
  Bars(svg, panel, width) {
    const names = Object.keys(panel.rows), left = leftOf(names, width), right = width - 64;
    const kinds = [...new Set(Object.values(panel.rows).flatMap(Object.keys))];
    const entries = kinds.map((kind) => [kind.replace(/_s?$|_/g, " ").trim(), inkOf(kind)]);
    const top = legend(svg, kinds.length > 1 && !names.includes(kinds[0]) && kinds.length < 8
      && names.length !== kinds.length ? entries : [], width);
    const sums = names.map((name) => Object.values(panel.rows[name]).reduce((a, b) => a + b, 0));
    const most = Math.max(...sums, panel.limit?.[0] ?? 0), first = top + (panel.limit ? 20 : 0);
    const bottom = first + ROW * names.length + 2;
    const at = axis(svg, left, right, bottom, most, panel.x_label, ticksOf(0, most));
    names.forEach((name, row) => {
      rowName(svg, left, first + ROW * row + 17, name);
      let start = 0;
      for (const [kind, value] of Object.entries(panel.rows[name])) {
        box(svg, at(start), first + ROW * row, at(value) - left, ROW - 3, inkOf(kind), "");
        start += value;
      }
    });
    if (panel.limit) {
      const x = at(panel.limit[0]), anchor = x > width / 2 ? "end" : "start";
      const line = { x1: x, x2: x, y1: top + 2, y2: bottom, stroke: "#000", "stroke-width": 2 };
      svg.append(tag("line", { ...line, "stroke-dasharray": "6 4" }));
      svg.append(word(x + (anchor === "end" ? -5 : 5), top + 13, panel.limit[1],
        { "text-anchor": anchor }));
    }
    sums.forEach((sum, row) =>
      svg.append(word(at(sum) + 5, first + ROW * row + 17, short(sum), halo)));
    return bottom + 42;
  },
  Curves(svg, panel, width) {
    const names = Object.keys(panel.ys), all = Object.values(panel.ys).flat();
    const left = 64, right = width - 20, logX = panel.log.includes("x"), logY = panel.log === "xy";
    const lines = names.map((name, k) => [name, { fill: series[k], text: "#fff" }]);
    const top = legend(svg, names.length > 1 ? lines : [], width) + 6, bottom = top + 190;
    const low = logY ? Math.min(...all) : 0, high = Math.max(...all) * (logY ? 1 : 1.05) || 1;
    const scale = (log, a, b, from, to) => (v) => log
      ? from + (to - from) * Math.log(v / a) / Math.log(b / a || 1)
      : from + (to - from) * (v - a) / (b - a || 1);
    const [x0, x1] = [panel.x[0], panel.x[panel.x.length - 1]];
    const atX = scale(logX, x0, x1, left + 8, right), atY = scale(logY, low, high, bottom, top);
    for (const tick of ticksOf(low, high, logY, [])) {
      if (tick < low || tick > high) continue;
      svg.append(tag("line", { x1: left, x2: right, y1: atY(tick), y2: atY(tick), stroke: "#ddd" }));
      svg.append(word(left - 5, atY(tick) + 4, short(tick), { "text-anchor": "end" }));
    }
    const ticks = ticksOf(x0, x1, logX, panel.x), each = Math.ceil(ticks.length * 44 / (right - left));
    ticks.filter((_, k) => k % each === 0).forEach((tick) =>
      svg.append(word(atX(tick), bottom + 17, short(tick), { "text-anchor": "middle" })));
    svg.append(tag("line", { x1: left, x2: right, y1: bottom, y2: bottom, stroke: "#000" }));
    svg.append(word((left + right) / 2, bottom + 36, panel.x_label, { "text-anchor": "middle" }));
    svg.append(word(0, 0, panel.y_label, { "text-anchor": "middle",
      transform: `translate(14 ${(top + bottom) / 2}) rotate(-90)` }));
    names.forEach((name, k) => {
      const points = panel.ys[name].map((y, n) => [atX(panel.x[n]), atY(y)]);
      svg.append(tag("polyline", { points: points.join(" "), fill: "none", stroke: series[k],
        "stroke-width": 2, "stroke-dasharray": ["", "7 4", "2 3", "9 3 2 3"][k] }));
      for (const [x, y] of points) {
        const mark = { x: x - 3.5, y: y - 3.5, width: 7, height: 7, rx: k === 0 ? 3.5 : 0 };
        svg.append(tag("rect", { ...mark, fill: series[k] }));
      }
    });
    return bottom + 44;
  },
  Squares(svg, panel, width) {
    const names = Object.keys(panel.rows), left = leftOf(names, width);
    const most = Math.max(...names.map((name) => panel.rows[name].length));
    const each = Math.min(90, (width - left - 4) / most);
    names.forEach((name, row) => {
      rowName(svg, left, 4 + ROW * row + 17, name);
      panel.rows[name].forEach(([words, color], n) => {
        const ink = { fill: color < 0 ? "#eee" : ranks[color % ranks.length], text: "#000" };
        box(svg, left + each * n, 4 + ROW * row, each, ROW - 2, ink, words);
      });
    });
    let y = 4 + ROW * names.length, line = "";
    for (const one of [...panel.x_label.split(" "), null]) { // in lines that fit
      if (one !== null && wide(`${line} ${one}`) < width - 8) { line = `${line} ${one}`.trim(); continue; }
      svg.append(word(2, y += 18, line));
      line = one;
    }
    return y + 8;
  },
};

function pictureOf(panel, width, said) {
  const svg = tag("svg", { role: "img", "aria-label": said, width: "100%" });
  const hatch = tag("pattern", { id: "live-hatch", width: 6, height: 6,
    patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(tag("line", { x1: 0, x2: 0, y1: 0, y2: 6, stroke: "#fff", "stroke-width": 1.5,
    opacity: 0.55 }));
  svg.append(hatch);
  const height = DRAW[panel.kind](svg, panel, width);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  return svg;
}

function tableOf(header, rows, chosen = -1) {
  const cells = (kind, row) => row.map((one) => tag(kind, kind === "th" ? { scope: "col" } : {}, `${one}`));
  const table = tag("table", {}, tag("thead", {}, tag("tr", {}, ...cells("th", header))));
  table.append(tag("tbody", {}, ...rows.map((row, n) =>
    tag("tr", n === chosen ? { class: "chosen", "aria-current": "true" } : {}, ...cells("td", row)))));
  const scrolls = { tabindex: 0, role: "group", "aria-label": "table, scrolls" };
  return tag("div", { class: "table-wrapper", ...scrolls }, table);
}

/* The numbers of a picture as a table, for who cannot see it, or wants to copy them. */
function numbersOf(panel) {
  const rows = Object.entries(panel.rows ?? panel.ys);
  if (panel.kind === "Curves") {
    return tableOf([panel.x_label, ...rows.map(([name]) => name)],
      panel.x.map((x, n) => [x, ...rows.map(([, ys]) => ys[n])]));
  }
  if (panel.kind === "Bars") {
    return tableOf(["", "part", panel.x_label],
      rows.flatMap(([name, parts]) => Object.entries(parts).map(([kind, v]) => [name, kind, v])));
  }
  if (panel.kind === "Lanes") {
    return tableOf(["lane", "from", "to", "what", "label"],
      rows.flatMap(([name, boxes]) => boxes.map((one) => [name, ...one])));
  }
  return tableOf(["", panel.x_label], rows.map(([name, row]) => [name, row.map(([w]) => w).join(", ")]));
}

/* --- the worker: started by the first touch --- */
let worker = null, asked = 0;
const waiting = new Map();
function ask(name, values, say) {
  if (location.protocol === "file:") {
    return Promise.reject(new Error("A page opened as a file cannot compute. Serve the folder of the "
      + "site: python -m http.server -d build/site, then open http://localhost:8000."));
  }
  if (lacks) return Promise.reject(new Error(lacks));
  if (!worker) {
    worker = new Worker(new URL("live_worker.js", HERE), { type: "module" });
    worker.onmessage = ({ data }) => {
      if (data.progress) { waiting.forEach(({ say }) => say(data.progress)); return; }
      const { done, failed } = waiting.get(data.id);
      waiting.delete(data.id);
      if (data.failed) failed(new Error(data.failed)); else done(JSON.parse(data.answer));
    };
    worker.onerror = (event) => waiting.forEach(({ failed }) => failed(new Error(event.message)));
  }
  return new Promise((done, failed) => {
    waiting.set(++asked, { done, failed, say });
    worker.postMessage({ id: asked, where: parts[name].where, values: JSON.stringify(values) });
  });
}

/* --- one part of a page --- */
class Part {
  constructor(section) {
    this.name = section.dataset.live;
    this.about = parts[this.name];
    this.values = Object.fromEntries(Object.entries(this.about.options).map(([k, v]) => [k, v[1]]));
    this.controls = tag("div", { class: "live-controls" });
    this.buttons = tag("div", { class: "live-buttons" });
    this.status = tag("p", { class: "live-status", role: "status" });
    this.finding = tag("p", { class: "live-finding", "aria-live": "polite" });
    this.task = tag("div"); // of a game: its notes stand above what is built
    this.pictures = tag("div", { class: "live-pictures" });
    this.more = tag("div");
    section.replaceChildren(tag("p", { class: "live-question" }, this.about.question), this.controls,
      this.task, this.finding, this.buttons, this.status, this.pictures, this.more);
    this.inputs = {};
    for (const [name, [options, start]] of Object.entries(this.about.options)) {
      if (!this.about.hidden.includes(name)) this.addControl(name, options, start);
    }
    this.show(this.about.drawing);
    this.readAddress();
    new ResizeObserver(() => this.drawn !== this.pictures.clientWidth && this.show(this.drawing))
      .observe(this.pictures);
    addEventListener("hashchange", () => this.readAddress());
  }

  addControl(name, options, start) {
    const words = name.replace(/_/g, " "), slides = options.length > 3 && typeof start === "number";
    let input;
    if (typeof start === "boolean") {
      input = tag("input", { type: "checkbox" });
    } else if (!options.length) {
      input = tag("textarea", { rows: 3, spellcheck: "false" });
    } else if (slides) {
      input = tag("input", { type: "range", min: 0, max: options.length - 1 });
    } else {
      input = tag("select", {}, ...options.map((one, n) => tag("option", { value: n }, `${one}`)));
    }
    input.setAttribute("aria-label", words);
    const told = tag("output", { "aria-hidden": "true" });
    const read = () => typeof start === "boolean" ? input.checked
      : options.length ? options[input.value] : input.value;
    const write = (value) => {
      if (typeof start === "boolean") input.checked = value;
      else input.value = options.length ? options.indexOf(value) : value;
      if (slides) { told.value = value; input.setAttribute("aria-valuetext", `${value}`); }
    };
    input.addEventListener(options.length || typeof start === "boolean" ? "input" : "change", () => {
      write(read());
      const { hidden, options } = this.about; // another level starts without moves
      this.set({ ...Object.fromEntries(hidden.map((k) => [k, options[k][1]])), [name]: read() });
    });
    this.inputs[name] = write;
    write(start);
    this.controls.append(tag("label", options.length ? {} : { class: "wide" },
      tag("span", {}, words), input, ...(slides ? [told] : [])));
  }

  set(values) {
    Object.assign(this.values, values);
    for (const [name, value] of Object.entries(values)) this.inputs[name]?.(value);
    const changed = Object.entries(this.values).filter(([k, v]) => v !== this.about.options[k][1]);
    const query = new URLSearchParams(changed.map(([k, v]) => [k, `${v}`]));
    history.replaceState(null, "", `#${this.name}?${query}`);
    return this.compute();
  }

  readAddress() {
    const [name, query] = location.hash.slice(1).split("?");
    if (name !== this.name || query === undefined) return;
    const given = {};
    for (const [key, text] of new URLSearchParams(query)) {
      const [options, start] = this.about.options[key] ?? [[], null];
      const found = options.length ? options.find((one) => `${one}` === text) : text;
      if (start !== null && found !== undefined) given[key] = found;
    }
    if (Object.keys(given).length) this.set(given);
  }

  async compute() {
    const turn = this.turn = (this.turn ?? 0) + 1;
    const busy = setTimeout(() => { this.status.textContent = "Computing …"; }, 150);
    try {
      const drawing = await ask(this.name, this.values, (words) => { this.status.textContent = words; });
      if (turn !== this.turn) return;
      this.status.textContent = drawing.problem ?? "";
      for (const old of [this.finding, this.pictures]) old.toggleAttribute("inert", "problem" in drawing);
      if (!drawing.problem) this.show(drawing);
    } catch (problem) {
      this.status.textContent = problem.message;
    } finally {
      clearTimeout(busy);
      if (turn === this.turn && this.status.textContent === "Computing …") this.status.textContent = "";
    }
  }

  show(drawing) {
    this.drawing = drawing;
    const width = this.drawn = this.pictures.clientWidth || 320;
    this.finding.textContent = drawing.finding;
    const drawn = drawing.panels.filter((one) => one.kind !== "Table");
    this.pictures.replaceChildren(...drawing.panels.map((one) => one.kind === "Table"
      ? tableOf(one.header, one.rows, one.chosen) : pictureOf(one, width, drawing.finding)));
    const open = this.more.querySelector("details")?.open;
    const numbers = tag("details", open ? { open: "" } : {}, tag("summary", {}, "The numbers"),
      ...drawn.map(numbersOf));
    const command = drawing.command ? [tag("pre", { tabindex: 0, "aria-label": "to run it" },
      drawing.command), this.copyButton(drawing.command)] : [];
    const notes = drawing.note.split("\n").map((line) => tag("p", { class: "live-note" }, line));
    const isGame = Object.keys(drawing.buttons).length > 0;
    this.task.replaceChildren(...(isGame ? notes : []));
    this.more.replaceChildren(...command, ...(isGame ? [] : notes), numbers);
    this.showButtons(drawing.buttons);
  }

  copyButton(words) {
    const button = tag("button", { type: "button" }, "Copy");
    button.onclick = () => navigator.clipboard.writeText(words)
      .then(() => { button.textContent = "Copied"; });
    return button;
  }

  showButtons(rows) {
    const focused = document.activeElement?.dataset?.key;
    this.buttons.replaceChildren(...Object.entries(rows).map(([row, buttons]) =>
      tag("div", { role: "group", "aria-label": row }, tag("span", {}, row),
        ...buttons.map(([label, name, value, reason]) => {
          const button = tag("button", { type: "button", "data-key": `${row} ${label}` }, label);
          if (reason) button.setAttribute("aria-disabled", "true");
          button.onclick = () => reason ? this.refuse(`${row}, ${label}: ${reason}`)
            : this.set({ [name]: value });
          return button;
        }))));
    [...this.buttons.querySelectorAll("button")].find((one) => one.dataset.key === focused)?.focus();
  }

  refuse(words) { this.status.textContent = words; }
}

/* A question first: the picture is covered until one answer is chosen. */
function quiz(section) {
  const { question, answers, right, says } = JSON.parse(section.dataset.quiz);
  const told = tag("p", { class: "live-status", role: "status" });
  const buttons = answers.map((answer) => {
    const button = tag("button", { type: "button" }, answer);
    button.onclick = () => {
      const part = tag("section", { class: "live" });
      part.dataset.live = section.dataset.live;
      section.replaceChildren(told, part);
      told.textContent = `You said ${answer}. ${answer === right ? "Right" : `It is ${right}`}: ${says}`;
      new Part(part);
    };
    return button;
  });
  section.replaceChildren(tag("p", { class: "live-question" }, question),
    tag("div", { class: "live-buttons", role: "group", "aria-label": "your guess" }, ...buttons));
}

for (const section of document.querySelectorAll("[data-live]")) {
  if (section.dataset.quiz) quiz(section); else new Part(section);
}
})();
