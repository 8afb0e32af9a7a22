"use strict";
// Times are ticks (D.tick nanoseconds) since the start of the job. M has the columns of the messages, in order of time.

const NONE = 0xffffffff, HAS_SENT = 1, HAS_RECEIVED = 2, IS_REQUEST = 4, IS_REPLY = 8, HAS_FAILED = 16, PATH_SHIFT = 6;
const PATHS = ["inline", "frames", "shared memory"];
const MAX_ARROWS = 2500, ARROWS_PER_PIXEL = 1, MAX_LISTED = 200, MAX_SUBROWS = 3, COLORS = 7;
const $ = (id) => document.getElementById(id);
let D, M, plotly;

// ---- data ------------------------------------------------------------------------------------------------

async function unpack(id) {
  const text = $(id).textContent;
  $(id).remove();
  const bytes = Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

function readData(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  D = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  M = {};
  let at = 4 + size;
  for (const [name, type, length] of D.columns) {
    const array = globalThis[type + "Array"];
    M[name] = new array(buffer, at, length);
    at += Math.ceil((length * array.BYTES_PER_ELEMENT) / 8) * 8;
  }
  M.count = M.step.length;
  M.start = new Float64Array(M.count);
  for (let i = 0, time = 0; i < M.count; i++) M.start[i] = time += M.step[i];
  delete M.step;
}

const endOf = (row) => M.start[row] + (M.flight[row] === NONE ? 0 : M.flight[row]);
const servedAt = (row) => endOf(row) + (M.queued[row] === NONE ? 0 : M.queued[row]);
const isUnfinished = (row) => isServed(row) && M.ran[row] === NONE;
/** When the thread was done with a request; one that never was reaches to the end of the trace. */
const doneAt = (row) => (isUnfinished(row) ? Math.max(fullSpan(), servedAt(row)) : servedAt(row) + M.ran[row]);
const isServed = (row) => M.queued[row] !== NONE;
const shortName = (row) => functionOf(row).replace(/^.*:/, "");
const kindOf = (row) => D.kinds[M.kind[row]];
const functionOf = (row) => D.names[M.name[row]] || kindOf(row);
const actorName = (number) => (number < 0 ? "unknown" : D.actors[number].name);
const requestOf = (row) => (M.flags[row] & IS_REPLY ? M.pair[row] : row);

function lowerBound(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
}

/** Intervals by which those that touch a window are found: by start, and the latest end so far. */
class Intervals {
  constructor(items, start, end) {
    this.items = Uint32Array.from(items);
    this.starts = new Float64Array(this.items.length);
    this.latest = new Float64Array(this.items.length);
    let latest = 0, before = 0, sorted = true;
    this.items.forEach((item, i) => { if (start(item) < before) sorted = false; before = start(item); });
    if (!sorted) this.items.sort((a, b) => start(a) - start(b));
    for (let i = 0; i < this.items.length; i++) {
      this.starts[i] = start(this.items[i]);
      this.latest[i] = latest = Math.max(latest, end(this.items[i]));
    }
  }
  window(from, to) { return [lowerBound(this.latest, from), lowerBound(this.starts, to + 1)]; }
}

// ---- text ------------------------------------------------------------------------------------------------

function showTime(ticks) {
  const ns = ticks * D.tick, size = Math.abs(ns);
  for (const [factor, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]])
    if (size >= factor) return `${+(ns / factor).toPrecision(4)} ${unit}`;
  return `${Math.round(ns)} ns`;
}
function showMoment(ticks, span) {
  const ns = ticks * D.tick, unit = span * D.tick;
  const [factor, name] = unit >= 2e9 ? [1e9, "s"] : unit >= 2e6 ? [1e6, "ms"] : [1e3, "µs"];
  const digits = Math.max(0, Math.min(3, Math.ceil(-Math.log10(unit / factor / 10))));
  return `${(ns / factor).toLocaleString("en", { maximumFractionDigits: digits })} ${name}`;
}
function showBytes(size) {
  for (const [factor, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (size >= factor) return `${+(size / factor).toPrecision(3)} ${unit}`;
  return `${size} B`;
}
const showCount = (n) => n.toLocaleString("en");
const showNumber = (n, noun) => `${showCount(n)} ${noun}${n === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;

/** An element; texts are never parsed as HTML, for names are those of the traced program. */
function el(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children.filter((each) => each !== null && each !== undefined));
  return node;
}
function fillTable(id, heads, rows) {
  const head = el("tr", {}, ...heads.map((h) => el("th", { scope: "col", className: h.startsWith("#") ? "number" : "" }, h.replace("#", ""))));
  const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) =>
    el("td", { className: heads[i].startsWith("#") ? "number" : typeof cell === "string" && cell.length > 30 ? "wide" : "" }, cell))));
  $(id).replaceChildren(el("thead", {}, head), el("tbody", {}, ...body));
}
const goButton = (label, action) => el("button", { type: "button", onclick: action }, label);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
