// What the timeline responds to, and the details of what is selected in it.

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
