// The workers: a map of all, and a table of which only the visible rows exist. Owns: filter, order, and the
// selected worker. Never: stores a worker; it reads the page's state.
import { $, make, number, say, time } from "./words.js";

const ROW = 27;
const ORDER = { lost: 0, stuck: 1, draining: 2, ready: 3 };
const STATES = { ready: "ready", draining: "╱ draining", stuck: "✕ stuck", lost: "✕ lost" };
const kv = (row) => (row.blocks_count ? row.blocks_held / row.blocks_count : 0);

/** A worker without sequences reports nothing: longer silence than this is no news then. */
const IDLE_MS = 5000;

/** Title, sort key, whether it is a number, and whether narrow screens leave it out. */
const COLUMNS = [
  ["Worker", (row) => row.name, false],
  ["Role", (row) => row.role, false],
  ["State", (row) => ORDER[row.state], false],
  ["Batch", (row) => row.running, true],
  ["Waiting", (row) => row.waiting, true, "wide"],
  ["Queue", (row) => row.queue_tokens, true, "wide"],
  ["KV in use", kv, true],
  ["Last step", (row) => row.step_ms ?? -1, true, "wide"],
  ["Report", (row) => row.heard_ms ?? Infinity, true, "wide"],
  ["Tokens/s", (row) => row.tokens_per_second ?? -1, true, "wide"],
  ["Device", (row) => row.device ?? "", false, "wide"],
  ["Model", (row) => row.model, false, "wide model-name"],
];

/** Value, bound (the largest value if null), and format of a bound. */
const MEASURES = {
  kv: [kv, () => 1, (most) => `${Math.round(most * 100)} %`],
  batch: [(row) => row.running, null, number],
  queue: [(row) => row.queue_tokens, null, (most) => `${number(most)} tokens`],
  step: [(row) => row.step_ms ?? 0, null, time],
};

/** The measure in which workers of one role differ most, as a part of the map's scale. */
export function mostDifferent(rows) {
  const spread = (measure, bound) => {
    const most = bound ? bound() : Math.max(1e-9, ...rows.map(measure));
    const roles = [...new Set(rows.map((row) => row.role))];
    return Math.max(0, ...roles.map((role) => {
      const values = rows.filter((row) => row.role === role).map(measure);
      return (Math.max(...values) - Math.min(...values)) / most;
    }));
  };
  const spreads = Object.entries(MEASURES).map(([name, [measure, bound]]) => [name, spread(measure, bound)]);
  return spreads.reduce((best, one) => (one[1] > best[1] + 0.1 ? one : best))[0];
}

/** A row of a worker that is not connected any more. */
function lostRow(lost) {
  return {
    ...lost, state: "lost", sharing: 0, running: 0, waiting: 0, queue_tokens: 0, blocks_held: 0, blocks_count: 0,
    step_ms: null, heard_ms: Math.max(0, Date.now() - lost.at_ms), tokens_per_second: null,
  };
}

/** The age of a worker's last report, in words. */
function report(row) {
  if (row.heard_ms === null) return "–";
  const seconds = Math.round(row.heard_ms / 1000);
  const ago = seconds < 120 ? `${seconds} s ago` : `${Math.floor(seconds / 60)} min ago`;
  if (row.state === "lost") return ago;
  if (row.heard_ms < 1000) return "now";
  return !row.running && !row.waiting && row.heard_ms > IDLE_MS ? "idle" : ago;
}

export class Workers {
  constructor(rows) {
    this.rows = rows;
    this.lost = [];
    this.shown = [];
    this.order = [0, 1];
    this.picked = null;
    this.cells = [];
    this.heads();
    for (const id of ["find", "pool", "state"]) $(id).addEventListener("input", () => this.update());
    $("measure").addEventListener("input", () => this.draw());
    $("worker-tools").addEventListener("submit", (event) => event.preventDefault());
    $("rows").addEventListener("scroll", () => this.fill(), { passive: true });
    $("rows").addEventListener("keydown", (event) => this.key(event));
    $("body").addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row?.dataset.name) this.pick(row.dataset.name);
    });
    const map = $("map");
    map.addEventListener("click", (event) => this.pick(this.at(event)?.name ?? null));
    map.addEventListener("mousemove", (event) => { map.title = this.tell(this.at(event)); });
    new ResizeObserver(() => this.draw()).observe(map.parentElement);
  }

  heads() {
    COLUMNS.forEach(([title, , numeric, place = ""], at) => {
      const head = make("th", `${numeric ? "num" : ""} ${place}`.trim());
      head.scope = "col";
      const button = make("button", "", title);
      button.type = "button";
      button.addEventListener("click", () => {
        const [before, way] = this.order;
        // Large numbers and bad states come first.
        this.order = before === at ? [at, -way] : [at, numeric ? -1 : 1];
        this.update();
      });
      head.append(button);
      $("heads").append(head);
    });
  }

  /** Shows the workers; `lost`, if given, are those that are not connected any more. */
  update(lost) {
    if (lost) this.lost = lost.map(lostRow);
    const find = $("find").value.trim().toLowerCase();
    const [pool, state] = [$("pool").value, $("state").value];
    const fits = (row) => (!pool || row.role === pool) && (!state || row.state === state)
      && (!find || row.name.toLowerCase().includes(find) || row.model.toLowerCase().includes(find) || (row.device ?? "").toLowerCase().includes(find));
    const [at, way] = this.order;
    const by = COLUMNS[at][1];
    const names = new Intl.Collator("en", { numeric: true });
    const compare = (a, b) => {
      const [left, right] = [by(a), by(b)];
      const first = typeof left === "string" ? names.compare(left, right) : left - right;
      return first * way || names.compare(a.name, b.name);
    };
    const all = [...this.rows.values(), ...this.lost];
    this.shown = all.filter(fits).sort(compare);
    $("table").classList.toggle("one-model", new Set(all.map((row) => row.model)).size < 2);
    [...$("heads").children].forEach((head, index) => {
      if (index === at) head.setAttribute("aria-sort", way > 0 ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
      const arrow = index === at ? (way > 0 ? " ↑" : " ↓") : "";
      say(head.firstChild, COLUMNS[index][0] + arrow);
    });
    say($("shown"), this.shown.length === all.length ? `${number(all.length)} workers` : `${number(this.shown.length)} of ${number(all.length)}`);
    $("rows").style.height = `${Math.min(330, Math.max(120, all.length * ROW + 36))}px`;
    $("table").setAttribute("aria-rowcount", String(this.shown.length + 1));
    this.fill();
    this.draw();
  }

  // === table

  /** Makes the visible rows, and space for the others. */
  fill() {
    const box = $("rows");
    const body = $("body");
    const fits = Math.ceil(box.clientHeight / ROW);
    // A filter may leave fewer rows than the scroll position needs.
    const top = Math.min(Math.floor(box.scrollTop / ROW), Math.max(0, this.shown.length - fits));
    const first = Math.max(0, top - 4);
    const last = Math.min(this.shown.length, first + fits + 8);
    if (body.children.length < 2) {
      for (let at = 0; at < 2; at += 1) {
        const room = body.appendChild(make("tr", "room"));
        room.setAttribute("aria-hidden", "true");
        const cell = room.appendChild(make("td"));
        cell.colSpan = COLUMNS.length;
      }
    }
    while (body.children.length - 2 < last - first) body.insertBefore(tableRow(), body.lastChild);
    while (body.children.length - 2 > last - first) body.children[1].remove();
    body.firstChild.firstChild.style.height = `${first * ROW}px`;
    body.lastChild.firstChild.style.height = `${(this.shown.length - last) * ROW}px`;
    for (let at = first; at < last; at += 1) this.write(body.children[at - first + 1], at);
  }

  write(element, at) {
    const row = this.shown[at];
    element.dataset.name = row.name;
    element.setAttribute("aria-rowindex", String(at + 2));
    element.setAttribute("aria-selected", String(row.name === this.picked));
    const [name, leg, state, batch, waiting, queue, used, step, heard, tokens, device, model] = element.children;
    say(name, row.name);
    leg.firstChild.className = `leg tone-${row.role}`;
    say(leg.firstChild, row.role);
    state.className = `st-${row.state}`;
    say(state, STATES[row.state]);
    say(batch, number(row.running));
    say(waiting, number(row.waiting));
    say(queue, number(row.queue_tokens));
    used.firstChild.firstChild.style.width = `${kv(row) * 100}%`;
    say(used.lastChild, row.blocks_count ? `${(kv(row) * 100).toFixed(0)} %` : "–");
    say(step, time(row.step_ms));
    say(heard, report(row));
    say(tokens, row.tokens_per_second === null ? "–" : number(row.tokens_per_second));
    say(device, row.device ? row.device + (row.sharing ? ` (shared by ${row.sharing + 1})` : "") : "–");
    say(model, row.model);
  }

  key(event) {
    if (event.target !== $("rows")) return;
    const page = Math.floor($("rows").clientHeight / ROW) - 2;
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || !this.shown.length) return;
    event.preventDefault();
    const now = this.shown.findIndex((row) => row.name === this.picked);
    const next = Math.min(this.shown.length - 1, Math.max(0, (now < 0 ? -1 : now) + steps[event.key]));
    this.pick(this.shown[next].name);
  }

  /** Selects a worker, and scrolls to it in map and table. */
  pick(name) {
    this.picked = name;
    const at = this.shown.findIndex((row) => row.name === name);
    if (at >= 0) {
      const box = $("rows");
      const [top, bottom] = [at * ROW, (at + 2) * ROW];
      if (top < box.scrollTop) box.scrollTop = top;
      else if (bottom > box.scrollTop + box.clientHeight) box.scrollTop = bottom - box.clientHeight;
    }
    this.fill();
    this.draw();
  }

  // === map

  /** Draws the shown workers, pool by pool, by name; with several models each has pools of its own. */
  draw() {
    const map = $("map");
    const context = map.getContext("2d");
    const width = map.parentElement.clientWidth;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const names = new Intl.Collator("en", { numeric: true });
    const models = [...new Set(this.shown.map((row) => row.model))].sort(names.compare);
    const pools = models.flatMap((model) => ["prefill", "decode", "both"].map((role) => [
      role,
      this.shown.filter((row) => row.role === role && row.model === model),
      models.length > 1 ? `${model}: ${role}` : role,
    ]));
    const there = pools.filter(([, rows]) => rows.length);
    for (const [, rows] of there) rows.sort((a, b) => names.compare(a.name, b.name));
    const [side, gap] = cellSize(width, there.map(([, rows]) => rows.length));
    const across = Math.max(1, Math.floor((width + gap) / (side + gap)));
    const height = there.reduce((all, [, rows]) => all + 20 + Math.ceil(rows.length / across) * (side + gap) + 8, 0) || 40;
    const dense = window.devicePixelRatio || 1;
    if (map.width !== Math.round(width * dense) || map.height !== Math.round(height * dense)) {
      [map.width, map.height] = [Math.round(width * dense), Math.round(height * dense)];
      map.style.height = `${height}px`;
    }
    context.setTransform(dense, 0, 0, dense, 0, 0);
    context.clearRect(0, 0, width, height);
    const chosen = $("measure").value || mostDifferent(this.shown.filter((row) => row.state !== "lost"));
    const [measure, bound, write] = MEASURES[chosen];
    const title = [...$("measure").options].find((option) => option.value === chosen).textContent;
    say($("scale-name"), title);
    const most = bound ? bound() : Math.max(1e-9, ...this.shown.map(measure));
    say($("scale-high"), write(most));
    const heat = ramp(colour("heat-0"), colour("heat-1"));
    this.cells = [];
    let y = 0;
    for (const [role, rows, title] of there) {
      context.font = "600 11.5px system-ui, Inter, 'DejaVu Sans', sans-serif";
      context.fillStyle = colour(role);
      context.fillRect(0, y + 4, 8, 8);
      context.fillStyle = colour("muted");
      context.fillText(`${title}  ${rows.length}`, 14, y + 12);
      y += 20;
      rows.forEach((row, at) => {
        const [left, top] = [(at % across) * (side + gap), y + Math.floor(at / across) * (side + gap)];
        context.fillStyle = heat(Math.min(1, measure(row) / most));
        context.fillRect(left, top, side, side);
        if (side > 8) {
          context.strokeStyle = colour("cell-line");
          context.lineWidth = 1;
          context.strokeRect(left + 0.5, top + 0.5, side - 1, side - 1);
        }
        if (row.state !== "ready") mark(context, [left, top, side], row.state, colour);
        if (row.name === this.picked) {
          context.strokeStyle = colour("text");
          context.lineWidth = 2;
          context.strokeRect(left - 1, top - 1, side + 2, side + 2);
        }
        this.cells.push([left, top, row]);
      });
      y += Math.ceil(rows.length / across) * (side + gap) + 8;
    }
    this.side = side;
    map.setAttribute("aria-label", `Map of workers by ${title}: ${there.map(([, rows, title]) => `${rows.length} ${title}`).join(", ") || "none"}. The table beside it has the numbers.`);
  }

  at(event) {
    const box = $("map").getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = this.cells.find(([left, top]) => x >= left && x < left + this.side && y >= top && y < top + this.side);
    return hit?.[2];
  }

  tell(row) {
    if (!row) return "";
    if (row.state === "lost") return `${row.name}: lost ${report(row)}`;
    return `${row.name}: ${row.state}, batch ${row.running}, waiting ${row.waiting}, KV ${(kv(row) * 100).toFixed(0)} %, step ${time(row.step_ms)}`;
  }
}

function tableRow() {
  const element = make("tr");
  const name = make("th");
  name.scope = "row";
  element.append(name);
  COLUMNS.slice(1).forEach(([, , numeric, place = ""]) => element.append(make("td", `${numeric ? "num" : ""} ${place}`.trim())));
  element.children[1].append(make("span", "leg"));
  const bar = make("span", "kv");
  bar.append(make("i"));
  element.children[6].append(bar, make("span"));
  return element;
}

/** Returns the largest cell size, up to 48 pixels, with which all pools fit beside the table. */
function cellSize(width, counts) {
  for (let side = 48; side > 5; side -= 1) {
    const gap = side > 16 ? 4 : side > 9 ? 2 : 1;
    const across = Math.max(1, Math.floor((width + gap) / (side + gap)));
    const height = counts.reduce((all, count) => all + 28 + Math.ceil(count / across) * (side + gap), 0);
    if (height <= 310) return [side, gap];
  }
  return [5, 1];
}

/** Marks a state by more than colour: a stroke for draining, a cross for stuck and lost. */
function mark(context, [left, top, side], state, colour) {
  const inset = side * 0.2;
  context.fillStyle = colour("panel");
  context.fillRect(left, top, side, side);
  context.strokeStyle = colour(state === "draining" ? "late" : "failed");
  context.lineWidth = Math.max(1.5, side / 9);
  context.strokeRect(left + 1, top + 1, side - 2, side - 2);
  context.beginPath();
  context.moveTo(left + inset, top + side - inset);
  context.lineTo(left + side - inset, top + inset);
  if (state !== "draining") {
    context.moveTo(left + inset, top + inset);
    context.lineTo(left + side - inset, top + side - inset);
  }
  context.stroke();
}

/** Mixes two colours, both `#rrggbb`. */
function ramp(from, to) {
  const parts = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const [low, high] = [parts(from), parts(to)];
  return (share) => `rgb(${low.map((part, at) => Math.round(part + (high[at] - part) * share)).join(" ")})`;
}
