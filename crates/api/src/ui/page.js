// The page: receives the state of the fleet once a second and shows it. Owns: the stream, the key, and
// every panel but those of the events, the workers and the prompt. Never: requests from another server,
// or shows text of a client.
import { clock, showEvents } from "./event_log.js";
import { events } from "./events.js";
import { prepare } from "./prompt.js";
import { followTheme } from "./theme.js";
import { Workers } from "./workers.js";
import { $, make, number, rate, say, time } from "./words.js";

function amount(bytes) {
  const [value, unit] = rate(bytes);
  return `${value} ${unit.slice(0, -2)}`;
}

const sum = (values) => values.reduce((all, value) => all + value, 0);

// === state

const rows = new Map();
let columns = [];
/** Workers that need an operator, in words; empty if there are none. */
let trouble = "";
const workers = new Workers(rows);
followTheme(() => workers.draw());

/** Output tokens of each second of the last minute. */
let tokens = [];

function hear(kind, board) {
  if (kind === "snapshot") {
    columns = board.columns;
    rows.clear();
  }
  for (const name of board.gone) rows.delete(name);
  for (const values of board.workers) {
    const row = {};
    columns.forEach((column, at) => { row[column] = values[at]; });
    rows.set(row.name, row);
  }
  const now = sum([...rows.values()].map((row) => row.tokens_per_second ?? 0));
  if (kind === "snapshot") tokens = board.history.map((second) => second[3]);
  else tokens = [...tokens.slice(1), now];
  show(board);
  document.body.dataset.boards = Number(document.body.dataset.boards ?? 0) + 1;
}

function show(board) {
  const started = performance.now();
  tiles(board);
  way(board);
  classes(board.classes);
  showEvents(board.events);
  handoffs(board);
  scaling(board.scaling);
  workers.update(board.lost);
  prepare(board.classes);
  say($("uptime"), `up ${span(board.uptime_seconds)}`);
  document.body.dataset.renderMs = (performance.now() - started).toFixed(1);
}

function span(seconds) {
  if (seconds < 120) return `${seconds} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86_400)} d`;
}

// === summary

function tiles(board) {
  const column = (at) => board.history.map((second) => second[at]);
  // Every tile is about the same time: the last minute, or the time since the start if that is less.
  const seconds = Math.max(1, Math.min(board.history.length, board.uptime_seconds));
  const perSecond = (values) => sum(values) / seconds;
  const good = sum(board.classes.map((one) => one.goodput));
  say($("goodput"), number(good));
  const devices = Math.max(1, board.devices);
  say($("goodput-note"), `${number(good / devices)} per device, of ${number(board.devices)}`);
  const minute = tally(board.classes.map((one) => one.minute));
  const taken = minute.good + minute.late + minute.failed;
  say($("kept"), taken ? percent(minute.good / taken) : "–");
  const missed = ["late", "refused", "failed"].filter((verdict) => minute[verdict]);
  const misses = missed.map((verdict) => `${number(minute[verdict])} ${verdict}`).join(", ");
  say($("kept-note"), misses || (taken ? "none missed" : "nothing in the last minute"));
  const begun = column(0);
  say($("arrivals"), number(perSecond(begun)));
  const flights = board.flights;
  const all = flights.queued + flights.reserved + flights.prefill + flights.transfer + flights.decode;
  say($("arrivals-note"), `${number(all)} running now`);
  const output = perSecond(tokens);
  say($("tokens"), number(output >= 10 ? Math.round(output) : output));
  say($("tokens-note"), `${number(flights.decode)} decoding now`);
  const bytes = column(4);
  const [value, unit] = rate(perSecond(bytes));
  say($("bandwidth"), value);
  say($("bandwidth-unit"), unit);
  const { landed_total: landed, joined_total: joined } = board.handoffs;
  say($("bandwidth-note"), landed + joined ? `${percent(landed / (landed + joined))} % of requests` : "no request yet");
  spark($("spark-good"), column(1));
  spark($("spark-missed"), column(2));
  spark($("spark-begun"), begun);
  spark($("spark-tokens"), tokens);
  spark($("spark-bytes"), bytes);
  fleet(board);
}

function fleet(board) {
  const counts = { prefill: 0, decode: 0, both: 0 };
  const states = { draining: 0, stuck: 0, lost: board.lost.length };
  for (const row of rows.values()) {
    counts[row.role] += 1;
    if (row.state !== "ready") states[row.state] += 1;
  }
  say($("workers-count"), number(board.workers_count));
  const other = Object.entries(states).filter(([, count]) => count).map(([state, count]) => `${number(count)} ${state}`);
  const healthy = board.workers_count ? "all ready" : "connected";
  say($("workers-unit"), other.length ? other.join(", ") : healthy);
  say($("workers-note"), Object.entries(counts).filter(([, count]) => count).map(([role, count]) => `${number(count)} ${role}`).join(", ") || "none is connected");
  trouble = board.workers_count ? ["stuck", "lost"].filter((state) => states[state]).map((state) => `${number(states[state])} ${state}`).join(", ") : "no worker";
  const bar = $("pools");
  Object.entries(counts).forEach(([role, count], at) => {
    const part = bar.children[at] ?? bar.appendChild(make("i"));
    part.style.flexGrow = count;
    part.style.background = `var(--${role})`;
    part.hidden = !count;
  });
}

function tally(verdicts) {
  const all = { good: 0, late: 0, refused: 0, failed: 0 };
  for (const one of verdicts) for (const key of Object.keys(all)) all[key] += one[key];
  return all;
}

function percent(share) {
  const value = share * 100;
  return value === 100 || value === 0 ? value.toFixed(0) : value >= 99.95 ? ">99.9" : value.toFixed(1);
}

/** Draws a line with the area under it. */
function spark(svg, values, width = 100, height = 30) {
  const most = Math.max(...values, 1e-9);
  const step = width / (values.length - 1);
  const points = values.map((value, at) => `${(at * step).toFixed(2)},${(height - 2 - (value / most) * (height - 6)).toFixed(2)}`);
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    for (const name of ["area", "line"]) {
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("class", name);
      svg.append(path);
    }
  }
  const line = `M${points.join("L")}`;
  svg.firstChild.setAttribute("d", `${line}L${width},${height}L0,${height}Z`);
  svg.lastChild.setAttribute("d", line);
}

// === flights

const WAY = [
  ["queued", "Queued", "queued", [["wait", "router_queue"]]],
  ["reserved", "Reserving KV", "queued", []],
  ["prefill", "Prefill", "prefill", [["wait", "prefill_wait"], ["run", "prefill"]]],
  ["transfer", "Transfer", "transfer", [["wait", "transfer"]]],
  ["decode", "Decode", "decode", [["wait", "decode_wait"], ["run", "decode"]]],
];

function way(board) {
  const list = $("way");
  const took = Object.fromEntries(board.stages);
  const most = Math.max(1, ...WAY.map(([key]) => board.flights[key]));
  WAY.forEach(([key, name, tone, stages], at) => {
    let item = list.children[at];
    if (!item) {
      item = list.appendChild(make("li", `tone-${tone}`));
      const title = make("span", "name");
      title.append(make("i"), make("span", "", name));
      const share = make("div", "share");
      share.append(make("i"));
      item.append(title, make("b"), share, make("p", "muted"));
    }
    const [, count, share, note] = item.children;
    say(count, number(board.flights[key]));
    share.firstChild.style.width = `${(board.flights[key] / most) * 100}%`;
    const times = stages.map(([word, stage]) => took[stage] && `${word} ${time(took[stage].p50_ms)}, p99 ${time(took[stage].p99_ms)}`).filter(Boolean);
    say(note, key === "reserved" ? "its time is part of Queued" : times.join("\n") || "–");
  });
  const { moving } = board.flights;
  say($("flights-note"), `counts: now; times: p50 and p99 of the last minute${moving ? ` · ${number(moving)} migrating to another worker` : ""}`);
}

// === classes

const VERDICTS = [["good", "met", "●"], ["late", "late", "▲"], ["refused", "refused", "◆"], ["failed", "failed", "✕"]];

function classes(all) {
  const body = $("classes");
  while (body.children.length > all.length) body.lastChild.remove();
  all.forEach((one, at) => {
    const row = body.children[at] ?? body.appendChild(classRow());
    const [name, kept, outcomes, ttft, tpot] = row.children;
    say(name.firstChild, one.name);
    say(name.lastChild, `${number(one.goodput)} req/s`);
    const { good, late, refused, failed } = one.minute;
    const taken = good + late + failed;
    const [share, verdict, goal] = kept.children;
    say(share, taken ? `${percent(good / taken)} %` : "–");
    const met = one.goal === null || !taken ? "" : good / taken >= one.goal ? "yes" : "no";
    verdict.dataset.verdict = met;
    say(verdict, { yes: " ✓", no: " ✕ below", "": "" }[met]);
    say(goal, one.goal === null ? "no target" : `target ${percent(one.goal)} %`);
    const total = taken + refused;
    VERDICTS.forEach(([key], index) => {
      const part = outcomes.firstChild.children[index];
      part.style.flexGrow = one.minute[key];
      part.hidden = !one.minute[key];
    });
    const words = VERDICTS.filter(([key]) => one.minute[key]).map(([key, word]) => `${number(one.minute[key])} ${word}`);
    say(outcomes.lastChild, total ? words.join(", ") : "none");
    bullet(ttft, one.ttft, one.ttft_target_ms);
    bullet(tpot, one.tpot, one.tpot_target_ms);
  });
}

function classRow() {
  const row = make("tr");
  const name = make("th");
  name.scope = "row";
  name.append(make("div"), make("div", "counts"));
  const kept = make("td", "kept");
  kept.append(make("b"), make("span"), make("div", "counts"));
  const outcomes = make("td");
  const bar = make("div", "outcomes");
  for (const [key] of VERDICTS) bar.append(make("i", `o-${key}`));
  outcomes.append(bar, make("div", "counts"));
  row.append(name, kept, outcomes, bulletCell(), bulletCell());
  return row;
}

function bulletCell() {
  const cell = make("td");
  const track = make("div", "bullet");
  track.append(make("span", "target"), make("i", "p99"), make("i", "p90"), make("i", "p50"));
  cell.append(track, make("div", "quantiles"));
  return cell;
}

/** The target is at two thirds of the track. */
function bullet(cell, took, target) {
  const [track, text] = cell.children;
  const [mark, ...marks] = track.children;
  mark.hidden = !target;
  track.classList.toggle("open", !target);
  const end = target ? target * 1.5 : took ? took.p99_ms * 1.2 : 1;
  for (const one of marks) {
    const name = one.classList[0];
    const value = took?.[`${name}_ms`];
    one.hidden = value === undefined;
    if (value === undefined) continue;
    one.style.left = `${Math.min(value / end, 0.985) * 100}%`;
    one.classList.toggle("over", Boolean(target) && value > target);
  }
  const goal = target ? ` of ${time(target)}` : "";
  say(text, took ? `${time(took.p50_ms)} · p99 ${time(took.p99_ms)}${goal}` : target ? `target ${time(target)}` : "–");
}

// === KV transfer, scaling

function table(body, lines) {
  while (body.children.length > lines.length) body.lastChild.remove();
  lines.forEach((line, at) => {
    let row = body.children[at];
    if (!row) {
      row = body.appendChild(make("tr"));
      for (const [, name] of line) row.append(make("td", name ?? ""));
    }
    line.forEach(([text], index) => say(row.children[index], text));
  });
}

function handoffs(board) {
  spark($("chart-bytes"), board.history.map((second) => second[4]), 100, 64);
  const { bytes_total: bytes, landed_total: landed, joined_total: joined, links } = board.handoffs;
  say($("handoff-note"), `${number(landed)} transfers, ${amount(bytes)} since the start; ${number(joined)} requests needed none`);
  const line = (link) => [
    [link.transport], [number(link.count), "num"],
    [rate(link.mean_bytes_per_second).join(" "), "num"], [rate(link.slowest_bytes_per_second).join(" "), "num"],
  ];
  table($("links"), links.length ? links.map(line) : [[["no link yet"], ["", "num"], ["", "num"], ["", "num"]]]);
}

function scaling(wanted) {
  $("scaling").hidden = !wanted;
  if (!wanted) return;
  say($("scaling-note"), wanted.advisory ? "mode: advise; workers are not started or stopped" : "");
  const sign = (pool) => (pool.wanted > pool.workers ? "▲ " : pool.wanted < pool.workers ? "▼ " : "");
  const several = new Set(wanted.pools.map((pool) => pool.model)).size > 1;
  const title = (of) => (several ? `${of.model}: ${of.pool}` : of.pool);
  table($("wanted"), wanted.pools.map((pool) => [[title(pool)], [number(pool.workers), "num"], [`${sign(pool)}${number(pool.wanted)}`, "num"], [pool.reason]]));
  table($("decisions"), wanted.recent.map((step) => [[clock(step.at_ms), "when"], [title(step)], [`${step.from} → ${step.to}`], [step.reason, "why"]]));
}

// === the stream

let stop = null;
let retry = 1;
let paused = false;
let key = sessionStorage.getItem("cleave-admin-key") ?? "";
/** Time of the last event of the stream, in milliseconds since 1970. */
let heard = null;

/** Shows the state of the connection. Figures that are not followed any more are dimmed. */
function stand(state, text) {
  $("status").dataset.state = state;
  document.body.dataset.stale = String(state === "lost" && heard !== null);
  say($("status-text"), text);
}

async function listen() {
  stop?.abort();
  const control = new AbortController();
  stop = control;
  try {
    const headers = { accept: "text/event-stream" };
    if (key) headers.authorization = `Bearer ${key}`;
    const answer = await fetch("ui/events", { headers, signal: control.signal, cache: "no-store", credentials: "omit" });
    if (answer.status === 401) return ask(key ? "This is not the key." : "");
    if (!answer.ok) {
      const said = await answer.json().catch(() => null);
      throw new Error(said?.error?.message ?? `status ${answer.status}`);
    }
    await read(answer.body);
    throw new Error("the server ended the stream");
  } catch (error) {
    if (control.signal.aborted) return;
    lost(error);
  }
}

async function read(body) {
  for await (const { kind, data } of events(body)) {
    if (!kind) continue;
    hear(kind, JSON.parse(data));
    retry = 1;
    heard = Date.now();
    if (trouble) stand("trouble", `Live: ${trouble}`);
    else stand("live", "Live");
  }
}

function lost(error) {
  const since = heard === null ? "" : ` since ${clock(heard)}`;
  stand("lost", `No connection${since}: ${error.message}; next attempt in ${retry} s`);
  setTimeout(() => { if (!paused && !document.hidden) listen(); }, retry * 1000);
  retry = Math.min(retry * 2, 16);
}

function ask(why) {
  stand("still", "Needs the admin key");
  say($("key-why"), why || "This server shows its fleet to holders of its admin key.");
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("cleave-admin-key", key);
  $("key").value = "";
  $("key-dialog").close();
  listen();
});

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  say($("pause"), paused ? "Resume" : "Pause");
  if (paused) {
    stop?.abort();
    stand("still", "Paused");
  } else listen();
});

// A hidden tab closes its stream, so that the server makes no snapshot for it.
document.addEventListener("visibilitychange", () => {
  if (paused) return;
  if (document.hidden) stop?.abort();
  else listen();
});

listen();
