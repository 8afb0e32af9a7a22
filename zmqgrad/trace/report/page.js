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
    el("td", { className: heads[i].startsWith("#") ? "number" : typeof cell === "string" && cell.length > 40 ? "wide" : "" }, cell))));
  $(id).replaceChildren(el("thead", {}, head), el("tbody", {}, ...body));
}
const goButton = (label, action) => el("button", { type: "button", onclick: action }, label);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- filter ----------------------------------------------------------------------------------------------

/** What the search matches: F.all, and by lane the times at which messages left or arrived. */
let F;

function filter() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kind = $("kind").value, worker = $("worker").value, slower = (parseFloat($("slower").value) * 1e6) / D.tick || 0;
  const texts = (values) => words.map((word) => values.map((value) => value.toLowerCase().includes(word)));
  const names = texts(D.names), actors = texts(D.actors.map((a) => a.name)), contexts = texts(D.contextIds);
  const kinds = words.map((word) => Object.fromEntries(Object.entries(D.kinds).map(([k, name]) => [k, name.toLowerCase().includes(word)])));
  const stores = $("others").checked, isWorker = D.actors.map((a) => a.isWorker);
  const rows = new Uint32Array(M.count);
  let count = 0;
  for (let row = 0; row < M.count; row++) {
    const source = M.source[row], target = M.target[row];
    if (!stores && !(source >= 0 && isWorker[source]) && !(target >= 0 && isWorker[target])) continue;
    if (kind !== "" && M.kind[row] !== +kind) continue;
    if (worker !== "" && source !== +worker && target !== +worker) continue;
    if (slower && callTime(requestOf(row)) < slower) continue;
    let matches = true;
    for (let w = 0; w < words.length && matches; w++)
      matches = names[w][M.name[row]] || kinds[w][M.kind[row]] || (source >= 0 && actors[w][source]) ||
        (target >= 0 && actors[w][target]) || contexts[w][M.context[row]];
    if (matches) rows[count++] = row;
  }
  index(rows.subarray(0, count));
  const isNarrowed = words.length > 0 || kind !== "" || slower > 0, matching = new Uint8Array(isNarrowed ? M.count : 0);
  if (isNarrowed) for (const row of F.all.items) matching[row] = 1;
  F.hasWait = (i) => !isNarrowed || (M.waitRow[i] >= 0 && matching[M.waitRow[i]] === 1);
  F.hasGroup = (i) => !isNarrowed || (words.length > 0 && words.every((word) => T.allGroups[i].context.id.includes(word)));
}

/** The duration of a call, or of the transfer of a message that is none. */
function callTime(row) {
  if (row < 0) return 0;
  const reply = M.flags[row] & IS_REQUEST ? M.pair[row] : -1;
  return reply >= 0 ? endOf(reply) - M.start[row] : endOf(row) - M.start[row];
}

function index(rows) {
  const lanes = D.actors.map(() => ({ count: 0, served: [] }));
  for (const row of rows) {
    if (M.flags[row] & HAS_SENT && M.source[row] >= 0) lanes[M.source[row]].count++;
    if (M.flags[row] & HAS_RECEIVED && M.target[row] >= 0) lanes[M.target[row]].count++;
  }
  for (const lane of lanes) { lane.times = new Float64Array(lane.count); lane.count = 0; }
  for (const row of rows) {
    const source = lanes[M.source[row]], target = lanes[M.target[row]];
    if (M.flags[row] & HAS_SENT && source) source.times[source.count++] = M.start[row];
    if (M.flags[row] & HAS_RECEIVED && target) target.times[target.count++] = endOf(row);
    if (isServed(row) && target) target.served.push(row);
  }
  for (const lane of lanes) {
    lane.times.sort();
    lane.served = new Intervals(lane.served, servedAt, doneAt);
  }
  F = { all: new Intervals(rows, (row) => M.start[row], endOf), lanes };
}

// ---- timeline --------------------------------------------------------------------------------------------

const T = { from: 0, to: 1, width: 1, gutter: 120, lanes: [], hits: [], selected: -1, wait: -1, hover: null, waits: [], groups: [], subrow: null };
const canvas = () => $("canvas");
const xOf = (time) => T.gutter + ((time - T.from) / (T.to - T.from)) * (T.width - T.gutter);
/** How many messages in view are drawn as arrows: more would hide the bars. */
const arrowLimit = () => Math.min(MAX_ARROWS, Math.round((T.width - T.gutter) * ARROWS_PER_PIXEL));
const timeOf = (x) => T.from + ((x - T.gutter) / (T.width - T.gutter)) * (T.to - T.from);
const fullSpan = () => Math.max(D.duration / D.tick, 100);

function prepareTimeline() {
  T.from = 0; T.to = fullSpan();
  const waits = D.actors.map(() => []), groups = D.actors.map(() => []);
  M.waitActor.forEach((actor, i) => actor >= 0 && waits[actor].push(i));
  T.waits = waits.map((list) => new Intervals(list, (i) => M.waitBegun[i], (i) => M.waitBegun[i] + M.waitTime[i]));
  T.allGroups = [];
  for (const context of D.contexts)
    for (const [actor, began, took] of context.groups) if (actor >= 0) { groups[actor].push(T.allGroups.length); T.allGroups.push({ began, took, context }); }
  T.groups = groups.map((list) => new Intervals(list, (i) => T.allGroups[i].began, (i) => T.allGroups[i].began + T.allGroups[i].took));
  const threads = new Map();  // of each worker: the subrow of each of its serving threads
  T.subrow = (row) => {
    const key = M.target[row] * 65536 + M.receiverThread[row];
    if (!threads.has(key)) {
      const taken = [...threads.keys()].filter((k) => Math.floor(k / 65536) === M.target[row]).length;
      threads.set(key, taken % MAX_SUBROWS);
    }
    return threads.get(key);
  };
}

function layOut() {
  const used = D.actors.map((_, i) => i).filter((i) => (D.actors[i].isWorker || $("others").checked) && ($("worker").value === "" || +$("worker").value === i || F.lanes[i].times.length));
  const height = Math.max(16, Math.min(86, Math.floor(4200 / Math.max(used.length, 1))));
  T.lanes = used.map((actor, i) => ({ actor, top: 26 + i * height, height }));
  const ratio = devicePixelRatio || 1, box = canvas(), total = 34 + used.length * height;
  T.width = $("stage").clientWidth;
  T.gutter = T.width < 600 ? 76 : 132;
  box.style.height = `${total}px`;
  for (const [each, h] of [[box, total], [$("minimap"), 40]]) { each.width = T.width * ratio; each.height = h * ratio; each.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0); }
  draw();
  drawMinimap();
}

let drawing = 0;
function requestDraw() {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; draw(); drawMinimap(); });
}

function draw() {
  const began = performance.now(), g = canvas().getContext("2d"), height = 34 + (T.lanes.length ? T.lanes.length * T.lanes[0].height : 0);
  const style = T.style ??= Object.fromEntries(["panel", "faint", "ink", "soft", "line", "served", "wait", "group", "bad", "arrow", "selected", "c0", "c1", "c2", "c3", "c4", "c5", "c6"].map((n) => [n, css("--" + n)]));
  g.clearRect(0, 0, T.width, height);
  T.hits = [];
  drawAxis(g, style, height);
  const [first, last] = F.all.window(T.from, T.to), shown = last - first;
  let peak = 1;
  const densities = T.lanes.map((lane) => { const d = density(F.lanes[lane.actor].times, T.from, T.to, T.width - T.gutter); for (const n of d) if (n > peak) peak = n; return d; });
  T.lanes.forEach((lane, i) => drawLane(g, style, lane, densities[i], peak));
  T.arrowAlpha = Math.max(0.15, 0.62 / (1 + (6 * shown) / (T.width - T.gutter)));
  if (shown <= arrowLimit()) for (let i = first; i < last; i++) drawArrow(g, style, F.all.items[i], false);
  drawSelected(g, style);
  drawGutter(g, style);
  showStatus(shown);
  canvas().dataset.drawMs = (performance.now() - began).toFixed(1);
  Object.assign(canvas().dataset, { from: T.from, to: T.to, shown, selected: T.selected });
  scheduleListing(first, last);
}

/** How many of the sorted ``times`` fall on each pixel. */
function density(times, from, to, width) {
  const counts = new Uint32Array(Math.max(1, Math.floor(width)));
  let before = lowerBound(times, from);
  for (let x = 0; x < counts.length && before < times.length; x++) {
    const edge = from + ((x + 1) / width) * (to - from);
    let after = before;
    if (times[before] < edge) after = before + lowerBound(times.subarray(before), edge);
    counts[x] = after - before;
    before = after;
  }
  return counts;
}

function drawAxis(g, style, height) {
  const span = T.to - T.from, target = span / Math.max(3, (T.width - T.gutter) / 130), ns = target * D.tick;
  const power = 10 ** Math.floor(Math.log10(ns)), step = ([1, 2, 5, 10].find((n) => n * power >= ns) * power) / D.tick;
  g.font = "11px system-ui, sans-serif"; g.textBaseline = "middle"; g.textAlign = "center"; g.lineWidth = 1;
  for (let t = Math.ceil(T.from / step) * step; t <= T.to; t += step) {
    const x = Math.round(xOf(t)) + 0.5;
    g.strokeStyle = style.line; g.beginPath(); g.moveTo(x, 20); g.lineTo(x, height); g.stroke();
    g.fillStyle = style.soft; if (x > T.gutter + 20 && x < T.width - 24) g.fillText(showMoment(t, step * 10), x, 10);
  }
}

const parts = (lane) => lane.height < 50 ? { band: lane.height - 6, rows: 0 } : { band: 20, rows: 26, row: 13, waits: 67, groups: 75 };

function drawLane(g, style, lane, counts, peak) {
  const p = parts(lane), base = lane.top + p.band + 2;
  g.strokeStyle = style.line; g.beginPath(); g.moveTo(0, lane.top + lane.height - 0.5); g.lineTo(T.width, lane.top + lane.height - 0.5); g.stroke();
  g.fillStyle = style.arrow;
  const scale = p.band / Math.log1p(peak);
  for (let x = 0; x < counts.length; x++)
    if (counts[x]) { const h = Math.max(3, Math.round(Math.log1p(counts[x]) * scale)); g.fillRect(T.gutter + x, base - h, 1, h); }
  lane.wire = base;
  if (!p.rows) return;
  drawServed(g, style, lane, p);
  drawSpans(g, T.waits[lane.actor], (i) => M.waitBegun[i], (i) => M.waitTime[i], lane.top + p.waits, 6,
    (i) => (M.waitState[i] ? style.bad : style.wait), (i) => ({ wait: i }), F.hasWait);
  drawSpans(g, T.groups[lane.actor], (i) => T.allGroups[i].began, (i) => T.allGroups[i].took, lane.top + p.groups, 6,
    () => style.group, (i) => ({ group: i }), F.hasGroup);
}

/** Draws intervals of one row; what falls on the same pixel is drawn once, so a million cost little. */
function drawSpans(g, spans, start, length, y, height, color, hit, isWanted) {
  const [first, last] = spans.window(T.from, T.to);
  let edge = -1;
  for (let i = first; i < last; i++) {
    const item = spans.items[i], end = start(item) + length(item);
    if (end < T.from || !isWanted(item)) continue;
    const right = Math.min(T.width, Math.max(xOf(end), xOf(start(item)) + 1)), left = Math.max(T.gutter, xOf(start(item)));
    if (right <= edge + 0.5) continue;
    edge = right;
    g.fillStyle = color(item);
    fillBar(g, left, y, right, height);
    if (right - left >= 2 || T.hits.length < MAX_ARROWS) T.hits.push({ ...hit(item), x: left, y, w: right - left, h: height });
  }
}

/** Fills a bar whose ends are on whole pixels, which takes a browser without a GPU a fraction of the time. */
function fillBar(g, left, y, right, height) { const x = Math.floor(left); g.fillRect(x, y, Math.max(1, Math.round(right) - x), height); }

function drawServed(g, style, lane, p) {
  const spans = F.lanes[lane.actor].served, [first, last] = spans.window(T.from, T.to), edges = new Float64Array(MAX_SUBROWS).fill(-1);
  g.textAlign = "left"; g.font = "10.5px system-ui, sans-serif";
  // What never ends comes first, and does not hide what other threads of its row served meanwhile.
  for (let i = first; i < last; i++) if (isUnfinished(spans.items[i])) drawRow(spans.items[i], new Float64Array(MAX_SUBROWS).fill(-1));
  for (let i = first; i < last; i++) if (!isUnfinished(spans.items[i])) drawRow(spans.items[i], edges);
  function drawRow(row, edges) {
    const start = servedAt(row), end = doneAt(row);
    if (end < T.from) return;
    const sub = T.subrow(row), left = Math.max(T.gutter, xOf(start)), right = Math.min(T.width, Math.max(xOf(end), xOf(start) + 1));
    if (right <= edges[sub] + 0.5) return;
    edges[sub] = right;
    const y = lane.top + p.rows + sub * p.row, w = Math.max(1, right - left);
    g.fillStyle = M.flags[row] & HAS_FAILED || isUnfinished(row) ? style.bad : style["c" + colorOf(M.name[row])];
    fillBar(g, left, y, right, 11);
    if (w > 46) { g.save(); g.beginPath(); g.rect(left, y, w, 11); g.clip(); g.fillStyle = style.panel; g.fillText(shortName(row), left + 4, y + 6); g.restore(); }
    if (w >= 2 || T.hits.length < MAX_ARROWS) T.hits.push({ row, x: left, y, w, h: 11 });
  }
}

function wireOf(actor) { const lane = T.lanes.find((each) => each.actor === actor); return lane?.wire; }

function drawArrow(g, style, row, selected) {
  const from = wireOf(M.source[row]), to = wireOf(M.target[row]);
  if (from === undefined || to === undefined) return;
  const x0 = xOf(M.start[row]), x1 = xOf(endOf(row)), lost = M.flight[row] === NONE || !(M.flags[row] & HAS_RECEIVED) || !(M.flags[row] & HAS_SENT);
  if (x1 < T.gutter || x0 > T.width) return;
  const color = selected ? style.selected : lost ? style.bad : style["c" + colorOf(M.name[row])];
  g.strokeStyle = g.fillStyle = color; g.lineWidth = selected ? 2.5 : 1; g.globalAlpha = selected ? 1 : lost ? 0.62 : T.arrowAlpha;
  g.setLineDash(M.flags[row] & IS_REPLY ? [4, 3] : []);
  g.beginPath(); g.moveTo(x0, from); g.lineTo(x1, to); g.stroke(); g.setLineDash([]);
  const angle = Math.atan2(to - from, x1 - x0), size = selected ? 9 : 6;
  g.beginPath(); g.moveTo(x1, to);
  g.lineTo(x1 - size * Math.cos(angle - 0.4), to - size * Math.sin(angle - 0.4));
  g.lineTo(x1 - size * Math.cos(angle + 0.4), to - size * Math.sin(angle + 0.4)); g.fill();
  g.globalAlpha = 1;
  T.hits.push({ row, line: [x0, from, x1, to] });
}

function drawSelected(g, style) {
  if (T.selected < 0) return;
  drawArrow(g, style, T.selected, true);
  if (M.pair[T.selected] >= 0) drawArrow(g, style, M.pair[T.selected], true);
  const y = wireOf(M.source[T.selected]), z = wireOf(M.target[T.selected]);
  if (y !== undefined && z !== undefined)
    Object.assign(canvas().dataset, { selectedX: (xOf(M.start[T.selected]) + xOf(endOf(T.selected))) / 2, selectedY: (y + z) / 2 });
}

function drawGutter(g, style) {
  g.textAlign = "left"; g.textBaseline = "middle";
  for (const lane of T.lanes) {
    const actor = D.actors[lane.actor];
    g.fillStyle = style.panel; g.fillRect(0, lane.top, T.gutter - 1, lane.height - 1);
    g.fillStyle = style.ink; g.font = "600 12.5px system-ui, sans-serif"; g.fillText(actor.name, 4, lane.top + Math.min(14, lane.height / 2), T.gutter - 8);
    if (lane.height < 50) continue;
    g.fillStyle = style.soft; g.font = "11px system-ui, sans-serif";
    g.fillText(actor.isWorker ? `rank ${actor.rank}` : actor.role, 4, lane.top + 30, T.gutter - 8);
    g.fillText(`pid ${actor.pid}${actor.stopped ? "" : " †"}`, 4, lane.top + 45, T.gutter - 8);
  }
}

function drawMinimap() {
  const g = $("minimap").getContext("2d"), all = { from: T.from, to: T.to }, width = T.width - T.gutter;
  g.clearRect(0, 0, T.width, 40);
  const counts = density(F.all.starts, 0, fullSpan(), width), peak = Math.log1p(counts.reduce((a, b) => Math.max(a, b), 1));
  g.fillStyle = T.style.served;
  counts.forEach((n, x) => { if (n) { const h = Math.max(2, (Math.log1p(n) / peak) * 34); g.fillRect(T.gutter + x, 38 - h, 1, h); } });
  const x0 = T.gutter + (all.from / fullSpan()) * width, x1 = T.gutter + (all.to / fullSpan()) * width;
  g.fillStyle = T.style.panel; g.globalAlpha = 0.72; g.fillRect(T.gutter, 0, x0 - T.gutter, 40); g.fillRect(x1, 0, T.width - x1, 40); g.globalAlpha = 1;
  g.strokeStyle = T.style.selected; g.lineWidth = 2; g.strokeRect(Math.min(x0, T.width - 3) + 1, 1, Math.max(2, x1 - x0 - 2), 38);
  g.fillStyle = T.style.soft; g.font = "11px system-ui, sans-serif"; g.textBaseline = "middle"; g.textAlign = "left"; g.fillText("whole job", 4, 20);
}

function showStatus(shown) {
  const more = shown > arrowLimit() ? ` · zoom in below ${showCount(arrowLimit())} to see each message` : "";
  $("status").textContent = `${showCount(shown)} of ${showCount(M.count)} messages in view · ${showMoment(T.from, T.to - T.from)} to ${showMoment(T.to, T.to - T.from)}${more}`;
}

const ranking = { order: null };
/** A color for the most frequent functions; the last one is for all others. */
function colorOf(name) { return ranking.order[name]; }
function rankNames() {
  const counts = new Float64Array(D.names.length);
  for (let row = 0; row < M.count; row++) if (isServed(row)) counts[M.name[row]] += M.ran[row] === NONE ? 0 : M.ran[row] + 1;
  const top = [...counts.keys()].filter((n) => n && counts[n]).sort((a, b) => counts[b] - counts[a]).slice(0, COLORS - 1);
  ranking.order = new Uint8Array(D.names.length).fill(COLORS - 1);
  top.forEach((name, i) => { ranking.order[name] = i; });
  const key = (color, text) => el("span", {}, Object.assign(el("i"), { style: `background: var(${color})` }), text);
  $("legend").replaceChildren(...top.map((name, i) => key(`--c${i}`, D.names[name])), key("--c6", "other requests"), key("--wait", "waits"), key("--bad", "failed, lost, waits without a reply"), key("--group", "backward pass"), el("span", {}, "→ request   ⇢ reply   † did not shut down"));
}

function setView(from, to) {
  const span = Math.min(Math.max(to - from, 20), fullSpan()), middle = (from + to) / 2;
  T.from = Math.max(0, Math.min(middle - span / 2, fullSpan() - span));
  T.to = T.from + span;
  requestDraw();
}
function zoom(factor, at = (T.from + T.to) / 2) { setView(at - (at - T.from) * factor, at + (T.to - at) * factor); }
function pan(share) { const by = (T.to - T.from) * share; setView(T.from + by, T.to + by); }

function hitAt(x, y) {
  let best = null, least = 7;
  for (const hit of T.hits) {
    if (hit.line) {
      const d = distance(x, y, hit.line);
      if (d < least) { least = d; best = hit; }
    } else if (!best && x >= hit.x - 2 && x <= hit.x + hit.w + 2 && y >= hit.y && y <= hit.y + hit.h) { best = hit; least = 3; }
  }
  return best;
}
function distance(x, y, [x0, y0, x1, y1]) {
  const dx = x1 - x0, dy = y1 - y0, along = Math.max(0, Math.min(1, ((x - x0) * dx + (y - y0) * dy) / (dx * dx + dy * dy || 1)));
  return Math.hypot(x - x0 - along * dx, y - y0 - along * dy);
}

function select(row, move = true, wait = waitOf(row)) {
  T.selected = row;
  T.wait = wait;
  if (row >= 0 && move) {
    const request = requestOf(row), from = M.start[request < 0 ? row : request], span = Math.max(callTime(request < 0 ? row : request), 50);
    if (from < T.from || from + span > T.to || span < (T.to - T.from) / 400) setView(from - span * 0.6, from + span * 1.6);
  }
  showDetails();
  requestDraw();
}
function step(direction) {
  const items = F.all.items;
  if (!items.length) return;
  const now = T.selected < 0 ? lowerBound(F.all.starts, T.from) : lowerBound(items, T.selected);
  const next = direction < 0 ? now - 1 : items[now] === T.selected ? now + 1 : now;  // the filter may exclude the selected one
  select(items[Math.max(0, Math.min(items.length - 1, next))]);
}

function showDetails() {
  const row = T.selected, box = $("details");
  if (row < 0 && T.wait >= 0) {
    box.replaceChildren(...waitDetails(T.wait));
    return;
  }
  if (row < 0) {
    box.replaceChildren(el("h3", {}, "No message selected"), el("p", { className: "hint" }, "Click an arrow or a bar; n and p step through the messages. Scroll with Ctrl, or after a click, to zoom; drag to move."));
    return;
  }
  const pair = M.pair[row], isReply = M.flags[row] & IS_REPLY, request = requestOf(row);
  const fields = [
    ["Type", kindOf(row)], ["From", actorName(M.source[row])], ["", D.threads[M.senderThread[row]]],
    ["To", actorName(M.target[row])], ["", D.threads[M.receiverThread[row]]],
    ["Sent", M.flags[row] & HAS_SENT ? showMoment(M.start[row], 1e6 / D.tick) : "not recorded"],
    ["Received", M.flags[row] & HAS_RECEIVED ? showMoment(endOf(row), 1e6 / D.tick) : "not recorded"],
    ["Transfer", (M.flags[row] & 3) === 3 ? showTime(M.flight[row]) : ""],
    ["Size", showBytes(M.size[row])], ["Path", PATHS[M.flags[row] >> PATH_SHIFT]],
    ["Message id", `${M.idWorker[row]}.${M.idCounter[row]}`], ["Context", D.contextIds[M.context[row]]],
  ];
  const list = fields.filter(([, value]) => value).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]);
  const buttons = el("div", { className: "row" });
  if (pair >= 0) buttons.append(Object.assign(goButton(isReply ? "Show its request" : "Show its reply", () => select(pair)), { id: "pair" }));
  buttons.append(goButton("Zoom to it", () => { const r = request < 0 ? row : request, t = callTime(r); setView(M.start[r] - t * 0.2, M.start[r] + t * 1.2); }));
  const text = D.texts[M.arguments[request < 0 ? row : request]];
  box.replaceChildren(el("h3", {}, functionOf(row)), el("dl", {}, ...list), ...breakdown(request),
    pair < 0 && M.flags[row] & IS_REQUEST ? el("p", { className: "bad" }, "No reply was recorded.") : "",
    text ? el("div", {}, "Arguments", el("pre", {}, text)) : "", ...waitDetails(T.wait), ...servingStack(request), buttons);
}

/** The wait for the reply to a message, or to the request of a reply; -1: no thread waited. */
function waitOf(row) {
  const request = row < 0 ? row : requestOf(row);
  return request < 0 ? -1 : M.waitRow.indexOf(request);
}
const waitPlace = (wait) => (D.places[wait] || []).map((text) => D.texts[text]).join("; ");
function waitDetails(wait) {
  if (wait < 0) return [];
  const actor = M.waitActor[wait], thread = D.threads[M.waitThread[wait]], begun = M.waitBegun[wait], took = M.waitTime[wait];
  const what = M.waitRow[wait] < 0 ? "a backward pass" : functionOf(M.waitRow[wait]), end = ["", "no reply", "still waits when the trace ends"][M.waitState[wait]];
  return [el("h3", {}, `${actorName(actor)} waited ${showTime(took)}`), el("p", {}, [`for ${what} of ${actorName(M.waitPeer[wait])}`, end, waitPlace(wait)].filter(Boolean).join("; ")),
    ...showStack("Waits in", actor, thread, begun, begun + took)];
}
function servingStack(request) {
  if (request < 0 || !isServed(request)) return [];
  const end = M.ran[request] === NONE ? Infinity : servedAt(request) + M.ran[request];
  return showStack("Runs in", M.target[request], D.threads[M.receiverThread[request]], servedAt(request), end);
}
/** The last stack that was recorded of a thread between two times. */
function showStack(title, actor, thread, from, to) {
  const found = actor < 0 ? undefined : D.stacks.findLast(([process, name, time]) => process === D.actors[actor].process && name === thread && time >= from - 1 && time <= to + 1);
  return found ? [el("div", { className: "stack" }, `${title} ${actorName(actor)}, ${thread}, at ${showMoment(found[2], 1e6 / D.tick)}`, el("pre", { tabIndex: 0 }, D.texts[found[3]]))] : [];
}

/** Where the time of a call went, as a bar with its numbers. */
function breakdown(request) {
  if (request < 0 || !(M.flags[request] & IS_REQUEST) || M.pair[request] < 0) return [];
  const reply = M.pair[request], back = M.flight[reply] === NONE ? 0 : M.flight[reply];
  // The thread may be done only after the reply was sent, which is no part of the call.
  const ran = M.ran[request], until = M.flags[reply] & HAS_SENT ? Math.max(M.start[reply] - servedAt(request), 0) : Infinity;
  const running = ran === NONE ? NONE : Math.min(ran, until), after = ran === NONE ? 0 : ran - running;
  const steps = [["to arrive", M.flight[request], "--c6"], ["in the queue", M.queued[request], "--wait"], ["running", running, "--served"], ["reply", back, "--c2"]].filter(([, t]) => t !== NONE);
  const bar = el("div", { className: "bar" }, ...steps.map(([, t, color]) => Object.assign(el("i"), { style: `flex: ${t + 1}; background: var(${color})` })));
  return [el("h3", {}, `Call: ${showTime(callTime(request))}`), bar,
    el("dl", {}, ...steps.flatMap(([name, t, color]) => [el("dt", {}, Object.assign(el("span", {}, "■ "), { style: `color: var(${color})` }), name), el("dd", {}, showTime(t))]),
      ...(after * D.tick >= 1000 ? [el("dt", {}, "after the reply"), el("dd", {}, showTime(after))] : []))];
}

let listing = 0;
function scheduleListing(first, last) {
  clearTimeout(listing);
  if ($("listing").open) listing = setTimeout(() => list(first, last), 80);
}
function list(first, last) {
  const rows = F.all.items.subarray(first, Math.min(last, first + MAX_LISTED));
  fillTable("messages", ["#Sent", "Function", "Type", "From", "To", "#Transfer", "#Size", "Context"], Array.from(rows, (row) => [
    goButton(showMoment(M.start[row], 1e6 / D.tick), () => select(row, false)), functionOf(row), kindOf(row), actorName(M.source[row]), actorName(M.target[row]),
    (M.flags[row] & 3) === 3 ? showTime(M.flight[row]) : "one end only", showBytes(M.size[row]), D.contextIds[M.context[row]]]));
}

function describe(hit) {
  if (hit.row !== undefined) {
    const served = !hit.line && isServed(hit.row);
    return [functionOf(hit.row), `${kindOf(hit.row)}, ${actorName(M.source[hit.row])} → ${actorName(M.target[hit.row])}`,
      served ? `${isUnfinished(hit.row) ? "has not finished" : `ran ${showTime(M.ran[hit.row])}`}, queued ${showTime(M.queued[hit.row])}` : `${M.flight[hit.row] === NONE ? "one end only" : showTime(M.flight[hit.row])}, ${showBytes(M.size[hit.row])}`];
  }
  if (hit.wait !== undefined) {
    const row = M.waitRow[hit.wait];
    return [`waits ${showTime(M.waitTime[hit.wait])}${["", ", no reply", ", no reply yet"][M.waitState[hit.wait]]}`, `for ${row < 0 ? "a backward pass" : functionOf(row)} of ${actorName(M.waitPeer[hit.wait])}`, D.threads[M.waitThread[hit.wait]]];
  }
  const group = T.allGroups[hit.group];
  return ["backward pass", `context ${group.context.id}`, showTime(group.took)];
}

function listen() {
  const box = canvas(), pointers = new Map();
  let moved = 0, pinch = 0;
  const at = (event) => { const r = box.getBoundingClientRect(); return [event.clientX - r.left, event.clientY - r.top]; };
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== box) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / T.width);
    else zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), timeOf(at(event)[0]));
  }, { passive: false });
  box.addEventListener("pointerdown", (event) => { pointers.set(event.pointerId, at(event)); moved = 0; box.setPointerCapture(event.pointerId); });
  box.addEventListener("pointermove", (event) => {
    const [x, y] = at(event), before = pointers.get(event.pointerId);
    if (!before) { hover(x, y); return; }
    const others = [...pointers].filter(([id]) => id !== event.pointerId);
    if (others.length) {
      const gap = Math.abs(others[0][1][0] - x);
      if (pinch && gap > 10) zoom(pinch / gap, timeOf((others[0][1][0] + x) / 2));
      pinch = gap;
    } else { pan((before[0] - x) / (T.width - T.gutter)); }
    moved += Math.abs(x - before[0]);
    pointers.set(event.pointerId, [x, y]);
  });
  const release = (event) => { pointers.delete(event.pointerId); pinch = 0; };
  box.addEventListener("pointerup", (event) => {
    release(event);
    if (moved > 4) return;
    const [x, y] = at(event), hit = hitAt(x, y);
    if (hit?.row !== undefined) select(hit.row, false);
    else if (hit?.wait !== undefined) select(M.waitRow[hit.wait], false, hit.wait);
    else if (+box.dataset.shown > arrowLimit() && x > T.gutter) zoom(0.25, timeOf(x));
    else select(-1);
  });
  box.addEventListener("pointercancel", release);
  box.addEventListener("pointerleave", () => { $("tip").hidden = true; });
  const keys = { ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2), "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setView(0, fullSpan()), Home: () => setView(0, fullSpan()), n: () => step(1), p: () => step(-1), Escape: () => select(-1) };
  box.addEventListener("keydown", (event) => { const action = keys[event.key]; if (action && !event.ctrlKey && !event.metaKey) { event.preventDefault(); action(); } });
  $("minimap").addEventListener("pointerdown", (event) => $("minimap").setPointerCapture(event.pointerId));
  $("minimap").addEventListener("pointermove", (event) => event.buttons && jump(event));
  $("minimap").addEventListener("click", jump);
  for (const [id, action] of [["zoom-in", () => zoom(0.5)], ["zoom-out", () => zoom(2)], ["fit", () => setView(0, fullSpan())], ["next", () => step(1)], ["previous", () => step(-1)]]) $(id).onclick = action;
  let typing = 0;
  for (const id of ["search", "kind", "worker", "slower", "others"])
    for (const event of ["input", "change"])
      $(id).addEventListener(event, () => { clearTimeout(typing); typing = setTimeout(() => { filter(); layOut(); drawLatency(); }, 120); });
  $("listing").addEventListener("toggle", requestDraw);
  new ResizeObserver(() => { if ($("stage").clientWidth !== T.width) layOut(); }).observe($("stage"));
  for (const [id, action] of [["measure", drawLatency], ["grouping", drawLatency], ["unit", drawTraffic], ["context", drawAutograd], ["axis", drawAutograd]]) $(id).addEventListener("input", action);
  $("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}
function jump(event) {
  const x = event.clientX - $("minimap").getBoundingClientRect().left, t = ((x - T.gutter) / (T.width - T.gutter)) * fullSpan(), half = (T.to - T.from) / 2;
  setView(t - half, t + half);
}
function hover(x, y) {
  const hit = hitAt(x, y), tip = $("tip");
  tip.hidden = !hit;
  canvas().style.cursor = hit ? "pointer" : "grab";
  if (!hit) return;
  const [title, ...lines] = describe(hit);
  tip.replaceChildren(el("b", {}, title), ...lines.filter(Boolean).map((line) => el("div", {}, line)));
  tip.style.left = `${Math.min(x + 14, Math.max(0, T.width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + 66}px`;
}

// ---- charts ----------------------------------------------------------------------------------------------

async function loadCharts() {
  const script = el("script");
  script.textContent = new TextDecoder().decode(await unpack("charts"));
  document.head.append(script);
  plotly = globalThis.Plotly;
}
function chart(id, traces, layout, height = 340) {
  if (!plotly) return undefined;
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), linecolor: css("--line"), automargin: true };
  $(id).style.minHeight = `${height}px`;
  return plotly.react($(id), traces, {
    height, margin: { l: 50, r: 12, t: 12, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), family: "system-ui, sans-serif", size: 12 },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, hoverlabel: { bgcolor: css("--ink"), font: { color: css("--bg") } }, ...layout, xaxis: { ...axis, ...layout.xaxis }, yaxis: { ...axis, ...layout.yaxis },
  }, { displayModeBar: false, responsive: true });
}

const MEASURES = {
  call: (row) => (M.flags[row] & IS_REQUEST && M.pair[row] >= 0 && M.flags[M.pair[row]] & HAS_RECEIVED ? callTime(row) : NONE),
  queued: (row) => M.queued[row], ran: (row) => M.ran[row], flight: (row) => ((M.flags[row] & 3) === 3 ? M.flight[row] : NONE),
};
const GROUPINGS = { name: (row) => (M.name[row] ? M.name[row] : -M.kind[row]), kind: (row) => M.kind[row], target: (row) => M.target[row] };
const GROUP_NAMES = { name: (key) => (key > 0 ? D.names[key] : D.kinds[-key]), kind: (key) => D.kinds[key], target: actorName };

function drawLatency() {
  const measure = MEASURES[$("measure").value], grouping = $("grouping").value, groupOf = GROUPINGS[grouping], groups = new Map();
  for (const row of F.all.items) {
    const ticks = measure(row);
    if (ticks === NONE) continue;
    const key = groupOf(row);
    let values = groups.get(key);
    if (!values) groups.set(key, (values = []));
    values.push(ticks);
  }
  const sorted = [...groups].map(([key, values]) => [key, Float64Array.from(values).sort()]).sort((a, b) => b[1].length - a[1].length);
  const at = (values, share) => showTime(values[Math.max(0, Math.ceil(values.length * share) - 1)]);
  fillTable("percentiles", [$("grouping").selectedOptions[0].text, "#Count", "#p50", "#p90", "#p99", "#Longest"], sorted.slice(0, 40).map(([key, values]) =>
    [GROUP_NAMES[grouping](key), showCount(values.length), at(values, 0.5), at(values, 0.9), at(values, 0.99), at(values, 1)]));
  const traces = sorted.slice(0, COLORS - 1).map(([key, values], i) => histogram(GROUP_NAMES[grouping](key), values, grouping === "name" ? (key > 0 ? colorOf(key) : COLORS - 1) : i));
  const rest = sorted.slice(COLORS - 1).flatMap(([, values]) => Array.from(values));
  if (rest.length) traces.push(histogram("other", rest, COLORS - 1));
  const powers = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11];
  const nothing = { xaxis: { visible: false }, yaxis: { visible: false }, annotations: [{ text: "Nothing matches.", showarrow: false, font: { size: 14 } }] };
  chart("latency-chart", traces, !traces.length ? nothing : { barmode: "stack", hovermode: "closest", bargap: 0.06, yaxis: { title: { text: "count" } }, xaxis: { title: { text: "" }, tickvals: powers, ticktext: ["100 ns", "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s", "100 s"] } });
}
function histogram(name, values, color) {
  const bins = new Map();
  for (const ticks of values) { const bin = Math.floor(Math.log10(Math.max(ticks * D.tick, 1)) * 10); bins.set(bin, (bins.get(bin) || 0) + 1); }
  const keys = [...bins.keys()].sort((a, b) => a - b);
  return { type: "bar", name: name.length > 34 ? `…${name.slice(-32)}` : name, x: keys.map((k) => (k + 0.5) / 10), y: keys.map((k) => bins.get(k)), width: 0.1, marker: { color: css(`--c${color}`) },
    customdata: keys.map((k) => showTime(10 ** (k / 10) / D.tick)), hovertemplate: "from %{customdata}: %{y}<extra>%{fullData.name}</extra>" };
}

function heatmap(id, actors, z, text, xTitle, yTitle) {
  const names = actors.map(actorName), dark = document.documentElement.dataset.theme === "dark";
  const peak = Math.max(1e-9, ...z.flat()), colors = dark ? ["#1c252e", "#2a5fb8", "#8fbaff"] : ["#eef3fb", "#7fa9ea", "#1d4fae"];
  return chart(id, [{ type: "heatmap", x: names, y: names, z: z.map((r) => r.map((v) => (v ? v : null))), colorscale: colors.map((c, i) => [i / 2, c]), zmin: 0, zmax: peak, showscale: false, xgap: 3, ygap: 3, hoverongaps: false,
    text, hovertemplate: "%{y} → %{x}: %{text}<extra></extra>", texttemplate: actors.length <= 12 ? "%{text}" : "" }],
  { xaxis: { title: { text: xTitle }, showgrid: false, type: "category" }, yaxis: { title: { text: yTitle, standoff: 12 }, showgrid: false, autorange: "reversed", type: "category" } }, Math.max(300, Math.min(900, 110 + actors.length * 46)));
}
const workers = () => D.actors.map((_, i) => i).filter((i) => D.actors[i].isWorker);

function drawTraffic() {
  const bytes = $("unit").value === "bytes", actors = workers(), place = new Map(actors.map((a, i) => [a, i])), z = actors.map(() => actors.map(() => 0));
  for (let row = 0; row < M.count; row++) {
    const y = place.get(M.source[row]), x = place.get(M.target[row]);
    if (x !== undefined && y !== undefined) z[y][x] += bytes ? M.size[row] : 1;
  }
  heatmap("traffic-chart", actors, z, z.map((r) => r.map((v) => (!v ? "" : bytes ? showBytes(v) : showCount(v)))), "to", "from");
}

function drawWaits() {
  const actors = workers(), place = new Map(actors.map((a, i) => [a, i])), z = actors.map(() => actors.map(() => 0));
  M.waitActor.forEach((actor, i) => { const y = place.get(actor), x = place.get(M.waitPeer[i]); if (x !== undefined && y !== undefined) z[y][x] += M.waitTime[i]; });
  heatmap("waits-chart", actors, z, z.map((r) => r.map((v) => (v ? showTime(v) : ""))), "is waited for", "waits");
}
function fillWaits() {
  const rows = [...M.waitActor.keys()].sort((a, b) => (M.waitState[b] > 0) - (M.waitState[a] > 0) || M.waitTime[b] - M.waitTime[a]).slice(0, 50);
  fillTable("wait-table", ["#Time", "State", "Worker", "Thread", "For", "Of", "Where its request is", ""], rows.map((i) => [
    showTime(M.waitTime[i]), M.waitState[i] ? el("span", { className: "bad" }, ["", "no reply", "still waits"][M.waitState[i]]) : "ended", actorName(M.waitActor[i]), D.threads[M.waitThread[i]],
    M.waitRow[i] < 0 ? "a backward pass" : functionOf(M.waitRow[i]), actorName(M.waitPeer[i]), waitPlace(i), goButton("Show", () => show(M.waitRow[i], M.waitBegun[i], M.waitTime[i], i))]));
  const cycles = D.findings.filter((f) => f.kind === "deadlock");
  $("cycles").replaceChildren(cycles.length ? el("span", { className: "bad" }, cycles.map((f) => `${f.title}. ${f.detail}`).join(" ")) : el("span", { className: "hint" }, `${showCount(M.waitActor.length)} waits; no workers wait for each other in a circle. The longest:`));
}

/** The graph of a context: workers as rows, tensors that were sent as arrows, and the gradients that return. */
function drawAutograd() {
  const context = D.contexts[+$("context").value || 0];
  if (!context) { $("context-text").textContent = "The trace has no distributed autograd context."; $("autograd-chart").hidden = $("context").closest(".toolbar").hidden = true; return; }
  const byTime = $("axis").value === "time", origin = Math.min(...context.sends.map((s) => s[4]), ...context.groups.map((g) => g[1]), ...context.passes.map((p) => p[1]));
  const moments = new Set([...context.sends.flatMap((s) => [s[4], s[3] >= 0 ? endOf(s[3]) : s[4] + 1]), ...context.groups.map((g) => g[1]), ...context.passes.map((p) => p[1])]);
  const order = new Map([...moments].sort((a, b) => a - b).map((t, i) => [t, i])), place = (t) => (byTime ? ((t - origin) * D.tick) / 1e6 : order.get(t));
  const edges = { forward: [[], [], []], unused: [[], [], []], gradient: [[], [], []] };
  const edge = (kind, x0, y0, x1, y1, text) => { edges[kind][0].push(x0, x1, null); edges[kind][1].push(actorName(y0), actorName(y1), null); edges[kind][2].push(text, text, ""); };
  for (const [id, actor, peer, row, time, unused] of context.sends)
    edge(unused ? "unused" : "forward", place(time), actor, place(row >= 0 ? endOf(row) : time + 1), peer, `${unused ? "send without a gradient" : "send"} ${id}${row >= 0 ? `<br>${functionOf(row).replaceAll("<", "&lt;")}` : ""}`);
  const runs = new Map(context.groups.flatMap((g) => g[3].map((id) => [id, g])));
  for (const [actor, began, , , recvs] of context.groups)
    for (const id of recvs) { const next = runs.get(id); if (next) edge("gradient", place(began), actor, place(next[1]), next[0], `gradient of send ${id}`); }
  const line = (name, [x, y, text], color, dash) => ({ type: "scatter", mode: "lines+markers", name, x, y, text, hovertemplate: "%{text}<extra></extra>", line: { color: css(color), width: 1.6, dash }, marker: { symbol: "arrow", angleref: "previous", color: css(color), size: x.map((_, i) => (i % 3 === 1 ? 11 : 0)) } });
  const groups = context.groups, traces = [line("tensors sent", edges.forward, "--c0"), line("gradients", edges.gradient, "--group", "dot"), line("sent, no gradient", edges.unused, "--bad", "dash"),
    { type: "scatter", mode: "markers", name: "groups of nodes run", x: groups.map((g) => place(g[1])), y: groups.map((g) => actorName(g[0])), marker: { symbol: "square", size: 11, color: css("--group") }, text: groups.map((g) => `${g[3].length || "roots, no"} sends complete, gradients to ${g[4].length}<br>took ${showTime(g[2])}, began ${showTime(g[1] - origin)} after the first`), hovertemplate: "%{y}: %{text}<extra></extra>" },
    { type: "scatter", mode: "markers", name: "backward()", x: context.passes.map((p) => place(p[1])), y: context.passes.map((p) => actorName(p[0])), marker: { symbol: "star", size: 13, color: css("--wait") }, text: context.passes.map((p) => (p[2] === null ? "has not ended" : `${p[3] ? "failed after" : "took"} ${showTime(p[2] - p[1])}`)), hovertemplate: "backward() %{text}<extra></extra>" }].filter((t) => t.x.length);
  const involved = workers().filter((a) => traces.some((t) => t.y.includes(actorName(a)))), unused = context.sends.filter((s) => s[5]).length;
  $("context-text").textContent = `${showNumber(context.sends.length, "send")}, ${showNumber(context.groups.length, "group")} run, ${showNumber(context.passes.length, "backward pass")}${unused ? `; ${showNumber(unused, "send")} got no gradient` : ""}.`;
  chart("autograd-chart", traces, { xaxis: { title: { text: byTime ? "ms since the first send" : "order of events" }, showticklabels: byTime, showgrid: byTime }, yaxis: { categoryorder: "array", categoryarray: involved.map(actorName).reverse(), type: "category" }, margin: { l: 80, r: 24, t: 12, b: 44 } }, Math.max(320, 130 + involved.length * 70));
}

// ---- page ------------------------------------------------------------------------------------------------

function fillOverview() {
  const count = workers().length, lost = D.lost, bytes = M.size.reduce((a, b) => a + b, 0);
  const dropped = new Map(D.actors.map((a) => [`${a.host} ${a.pid}`, a.dropped])), events = [...dropped.values()].reduce((a, b) => a + b, 0);
  const bounds = D.actors.map((a) => a.bound), bound = bounds.includes(null) ? "unknown" : Math.max(...bounds) ? `± ${showTime(Math.max(...bounds) / D.tick)}` : "one clock";
  const problems = D.findings.filter((f) => f.severity === "problem").length, warnings = D.findings.filter((f) => f.severity === "warning").length;
  const cards = [["Workers", count], ["Duration", showTime(D.duration / D.tick)], ["Messages", showCount(M.count), lost ? `${showCount(lost)} not received` : ""], ["Bytes", showBytes(bytes)], ["Backward passes", showCount(D.contexts.reduce((n, c) => n + c.passes.length, 0))], ["Dropped events", showCount(events)], ["Clocks", bound], ["Problems", problems, warnings ? `${warnings} ${warnings === 1 ? "warning" : "warnings"}` : ""]];
  $("overview").replaceChildren(...cards.map(([name, value, note]) => el("div", {}, el("dt", {}, name), el("dd", {}, `${value} `, note ? el("small", {}, note) : null))));
  $("subtitle").textContent = `${D.program || D.directory} · ${new Date(D.wall).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" })}`;
}
function show(row, time, span, wait = waitOf(row)) {
  T.selected = row;
  T.wait = wait;
  showDetails();
  if (row >= 0) { const t = Math.max(callTime(requestOf(row) < 0 ? row : requestOf(row)), 50); setView(M.start[row] - t * 0.6, M.start[row] + t * 1.6); }
  else if (time !== null) setView(time - (span || 1000) * 0.5, time + (span || 1000) * 1.5);
  $("timeline").scrollIntoView();
  canvas().focus({ preventScroll: true });
}
function fillFindings() {
  const items = D.findings.map((f) => el("li", { className: f.severity }, el("b", {}, el("span", { className: "tag" }, f.severity), f.title), el("p", {}, f.detail), f.row >= 0 || f.time !== null ? goButton("Show", () => show(f.row, f.time)) : null));
  const hidden = items.slice(8);
  for (const item of hidden) item.hidden = true;
  $("more-findings").hidden = !hidden.length;
  $("more-findings").textContent = `Show ${hidden.length} more`;
  $("more-findings").onclick = () => { for (const item of hidden) item.hidden = false; $("more-findings").hidden = true; };
  $("finding-list").replaceChildren(...(items.length ? items : [el("li", { className: "note" }, "Nothing stands out.")]));
}
function fillProcesses() {
  $("notes").replaceChildren(...D.notes.map((note) => el("li", { className: "bad" }, note)));
  fillTable("process-table", ["Name", "Role", "Host", "#Process", "Clock error", "#Dropped", "Ended"], D.actors.map((a) => [a.name, a.role, a.host, String(a.pid), a.bound === null ? el("span", { className: "bad" }, "unknown: no messages both ways") : a.bound ? `± ${showTime(a.bound / D.tick)}` : "none", showCount(a.dropped), a.stopped ? "closed" : el("span", { className: "bad" }, "killed, or still ran")]));
}
function fillSelects() {
  for (const [kind, name] of Object.entries(D.kinds).sort((a, b) => a[1].localeCompare(b[1]))) $("kind").append(el("option", { value: kind }, name));
  for (const actor of workers()) $("worker").append(el("option", { value: actor }, actorName(actor)));
  D.contexts.forEach((c, i) => $("context").append(el("option", { value: i }, `${c.id} (${showNumber(c.sends.length, "send")}, ${showNumber(c.groups.length, "group")})`)));
  const busiest = D.contexts.reduce((best, c, i) => (c.sends.length + c.groups.length > (D.contexts[best].sends.length + D.contexts[best].groups.length) ? i : best), 0);
  $("context").value = busiest;
  $("others").checked = !workers().length;
}
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  T.style = null;
  if (F) { requestDraw(); drawCharts(); }
}
function drawCharts() { drawLatency(); drawTraffic(); drawAutograd(); drawWaits(); }

async function main() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  readData(await unpack("data"));
  fillOverview(); fillFindings(); fillSelects(); rankNames(); prepareTimeline(); filter(); layOut(); showDetails(); listen(); fillWaits(); fillProcesses(); drawLatency();
  document.body.dataset.ready = "timeline";
  await new Promise((resolve) => setTimeout(resolve, 30));  // the timeline is painted before the charts load
  await loadCharts();
  drawCharts();
  document.body.dataset.ready = "all";
}
main().catch((error) => {
  $("failure").hidden = false;
  $("failure").textContent = `The report cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
