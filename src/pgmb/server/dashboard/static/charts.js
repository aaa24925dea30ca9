// Lines over time, drawn as SVG: axes, a legend with the newest values, and the values under the pointer or the arrow keys.

import { age } from "./times.js";

const KEPT = 900;
const LEAST_SPAN = 120;
const HEIGHT = 148;
const LEFT = 46;
const RIGHT = 10;
const TOP = 8;
const BOTTOM = 20;
const COLOURS = 8;

export class Charts {
  constructor(figures) {
    this.at = [];
    this.preferred = new Map();
    this.charts = [...figures].map((figure) => new Chart(figure, this));
    new ResizeObserver(() => this.draw()).observe(document.body);
  }

  begin(at, curves) {
    this.at = at;
    for (const chart of this.charts) chart.curves = new Map(Object.entries(curves[chart.name] ?? {}));
    this.draw();
  }

  add(at, values) {
    this.at.push(at);
    const old = this.at.findIndex((moment) => moment >= at - KEPT);
    this.at.splice(0, old);
    for (const chart of this.charts) chart.add(values[chart.name] ?? {}, old, this.at.length);
    this.draw();
  }

  draw() {
    for (const chart of this.charts) chart.draw();
  }

  // The same name has the same colour in every chart and for as long as the page is open.
  colours(names) {
    if (names.length === 1) return new Map([[names[0], 0]]);
    const taken = new Set();
    const given = new Map();
    for (const name of names) {
      if (!this.preferred.has(name)) this.preferred.set(name, this.preferred.size % COLOURS);
      let colour = this.preferred.get(name);
      while (taken.has(colour)) colour = (colour + 1) % COLOURS;
      taken.add(colour);
      given.set(name, colour);
    }
    return given;
  }
}

class Chart {
  constructor(figure, charts) {
    this.charts = charts;
    this.figure = figure;
    this.name = figure.dataset.chart;
    this.unit = figure.dataset.unit;
    this.plot = figure.querySelector(".plot");
    this.legend = figure.querySelector(".legend");
    this.curves = new Map();
    this.pointed = null;
    this.plot.replaceChildren();
    this.svg = make("svg", { class: "lines", height: HEIGHT, tabindex: 0, role: "img" });
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.tip.hidden = true;
    this.tip.setAttribute("role", "status");
    this.plot.append(this.svg, this.tip);
    this.svg.addEventListener("pointermove", (event) => this.point(this.nearest(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const last = this.charts.at.length - 1;
      this.point(Math.max(0, Math.min(last, (this.pointed ?? last) + by)));
    });
  }

  add(values, old, length) {
    for (const [name, curve] of this.curves) {
      curve.splice(0, old);
      curve.push(values[name] ?? null);
    }
    for (const [name, value] of Object.entries(values)) {
      if (!this.curves.has(name)) this.curves.set(name, [...Array(length - 1).fill(null), value]);
    }
    for (const [name, curve] of this.curves) {
      if (!(name in values) && curve.every((value) => !value)) this.curves.delete(name);
    }
    if (this.pointed !== null) this.pointed = Math.max(0, this.pointed - old);
  }

  draw() {
    const { at } = this.charts;
    const width = this.plot.clientWidth;
    if (!at.length || !width) return;
    const end = at[at.length - 1];
    const span = Math.max(LEAST_SPAN, Math.min(KEPT, end - at[0]));
    const names = [...this.curves.keys()].sort().slice(0, COLOURS);
    const colours = this.charts.colours(names);
    let highest = 0;
    for (const curve of this.curves.values()) for (const value of curve) if (value > highest) highest = value;
    const steps = ticks(highest, this.unit);
    const top = steps[steps.length - 1];
    this.x = (moment) => LEFT + (width - LEFT - RIGHT) * (1 - (end - moment) / span);
    this.y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);

    const parts = [];
    for (const step of steps) {
      const y = Math.round(this.y(step)) + 0.5;
      parts.push(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      parts.push(make("text", { class: "axis", x: LEFT - 6, y: y + 3.5, "text-anchor": "end" }, this.short(step)));
    }
    const minutes = span > 600 ? 5 : span > 240 ? 2 : 1;
    for (let ago = 0; ago * 60 <= span; ago += minutes) {
      const x = this.x(end - ago * 60);
      const anchor = ago === 0 ? "end" : x < LEFT + 16 ? "start" : "middle";
      parts.push(make("text", { class: "axis", x, y: HEIGHT - 5, "text-anchor": anchor }, ago ? `−${ago} min` : "now"));
    }
    names.forEach((name) => {
      const colour = colours.get(name);
      const line = this.path(at, this.curves.get(name), end - span);
      if (names.length === 1 && line) {
        const base = this.y(0);
        parts.push(make("path", { class: `area s${colour}`, d: `${line.d}L${line.last},${base}L${line.first},${base}Z` }));
      }
      if (line) parts.push(make("path", { class: `line s${colour}`, d: line.d }));
    });
    this.cross = make("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    parts.push(this.cross);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.summary(names));
    this.svg.replaceChildren(...parts);
    this.tell(names, colours);
    if (this.pointed !== null) this.point(this.pointed);
  }

  path(at, curve, begin) {
    let d = "";
    let first = null;
    let last = null;
    curve.forEach((value, place) => {
      if (value === null || at[place] < begin) return;
      const x = this.x(at[place]).toFixed(1);
      d += `${first === null ? "M" : "L"}${x},${this.y(value).toFixed(1)}`;
      first ??= x;
      last = x;
    });
    return first === null ? null : { d, first, last };
  }

  tell(names, colours) {
    this.shown = colours;
    const items = names.map((name) => {
      const item = document.createElement("li");
      const curve = this.curves.get(name);
      const swatch = document.createElement("i");
      swatch.className = `s${colours.get(name)}`;
      const label = document.createElement("bdi");
      label.textContent = name.length > 32 ? `${name.slice(0, 32)}…` : name;
      label.title = name.slice(0, 500);
      const value = document.createElement("b");
      value.textContent = this.text(curve[curve.length - 1]);
      item.append(swatch, label, value);
      return item;
    });
    if (!items.length) {
      const item = document.createElement("li");
      item.className = "hint";
      item.textContent = "nothing to draw";
      items.push(item);
    }
    this.legend.replaceChildren(...items);
  }

  summary(names) {
    const title = this.figure.querySelector("h3").textContent;
    const told = names.map((name) => `${name} ${this.text(this.curves.get(name).at(-1))}`);
    return `${title}, now: ${told.join(", ") || "nothing"}. Arrow keys read older values.`;
  }

  nearest(offset) {
    const { at } = this.charts;
    if (!at.length || !this.x) return null;
    let best = 0;
    at.forEach((moment, place) => {
      if (Math.abs(this.x(moment) - offset) < Math.abs(this.x(at[best]) - offset)) best = place;
    });
    return best;
  }

  point(place) {
    this.pointed = place;
    const shown = place !== null && this.cross && this.charts.at[place] !== undefined;
    this.tip.hidden = !shown;
    this.cross?.setAttribute("visibility", shown ? "visible" : "hidden");
    if (!shown) return;
    const moment = this.charts.at[place];
    const x = Math.max(LEFT, this.x(moment));
    this.cross.setAttribute("x1", x);
    this.cross.setAttribute("x2", x);
    const rows = [document.createElement("p")];
    rows[0].textContent = new Date(moment * 1000).toLocaleTimeString();
    this.shown.forEach((colour, name) => {
      const row = document.createElement("p");
      const swatch = document.createElement("i");
      swatch.className = `s${colour}`;
      const label = document.createElement("bdi");
      label.textContent = name.length > 24 ? `${name.slice(0, 24)}…` : name;
      const value = document.createElement("b");
      value.textContent = this.text(this.curves.get(name)[place]);
      row.append(swatch, label, value);
      rows.push(row);
    });
    this.tip.replaceChildren(...rows);
    const room = this.plot.clientWidth;
    this.tip.style.left = `${x + this.tip.offsetWidth + 16 > room ? Math.max(0, x - this.tip.offsetWidth - 10) : x + 10}px`;
  }

  text(value) {
    if (value === null || value === undefined) return "–";
    if (this.unit === "s") return value === 0 ? "0 s" : age(value);
    const shown = value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
    return shown + this.unit;
  }

  short(value) {
    if (this.unit === "s") return value === 0 ? "0" : age(value).replace(/ \d+ \w+$/, (rest) => (value >= 3600 && value % 3600 ? rest : ""));
    for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (value >= size) return `${+(value / size).toFixed(1)}${letter}`;
    }
    return `${+value.toFixed(2)}`;
  }
}

function ticks(highest, unit) {
  if (!highest) return [0, 1];
  const aim = (unit === "/s" ? highest : Math.max(highest, 1)) / 3;
  let step;
  if (unit === "s") {
    step = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400].find((one) => one >= aim)
      ?? Math.ceil(aim / 86400) * 86400;
  } else {
    const size = 10 ** Math.floor(Math.log10(aim));
    step = [1, 2, 5, 10].map((one) => one * size).find((one) => one >= aim);
    if (unit === "") step = Math.max(1, step);
  }
  const found = [0];
  while (found[found.length - 1] < highest || found.length < 2) found.push(found.length * step);
  return found;
}

function make(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}
