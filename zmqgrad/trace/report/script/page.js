// The page around them, and what it does when it is opened.

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
