// Tests `/ui` in a real browser: `check.mjs --cleave BINARY [--browser CHROMIUM] [--modules FOLDER] [--shots FOLDER]
// [--many N] [--files FOLDER] [--only chat|fleet|many]`. Tests the chat; starts a router and eight mock workers under
// load, and compares each panel with /metrics; then starts one process with N mock workers. Exits with 0 when every
// check held. Needs the npm packages playwright-core and axe-core in --modules, and a Chromium; check.sh gets both.
// --files serves the pages' files from a folder instead of the binary, to look at changes without a build (and without
// the headers).
import { spawn } from "node:child_process";
import { existsSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { chat } from "./chat.mjs";

const options = Object.fromEntries(
  process.argv.slice(2).map((word, at, all) => [word, all[at + 1]]).filter(([word]) => word.startsWith("--")),
);
const cleave = resolve(options["--cleave"] ?? "target/debug/cleave");
const modules = createRequire(join(resolve(options["--modules"] ?? "target/ui-check"), "package.json"));
const { chromium } = modules("playwright-core");
const axe = readFileSync(modules.resolve("axe-core/axe.min.js"), "utf8");
const shots = options["--shots"] && resolve(options["--shots"]);
const many = Number(options["--many"] ?? 1024);
const LIMIT = 60_000;
const KEY = "a-key-for-this-check";

const children = [];
const failures = [];
let checks = 0;

function check(holds, what) {
  checks += 1;
  console.log(`${holds ? "ok  " : "FAIL"} ${what}`);
  if (!holds) failures.push(what);
}

/** Calls until it gives something true. */
async function until(what, probe, limit = LIMIT) {
  const started = Date.now();
  for (;;) {
    const found = await probe();
    if (found) return found;
    if (Date.now() - started > limit) throw new Error(`no ${what} within ${limit / 1000} s`);
    await new Promise((done) => setTimeout(done, 100));
  }
}

/** Starts `cleave` and gives its address, or what it prints first. */
function start(words, ready = /listening on (http:\S+)/) {
  const child = spawn(cleave, words, { stdio: ["ignore", "pipe", "pipe"], env: { ...process.env, RUST_LOG: "info" } });
  children.push(child);
  let said = "";
  const found = new Promise((done, fail) => {
    const hear = (bytes) => {
      said += bytes;
      const match = ready.exec(said);
      if (match) done(match[1]);
    };
    child.stdout.on("data", hear);
    child.stderr.on("data", hear);
    child.on("exit", () => fail(new Error(`cleave ${words.join(" ")} ended:\n${said}`)));
  });
  found.catch(() => {});
  return { child, found };
}

function end(child, signal = "SIGKILL") {
  return new Promise((done) => {
    if (child.exitCode !== null || child.signalCode) return done();
    child.on("exit", () => done());
    child.kill(signal);
  });
}

const POLICY = `
default_class: standard
classes:
  - {name: interactive, ttft: 400ms, tpot: 40ms, attainment: 0.95}
  - {name: standard, ttft: 2s, tpot: 120ms, attainment: 0.9}
  - {name: impossible, ttft: 1ms, attainment: 0.9}
  - {name: batch, priority: 10}
`;
const CLASSES = ["interactive", "interactive", "interactive", "standard", "standard", "batch", "batch"];

/** Sends requests at a rate until stopped. */
function load(base, perSecond) {
  const state = { sent: 0, done: 0, open: true };
  const one = async (number) => {
    const name = number % 29 === 0 ? "impossible" : CLASSES[number % CLASSES.length];
    const words = (name === "batch" ? 900 : 40 + ((number * 7919) % 700)) | 0;
    const body = { prompt: `${number} `.repeat(2) + "word ".repeat(words), max_tokens: 24 + ((number * 104729) % 180), stream: true, ignore_eos: true };
    state.sent += 1;
    try {
      const answer = await fetch(`${base}/v1/completions`, { method: "POST", headers: { "content-type": "application/json", "x-slo-class": name }, body: JSON.stringify(body) });
      await answer.text();
      state.done += 1;
    } catch { /* The server was stopped. */ }
  };
  let number = 0;
  const timer = setInterval(() => { if (state.open) one((number += 1)); }, 1000 / perSecond);
  return { state, stop: () => { state.open = false; clearInterval(timer); } };
}

/** The value of a series in /metrics, summed over what fits. */
async function metric(base, name, labels = "") {
  const text = await (await fetch(`${base}/metrics`)).text();
  const lines = text.split("\n").filter((line) => line.startsWith(`${name}{`) || line.startsWith(`${name} `));
  const fits = lines.filter((line) => labels.split(",").every((label) => line.includes(label)));
  return fits.reduce((sum, line) => sum + Number(line.slice(line.lastIndexOf(" "))), 0);
}

/** The first event of the stream that the page reads. */
async function board(base, headers = {}) {
  const control = new AbortController();
  const answer = await fetch(`${base}/ui/events`, { signal: control.signal, headers });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  while (!text.includes("\n\n")) text += (await reader.read()).value;
  control.abort();
  return JSON.parse(text.split("\n").find((line) => line.startsWith("data: ")).slice(6));
}

/** Opens a page, and collects errors and requests to other servers. */
async function browse(browser, base, path, { scheme = "light", size = { width: 1280, height: 1000 } } = {}) {
  const context = await browser.newContext({ viewport: size, colorScheme: scheme, reducedMotion: "reduce" });
  const page = await context.newPage();
  const trouble = [];
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) trouble.push(message.text()); });
  page.on("pageerror", (error) => trouble.push(String(error)));
  page.on("request", (request) => {
    const url = request.url();
    if (!url.startsWith(base) && !url.startsWith("data:") && !url.startsWith(`blob:${base}`)) trouble.push(`a request to ${url}`);
  });
  if (options["--files"]) {
    const kinds = { css: "text/css", js: "text/javascript" };
    for (const name of readdirSync(options["--files"])) {
      const kind = kinds[name.split(".").pop()];
      if (kind) await page.route(`${base}/ui/${name}`, (route) => route.fulfill({ path: join(options["--files"], name), contentType: kind }));
    }
    for (const [at, name] of [["/ui", "page.html"], ["/ui/chat", "chat.html"]]) {
      await page.route(base + at, (route) => route.fulfill({ path: join(options["--files"], name), contentType: "text/html" }));
    }
  }
  await page.goto(base + path);
  return { context, page, trouble };
}

async function open(browser, base, scheme = "light", { size, key } = {}) {
  const { context, page, trouble } = await browse(browser, base, "/ui", { scheme, size });
  if (key) {
    // The page asks for the key, refuses a wrong one, and takes the right one; by the keyboard alone.
    for (const letters of [`not-${key}`, key]) {
      await page.locator("#key-dialog[open]").waitFor();
      await page.keyboard.type(letters);
      await page.keyboard.press("Enter");
    }
    // The browser reports the first two answers, which were 401, as errors.
    trouble.splice(0, trouble.length, ...trouble.filter((line) => !line.includes("401")));
  }
  await boards(page, 2);
  return { context, page, trouble };
}

/** Waits until the page has shown so many boards. */
const boards = (page, count) => until("board", () => page.evaluate((n) => Number(document.body.dataset.boards ?? 0) >= n, count));
const text = (page, id) => page.locator(`#${id}`).innerText();
const figure = async (page, id) => Number((await text(page, id)).replaceAll(",", ""));

async function accessible(page, what) {
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const serious = found.violations.filter((one) => ["serious", "critical"].includes(one.impact));
  for (const one of found.violations) console.log(`     axe ${one.impact}: ${one.id}: ${one.nodes.slice(0, 3).map((node) => node.target.join(" ")).join("; ")}`);
  check(serious.length === 0, `${what}: axe-core has no serious finding (${found.passes?.length ?? 0} rules passed)`);
}

/** How far the page's number is from the metric, both read until they agree. */
async function agree(what, page, shown, measured, near = 0) {
  let last = [];
  const fits = await until("", async () => {
    last = [await shown(), await measured()];
    return Math.abs(last[0] - last[1]) <= Math.max(near * Math.abs(last[1]), 0.006);
  }, 15_000).catch(() => false);
  check(Boolean(fits), `${what}: the page says ${last[0]}, /metrics ${last[1]}`);
}

async function eight(browser, folder) {
  const policy = join(folder, "policy.yaml");
  const router = start(["router", "--listen", "127.0.0.1:0", "--policy", policy, "--placement", "split", "--worker-silence", "10"]);
  const base = await router.found;
  const workers = {};
  for (const leg of ["prefill", "decode"]) {
    for (let number = 0; number < 4; number += 1) {
      const words = ["worker", "--leg", leg, "--router", base.slice(7), "--engine", "mock", "--mock-profile", "h100-llama-3-8b", "--kv-cache", "8MiB", "--mock-block-bytes", "8192", "--name", `${leg}-${number}`, "--metrics-listen", "127.0.0.1:0"];
      workers[`${leg}-${number}`] = start(words, /metrics at (http:\S+)\/metrics/);
    }
  }
  const addresses = await Promise.all(Object.values(workers).map((worker) => worker.found));
  await until("readiness", async () => (await fetch(`${base}/ready`)).ok);
  const traffic = load(base, Number(options["--rate"] ?? 6));
  const { context, page, trouble } = await open(browser, base);
  await boards(page, Number(options["--warm"] ?? 20));

  // Each panel shows values, and the values of /metrics.
  const cells = page.locator("#body tr[data-name]");
  check((await cells.count()) === 8, "eight workers are in the table");
  check((await figure(page, "workers-count")) === (await metric(base, "cleave_workers")), "as many workers as in cleave_workers");
  check((await text(page, "workers-note")) === "4 prefill, 4 decode", "pools are counted");
  for (const id of ["goodput", "arrivals", "tokens", "bandwidth"]) {
    const more = await until(id, async () => (await figure(page, id)) > 0, 15_000).catch(() => false);
    check(more, `${id} is more than nothing: ${await text(page, id)}`);
  }
  const way = await until("streams", async () => {
    const counts = await page.locator("#way li b").allInnerTexts();
    return Number(counts[4]) > 0 && counts;
  }, 15_000).catch(() => []);
  check(way.length === 5, `flights by stage: ${way.join(" → ")}`);
  check((await page.locator("#way li p").nth(3).innerText()).includes("wait"), "stages have times");
  check((await page.locator("#classes tr").count()) === 4, "each class has a row");
  check((await page.locator("#events").innerText()).includes("slo ttft unreachable"), "a refusal is there with its reason");
  check((await page.locator("#scaling").isHidden()), "nobody decides on scaling, and nothing is shown of it");
  check(Number(await page.evaluate(() => document.body.dataset.renderMs)) < 100, "a board is shown within 100 ms");

  // The page shows no prompt.
  check(!(await page.locator("body").innerText()).includes("word word"), "no prompt is shown");

  await keyboard(page);
  await prompt(page);
  await accessible(page, "light");
  const ground = () => page.evaluate(() => getComputedStyle(document.documentElement).backgroundColor);
  const before = await ground();
  await page.locator("#theme").selectOption("dark");
  check((await ground()) !== before, "the theme can be chosen against the system's");
  await page.locator("#theme").selectOption("auto");

  await fits(page);

  // A killed worker stays in the table as lost, turns the head's sign, and is an event.
  await end(workers["decode-1"].child);
  const lost = page.locator("#events tr", { hasText: "lost" }).filter({ hasText: "decode-1" });
  check(await until("loss", async () => (await lost.count()) === 1, 30_000).catch(() => false), "a killed worker is an event");
  const row = page.locator("#body tr[data-name=decode-1]");
  await until("a lost row", async () => (await row.innerText()).includes("✕ lost"), 10_000);
  check((await cells.count()) === 8 && (await figure(page, "workers-count")) === 7, "it stays in the table, and is not counted");
  check((await page.locator("#status").getAttribute("data-state")) === "trouble", `the head says so: ${await text(page, "status-text")}`);
  await page.locator("#state").selectOption("lost");
  check((await cells.count()) === 1, "the table can be filtered by it");
  await page.locator("#state").selectOption("");

  // The sums agree once nothing is under way.
  traffic.stop();
  await until("rest", async () => (await metric(base, "cleave_flights")) === 0);
  const shown = async (verdict) => (await board(base)).classes.reduce((sum, one) => sum + one.total[verdict], 0);
  for (const verdict of ["good", "late", "refused", "failed", "cancelled"]) {
    await agree(`requests ${verdict}`, page, () => shown(verdict), () => metric(base, "cleave_slo_requests_total", `verdict="${verdict}"`));
  }
  await agree("goodput", page, () => figure(page, "goodput"), () => metric(base, "cleave_goodput_requests_per_second"), 0.06);
  const alive = addresses.filter((_, at) => Object.keys(workers)[at] !== "decode-1");
  const received = async () => (await Promise.all(alive.map((at) => metric(at, "cleave_worker_handoff_bytes_total", 'kind="received"')))).reduce((sum, bytes) => sum + bytes, 0);
  const [sent, landed] = [await Promise.all(alive.map((at) => metric(at, "cleave_worker_handoff_bytes_total", 'kind="sent"'))), (await board(base)).handoffs.bytes_total];
  const bytes = sent.reduce((sum, one) => sum + one, 0);
  check(Math.abs(landed - bytes) <= bytes * 0.05, `hand-off bytes: the page says ${landed}, the workers sent ${bytes} (and the seven left received ${await received()})`);
  check(trouble.length === 0, `no console error, no request elsewhere${trouble.length ? `: ${[...new Set(trouble)].join("; ")}` : ""}`);

  // A server that ended dims what it said last.
  await end(router.child);
  await until("a lost connection", async () => /^No connection since \d\d:\d\d:\d\d/.test(await text(page, "status-text")), 20_000);
  check((await page.evaluate(() => Number(getComputedStyle(document.querySelector("main")).opacity))) < 1, "figures of a dead server are dimmed");
  await context.close();
  await Promise.all(Object.values(workers).map(({ child }) => end(child)));
}

/** Nothing is wider than the screen, on a small laptop and on a phone. */
async function fits(page) {
  const before = page.viewportSize();
  for (const width of [1280, 390]) {
    await page.setViewportSize({ width, height: 900 });
    await boards(page, 1);
    const wide = await page.evaluate(() => {
      const boxes = [document.documentElement, ...document.querySelectorAll(".scroll")];
      return boxes.filter((box) => box.scrollWidth > box.clientWidth + 1).map((box) => box.getAttribute("aria-label") ?? "the page");
    });
    check(wide.length === 0, `${width} pixels are enough${wide.length ? `, but not for: ${wide.join(", ")}` : ""}`);
  }
  await page.setViewportSize(before);
}

async function keyboard(page) {
  await page.locator("#find").focus();
  await page.keyboard.type("decode-");
  const names = () => page.locator("#body tr[data-name] th").allInnerTexts();
  await until("filter", async () => (await names()).length === 4);
  check(true, "typing filters the table");
  await page.keyboard.press("Control+A");
  await page.keyboard.press("Delete");
  await page.locator("#pool").selectOption("prefill");
  await until("pool", async () => (await names()).every((name) => name.startsWith("prefill")));
  await page.locator("#pool").selectOption("");
  // Tab moves from the last control of the tools to the first column; Enter is pressed twice.
  await page.locator("#measure").focus();
  for (let steps = 0; steps < 4; steps += 1) {
    if (await page.evaluate(() => document.activeElement?.closest("#heads") !== null)) break;
    await page.keyboard.press("Tab");
  }
  await page.keyboard.press("Enter");
  await page.keyboard.press("Enter");
  const sorted = await page.locator("#heads th[aria-sort]").getAttribute("aria-sort");
  check(["ascending", "descending"].includes(sorted), `the keyboard reaches and sorts by the first column: ${sorted}`);
  const order = await names();
  const expected = [...order].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  check(order.join() === (sorted === "ascending" ? expected : expected.reverse()).join(), "rows are in that order");
  await page.locator("#rows").focus();
  await page.keyboard.press("End");
  const last = await page.locator('#body tr[aria-selected="true"] th').innerText();
  check(last === order.at(-1) || last === (await names()).at(-1), `End picks the last row: ${last}`);
  await page.keyboard.press("Home");
}

async function prompt(page) {
  await page.locator("#max-tokens").fill("24");
  await page.locator("#send").click();
  await page.locator("#waterfall").waitFor({ state: "visible", timeout: 20_000 });
  const stages = await page.locator("#stages th").allInnerTexts();
  check(stages.length === 8, `a prompt's stages: ${stages.join(", ")}`);
  check((await text(page, "answer")).length > 0, "and its answer");
  check(/24 output tokens/.test(await text(page, "prompt-status")), await text(page, "prompt-status"));
}

const ANSWERS = `
answers:
  - contains: ["21 degrees"]
    text: "It is clear."
  - text: |-
      <think>
      The tool knows.
      </think>

      <tool_call>
      {"name": "weather", "arguments": {"city": "Rome"}}
      </tool_call>
`;

/** The chat by script, and two turns with the server itself, whose engine has answers by a script. */
async function talk(browser, folder) {
  const answers = join(folder, "answers.yaml");
  writeFileSync(answers, ANSWERS);
  const model = resolve(dirname(fileURLToPath(import.meta.url)), "../../../testdata/qwen3");
  const split = ["--prefill", "1", "--decode", "1", "--placement", "split"];
  const server = start(["serve", "--engine", "mock", "--port", "0", "--model", model, "--mock-script", answers, ...split]);
  const base = await server.found;
  await chat(browser, base, { check, until, accessible, browse, shots, folder });
  const { context, page, trouble } = await browse(browser, base, "/ui/chat");
  await page.locator("#tools").fill('[{"name": "weather"}]');
  await page.locator("#message").fill("How is the weather in Rome?");
  await page.keyboard.press("Enter");
  await page.getByLabel("Result of weather").fill("21 degrees");
  check((await page.locator(".reasoning .words").evaluate((words) => words.textContent)) === "The tool knows.", "the server's reasoning is apart");
  check((await page.locator(".call pre").innerText()).includes('"city": "Rome"'), "and so is its call");
  await page.getByRole("button", { name: "Give results and go on" }).click();
  await page.getByText("It is clear.").waitFor();
  const took = page.locator(".times summary").last();
  const line = await until("times", async () => (await page.locator(".times:visible").count()) === 2 && took.innerText());
  check(/^first token .* · \d+ tokens · .* in all$/.test(line), `the server goes on, and says what it took: ${line}`);
  check(trouble.length === 0, `chat with the server: no console error${trouble.length ? `: ${trouble[0]}` : ""}`);
  await context.close();
  await end(server.child);
}

/** A healthy fleet, for people to see. */
async function pictures(browser, folder) {
  const policy = join(folder, "policy.yaml");
  const server = start(["serve", "--engine", "mock", "--port", "0", "--prefill", "6", "--decode", "10", "--both", "2", "--kv-cache", "1536KiB", "--mock-block-bytes", "8192", "--policy", policy]);
  const base = await server.found;
  const traffic = load(base, Number(options["--rate"] ?? 14));
  for (const scheme of ["light", "dark"]) {
    const { context, page, trouble } = await open(browser, base, scheme);
    await page.locator("#send").click();
    await page.locator("#waterfall").waitFor({ state: "visible", timeout: 20_000 });
    await boards(page, scheme === "light" ? Number(options["--warm"] ?? 60) : 8);
    if (scheme === "dark") await accessible(page, "dark");
    await page.mouse.move(0, 0);
    await page.evaluate(() => document.activeElement?.blur());
    await page.screenshot({ path: join(shots, `ui-${scheme}.png`), fullPage: true });
    check(trouble.length === 0, `${scheme}: no console error`);
    await context.close();
  }
  traffic.stop();
  await end(server.child);
}

/** Frame times and the processor's share while many workers are shown. */
async function crowd(browser, folder) {
  const half = Math.floor(many / 2);
  const server = start(["serve", "--engine", "mock", "--port", "0", "--prefill", String(half), "--decode", String(many - half), "--kv-cache", "1MiB", "--swap-space", "0", "--admin-key", KEY, "--policy", join(folder, "policy.yaml")]);
  const base = await server.found;
  const traffic = load(base, Number(options["--rate"] ?? 10));
  const { context, page, trouble } = await open(browser, base, "light", { size: { width: 1440, height: 1200 }, key: KEY });
  await boards(page, 4);
  check((await figure(page, "workers-count")) === many, `${many} workers are counted`);
  const rows = await page.locator("#body tr[data-name]").count();
  check(rows < 40, `of ${many} rows ${rows} exist`);
  await page.locator("#rows").evaluate((box) => { box.scrollTop = box.scrollHeight; });
  await until("the last row", () => page.evaluate((n) => document.querySelector("#body tr[data-name]:nth-last-child(2)")?.ariaRowIndex === String(n + 1), many));
  check(true, "scrolling reaches the last one");
  await page.locator("#find").fill("decode-1");
  await until("filter", async () => /of/.test(await text(page, "shown")));
  await page.locator("#find").fill("");
  const session = await context.newCDPSession(page);
  await session.send("Performance.enable");
  const measure = async () => Object.fromEntries((await session.send("Performance.getMetrics")).metrics.map(({ name, value }) => [name, value]));
  const cpu = () => readFileSync(`/proc/${server.child.pid}/stat`, "utf8").split(" ").slice(13, 15).reduce((sum, ticks) => sum + Number(ticks), 0) / 100;
  const [before, busy] = [await measure(), cpu()];
  const gaps = await page.evaluate(() => new Promise((done) => {
    const seen = [];
    let last = performance.now();
    const until = last + 10_000;
    const frame = (now) => { seen.push(now - last); last = now; return now < until ? requestAnimationFrame(frame) : done(seen); };
    requestAnimationFrame(frame);
  }));
  const after = await measure();
  const seconds = after.Timestamp - before.Timestamp;
  gaps.sort((a, b) => a - b);
  const at = (share) => gaps[Math.floor(gaps.length * share)].toFixed(1);
  console.log(`     ${many} workers: frames p50 ${at(0.5)} ms, p99 ${at(0.99)} ms, worst ${gaps.at(-1).toFixed(1)} ms; page's script ${(((after.ScriptDuration - before.ScriptDuration) / seconds) * 100).toFixed(1)} %, layout ${(((after.LayoutDuration - before.LayoutDuration) / seconds) * 100).toFixed(1)} % of a core; a board is shown in ${await page.evaluate(() => document.body.dataset.renderMs)} ms`);
  const watched = (cpu() - busy) / seconds;
  await context.close();
  const [idle, since] = [cpu(), Date.now()];
  await new Promise((done) => setTimeout(done, 5000));
  const alone = ((cpu() - idle) / (Date.now() - since)) * 1000;
  const snapshot = await board(base, { authorization: `Bearer ${KEY}` });
  console.log(`     server: ${(watched * 100).toFixed(0)} % of a core with one viewer, ${(alone * 100).toFixed(0)} % without; a snapshot is ${(JSON.stringify(snapshot).length / 1000).toFixed(0)} kB`);
  check(trouble.length === 0, `no console error with ${many} workers${trouble.length ? `: ${trouble[0]}` : ""}`);
  traffic.stop();
  await end(server.child);
}

const folder = mkdtempSync(join(tmpdir(), "cleave-ui-"));
writeFileSync(join(folder, "policy.yaml"), POLICY);
const path = options["--browser"] ?? "/usr/bin/chromium";
if (!existsSync(path)) throw new Error(`no browser at ${path}`);
const browser = await chromium.launch({ executablePath: path, args: ["--no-sandbox"] });
try {
  const only = options["--only"];
  if (shots) mkdirSync(shots, { recursive: true });
  // Most of both is waiting for boards and answers; the crowd is measured, alone.
  const parts = [["chat", talk], ["fleet", eight]].filter(([name]) => !only || only === name);
  const ended = await Promise.allSettled(parts.map(([, part]) => part(browser, folder)));
  for (const { reason } of ended.filter(({ status }) => status === "rejected")) throw reason;
  if (!only && shots) await pictures(browser, folder);
  if ((!only || only === "many") && many > 0) await crowd(browser, folder);
} catch (error) {
  failures.push(String(error));
  console.log(`FAIL ${error.stack}`);
} finally {
  await browser.close();
  await Promise.all(children.map((child) => end(child)));
  rmSync(folder, { recursive: true, force: true });
}
console.log(failures.length ? `${failures.length} of ${checks} checks failed` : `all ${checks} checks held`);
process.exit(failures.length ? 1 : 0);
