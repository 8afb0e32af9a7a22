// The timeline: a canvas with a lane for each actor.

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
