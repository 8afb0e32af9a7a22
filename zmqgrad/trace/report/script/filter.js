// Which messages are shown.

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
