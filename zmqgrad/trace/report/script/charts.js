// Plotly's charts.

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

/** A text for Plotly, which takes what follows a < for a tag: a name could have a link to anywhere. */
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
const label = (actor) => plain(actorName(actor));

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
  return { type: "bar", name: plain(name.length > 34 ? `…${name.slice(-32)}` : name), x: keys.map((k) => (k + 0.5) / 10), y: keys.map((k) => bins.get(k)), width: 0.1, marker: { color: css(`--c${color}`) },
    customdata: keys.map((k) => showTime(10 ** (k / 10) / D.tick)), hovertemplate: "from %{customdata}: %{y}<extra>%{fullData.name}</extra>" };
}

function heatmap(id, names, z, text, xTitle, yTitle) {
  const dark = document.documentElement.dataset.theme === "dark";
  const peak = z.flat().reduce((a, b) => Math.max(a, b), 1e-9), colors = dark ? ["#1c252e", "#2a5fb8", "#8fbaff"] : ["#eef3fb", "#7fa9ea", "#1d4fae"];
  return chart(id, [{ type: "heatmap", x: names, y: names, z: z.map((r) => r.map((v) => (v ? v : null))), colorscale: colors.map((c, i) => [i / 2, c]), zmin: 0, zmax: peak, showscale: false, xgap: 3, ygap: 3, hoverongaps: false,
    text, hovertemplate: "%{y} → %{x}: %{text}<extra></extra>", texttemplate: names.length <= 12 ? "%{text}" : "" }],
  { xaxis: { title: { text: xTitle }, showgrid: false, type: "category" }, yaxis: { title: { text: yTitle, standoff: 12 }, showgrid: false, autorange: "reversed", type: "category" } }, Math.max(300, Math.min(900, 110 + names.length * 46)));
}
const workers = () => D.actors.map((_, i) => i).filter((i) => D.actors[i].isWorker);

/** A matrix with one row for all workers of a name, as Plotly has it: some were started again. */
function matrix() {
  const names = [...new Set(workers().map(label))];
  return { names, place: new Map(workers().map((a) => [a, names.indexOf(label(a))])), z: names.map(() => names.map(() => 0)) };
}

function drawTraffic() {
  const bytes = $("unit").value === "bytes", { names, place, z } = matrix();
  for (let row = 0; row < M.count; row++) {
    const y = place.get(M.source[row]), x = place.get(M.target[row]);
    if (x !== undefined && y !== undefined) z[y][x] += bytes ? M.size[row] : 1;
  }
  heatmap("traffic-chart", names, z, z.map((r) => r.map((v) => (!v ? "" : bytes ? showBytes(v) : showCount(v)))), "to", "from");
}

function drawWaits() {
  const { names, place, z } = matrix();
  M.waitActor.forEach((actor, i) => { const y = place.get(actor), x = place.get(M.waitPeer[i]); if (x !== undefined && y !== undefined) z[y][x] += M.waitTime[i]; });
  heatmap("waits-chart", names, z, z.map((r) => r.map((v) => (v ? showTime(v) : ""))), "is waited for", "waits");
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
  const edge = (kind, x0, y0, x1, y1, text) => { edges[kind][0].push(x0, x1, null); edges[kind][1].push(label(y0), label(y1), null); edges[kind][2].push(text, text, ""); };
  for (const [id, actor, peer, row, time, unused] of context.sends)
    edge(unused ? "unused" : "forward", place(time), actor, place(row >= 0 ? endOf(row) : time + 1), peer, `${unused ? "send without a gradient" : "send"} ${id}${row >= 0 ? `<br>${plain(functionOf(row))}` : ""}`);
  const runs = new Map(context.groups.flatMap((g) => g[3].map((id) => [id, g])));
  for (const [actor, began, , , recvs] of context.groups)
    for (const id of recvs) { const next = runs.get(id); if (next) edge("gradient", place(began), actor, place(next[1]), next[0], `gradient of send ${id}`); }
  const line = (name, [x, y, text], color, dash) => ({ type: "scatter", mode: "lines+markers", name, x, y, text, hovertemplate: "%{text}<extra></extra>", line: { color: css(color), width: 1.6, dash }, marker: { symbol: "arrow", angleref: "previous", color: css(color), size: x.map((_, i) => (i % 3 === 1 ? 11 : 0)) } });
  const groups = context.groups, traces = [line("tensors sent", edges.forward, "--c0"), line("gradients", edges.gradient, "--group", "dot"), line("sent, no gradient", edges.unused, "--bad", "dash"),
    { type: "scatter", mode: "markers", name: "groups of nodes run", x: groups.map((g) => place(g[1])), y: groups.map((g) => label(g[0])), marker: { symbol: "square", size: 11, color: css("--group") }, text: groups.map((g) => `${g[3].length || "roots, no"} sends complete, gradients to ${g[4].length}<br>took ${showTime(g[2])}, began ${showTime(g[1] - origin)} after the first`), hovertemplate: "%{y}: %{text}<extra></extra>" },
    { type: "scatter", mode: "markers", name: "backward()", x: context.passes.map((p) => place(p[1])), y: context.passes.map((p) => label(p[0])), marker: { symbol: "star", size: 13, color: css("--wait") }, text: context.passes.map((p) => (p[2] === null ? "has not ended" : `${p[3] ? "failed after" : "took"} ${showTime(p[2] - p[1])}`)), hovertemplate: "backward() %{text}<extra></extra>" }].filter((t) => t.x.length);
  const involved = workers().filter((a) => traces.some((t) => t.y.includes(label(a)))), unused = context.sends.filter((s) => s[5]).length;
  $("context-text").textContent = `${showNumber(context.sends.length, "send")}, ${showNumber(context.groups.length, "group")} run, ${showNumber(context.passes.length, "backward pass")}${unused ? `; ${showNumber(unused, "send")} got no gradient` : ""}.`;
  chart("autograd-chart", traces, { xaxis: { title: { text: byTime ? "ms since the first send" : "order of events" }, showticklabels: byTime, showgrid: byTime }, yaxis: { categoryorder: "array", categoryarray: [...new Set(involved.map(label))].reverse(), type: "category" }, margin: { l: 80, r: 24, t: 12, b: 44 } }, Math.max(320, 130 + involved.length * 70));
}
