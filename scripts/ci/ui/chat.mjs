// Tests `/ui/chat` in a browser; `check.mjs` runs it. Answers come from `scripted.mjs`, the page from the server.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { gate, scripted } from "./scripted.mjs";

const HOSTILE = '<img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>';
const SCHEMA = { type: "object", properties: { city: { type: "string" }, people: { type: "integer" } }, required: ["city", "people"], additionalProperties: false };
const TOOLS = [{ name: "weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];

/** Checks the chat. `tools` are those of check.mjs: check, until, accessible, browse, shots. */
export async function chat(browser, base, tools) {
  const server = await scripted(base);
  const { context, page, trouble } = await tools.browse(browser, server.url, "/ui/chat", { downloads: true });
  const test = { ...tools, ...server, page, last: () => page.locator("#turns > li").last() };
  await tools.until("model", async () => (await page.locator("#model").inputValue()) === "scripted");
  for (const part of [turns, toolCalls, schema, stop, refusals, hostile, changes, files, narrow]) await part(test);
  const images = await page.locator("#turns img, #turns script").count();
  tools.check(images === 0 && !(await page.evaluate(() => window.hacked)), "no text became an element");
  // The browser reports the refusals that the script made as errors.
  const rest = trouble.filter((line) => !/status of (401|429|500)/.test(line));
  tools.check(rest.length === 0, `chat: no console error, no request elsewhere${rest.length ? `: ${[...new Set(rest)].join("; ")}` : ""}`);
  await tools.accessible(page, "chat, light");
  await context.close();
  for (const scheme of ["light", "dark"]) await picture(browser, server, tools, scheme);
  server.end();
}

/** Types a message, sends it by the keyboard, and waits for its turn. */
async function say({ page, until }, text, isTaken = true) {
  const before = await page.locator("#turns > li").count();
  await page.locator("#message").fill(text);
  await page.keyboard.press("Enter");
  if (isTaken) await until("turn", async () => (await page.locator("#turns > li").count()) === before + 2, 10_000);
}

const done = ({ page, until }, words = "The answer is complete.") =>
  until(words, async () => (await page.locator("#status").innerText()) === words, 10_000);

async function reset({ page, until }) {
  await page.locator("#new").click();
  await until("empty page", async () => (await page.locator("#turns > li").count()) === 0);
}

async function turns(test) {
  const { page, script, asked, check, until, last } = test;
  const next = gate();
  script.push(async ({ stream }) => {
    const answer = stream();
    answer.delta({ role: "assistant", reasoning_content: "Let me think." });
    await next.passed;
    answer.delta({ reasoning_content: " Done." });
    for (const word of ["Two ", "words:\n```rust\n", "let a = 1;\n", "```\nEnd"]) answer.delta({ content: word });
    answer.end();
  });
  await page.locator("#system").fill("Be short.");
  await page.locator("#temperature").fill("0.5");
  await page.locator("#maxTokens").fill("64");
  await page.locator("#sloClass").fill("interactive");
  await page.locator("#effort").selectOption("low");
  await say(test, "first");
  const summary = last().locator(".reasoning summary");
  await until("reasoning", async () => (await summary.count()) && /now, 13/.test(await summary.innerText()));
  check(!(await last().locator(".reasoning").evaluate((fold) => fold.open)), "reasoning is folded while it streams");
  await summary.click();
  check((await last().locator(".reasoning .words").innerText()) === "Let me think.", "and can be read live");
  check((await last().getAttribute("aria-busy")) === "true", "an open answer is busy");
  next.open();
  await done(test);
  check((await last().locator(".reasoning .words").innerText()) === "Let me think. Done.", "reasoning grows in place");
  check((await last().locator("pre").first().innerText()) === "let a = 1;", "code is a block of its own");
  check(/^first token 33.5 ms · 9.10 ms per token · 12 tokens · 138 ms in all$/.test(await last().locator(".times summary").innerText()), "an answer says what it took");
  await last().locator(".times summary").click();
  check((await last().locator(".times tbody tr").count()) === 8, "each stage has a row");
  check((await last().locator(".facts").innerText()).includes("40 tokens, 32 of them from the prefix cache"), "hits of the prefix cache are counted");
  const { body, headers } = asked.at(-1);
  check(body.temperature === 0.5 && body.max_tokens === 64 && body.reasoning_effort === "low" && headers["x-slo-class"] === "interactive" && headers["x-cleave-timing"] === "1", "settings are sent");
  script.push(({ stream }) => { const answer = stream(); answer.delta({ content: "Second." }); answer.end(); });
  await say(test, "second");
  await done(test);
  const order = asked.at(-1).body.messages.map(({ role, content }) => `${role} ${content.slice(0, 6)}`);
  check(order.join("; ") === "system Be sho; user first; assistant Two wo; user second", `turns are sent in order: ${order.join("; ")}`);
  check((await page.locator("#turns > li").count()) === 4, "four turns are shown");
  await page.locator("#system").fill("");
  await reset(test);
}

async function toolCalls(test) {
  const { page, script, asked, check, until, last } = test;
  await page.locator("#tools").fill('[{"name": "weather"\n "x"]');
  check(/^Line 2, column 2: expected/.test(await page.locator("#tools-problem").innerText()), `an error has its place: ${await page.locator("#tools-problem").innerText()}`);
  check((await page.locator("#tools").getAttribute("aria-invalid")) === "true", "and its field is marked");
  const before = asked.length;
  await say(test, "weather in Bern?", false);
  check((await page.locator("#status").innerText()).includes("settings") && asked.length === before, "nothing is sent with it");
  await page.locator("#tools").fill(JSON.stringify(TOOLS));
  const next = gate();
  script.push(async ({ stream }) => {
    const answer = stream();
    answer.delta({ tool_calls: [{ index: 0, id: "call_1", type: "function", function: { name: "weather", arguments: "" } }] });
    answer.delta({ tool_calls: [{ index: 0, function: { arguments: '{"city":' } }] });
    await next.passed;
    answer.delta({ tool_calls: [{ index: 0, function: { arguments: '"Bern"}' } }] });
    answer.end("tool_calls");
  });
  await page.locator("#message").focus();
  await page.keyboard.press("Enter");
  await until("call", async () => (await last().locator(".call pre").count()) && (await last().locator(".call pre").innerText()) === '{"city":');
  check((await last().locator(".call h4").innerText()) === "Call: weather", "a call is shown with its name while its arguments stream");
  next.open();
  await done(test, "The model waits for the results of its calls.");
  check((await last().locator(".call pre").innerText()).includes('"city": "Bern"'), "arguments are printed with line breaks once they are whole");
  await say(test, "too early", false);
  check(asked.length === before + 1, "a message waits for the results");
  await page.locator("#message").fill("");
  script.push(({ stream }) => { const answer = stream(); answer.delta({ content: "Sunny." }); answer.end(); });
  await last().getByLabel("Result of weather").fill("21 degrees");
  await last().getByRole("button", { name: "Give results and go on" }).click();
  await page.getByText("Sunny.").waitFor();
  await done(test);
  const { body } = asked.at(-1);
  check(body.tools[0].function.name === "weather" && body.tool_choice === "auto", "tools are sent in OpenAI's form");
  check(JSON.stringify(body.messages.slice(-2)) === JSON.stringify([
    { role: "assistant", content: null, tool_calls: [{ id: "call_1", type: "function", function: { name: "weather", arguments: '{"city":"Bern"}' } }] },
    { role: "tool", tool_call_id: "call_1", content: "21 degrees" },
  ]), "the call goes back with its result");
  check((await page.locator(".call .given").innerText()) === "21 degrees", "and the result is shown");
  await page.locator("#tools").fill("");
  await reset(test);
}

async function schema(test) {
  const { page, script, asked, check, last } = test;
  await page.locator("#schema").fill(JSON.stringify(SCHEMA));
  for (const [text, holds, words] of [['{"city":"Bern","people":134000}', "yes", "JSON by the schema"], ['{"city":"Bern","people":"many"}', "no", "$.people"], ['{"city":', "no", "column 9"]]) {
    script.push(({ stream }) => { const answer = stream(); answer.delta({ content: text }); answer.end(); });
    await say(test, "how many?");
    await done(test);
    const verdict = last().locator(".checked");
    check((await verdict.getAttribute("data-holds")) === holds && (await verdict.innerText()).includes(words), `an answer is checked: ${await verdict.innerText()}`);
  }
  check((await page.locator(".turn-answer pre").first().innerText()).includes('\n  "people": 134000'), "and printed with line breaks");
  check(JSON.stringify(asked.at(-1).body.response_format.json_schema.schema) === JSON.stringify(SCHEMA), "the schema is sent");
  await page.locator("#schema").fill("");
  await reset(test);
}

async function stop(test) {
  const { page, script, check, until, last } = test;
  const [stopped, late] = [gate(), gate()];
  script.push(async ({ stream, left }) => {
    const answer = stream();
    answer.delta({ content: "begun" });
    left.then(stopped.open);
    await late.passed;
    answer.delta({ content: " and more" });
  });
  await say(test, "go on for ever");
  await until("text", async () => (await last().locator(".text").innerText()) === "begun");
  check((await page.locator("#send").innerText()) === "Stop", "an open answer can be stopped");
  await page.keyboard.press("Escape");
  await stopped.passed;
  check(true, "the server sees that the client left");
  await done(test, "Stopped.");
  late.open();
  script.push(({ stream }) => { const answer = stream(); answer.delta({ content: "next" }); answer.end(); });
  await say(test, "and now");
  await done(test);
  const texts = await page.locator(".turn-answer .text").allInnerTexts();
  check(texts.join("|") === "begun|next", `a stopped answer stays as it was: ${texts.join("|")}`);
  await reset(test);
}

async function refusals(test) {
  const { page, script, asked, check, until, last } = test;
  script.push(({ refuse }) => refuse(401, "No key."));
  await say(test, "hello");
  await done(test, "Not answered.");
  check((await last().locator(".error").innerText()).includes("Enter the API key"), "a 401 asks for the key");
  check(await page.locator("#api-key").evaluate((box) => box === document.activeElement), "at its field");
  await page.keyboard.type("the-key");
  script.push(({ refuse }) => refuse(429, "No room.", { "retry-after": "2", "retry-after-ms": "1900" }));
  await last().getByRole("button", { name: "Try again" }).click();
  const again = last().getByRole("button", { name: /^Try again \(advised in 2 s\)$/ });
  await again.waitFor({ timeout: 5000 });
  check(asked.at(-1).headers.authorization === "Bearer the-key", "the key is sent");
  check((await last().locator(".error").innerText()).includes("No room."), "a 429 says why, and when to come back");
  await until("end of the wait", async () => (await last().getByRole("button", { name: "Try again", exact: true }).count()) === 1);
  script.push(({ stream }) => { const answer = stream(); answer.delta({ content: "half" }); answer.write({ error: { message: "A worker was lost." } }); });
  await last().getByRole("button", { name: "Try again" }).click();
  await until("break", async () => (await last().locator(".error").innerText()).includes("A worker was lost."));
  check((await last().locator(".text").innerText()) === "half", "a stream that breaks keeps what came");
  script.push(({ stream }) => { const answer = stream(); answer.delta({ content: "whole" }); answer.end(); });
  await last().getByRole("button", { name: "Try again" }).click();
  await page.getByText("whole").waitFor();
  await done(test);
  check((await page.locator("#turns > li").count()) === 2, "a retry replaces the answer");
  check(asked.at(-1).body.messages.length === 1, "and sends no refused answer");
  await reset(test);
}

async function hostile(test) {
  const { page, script, check } = test;
  await page.locator("#tools").fill(JSON.stringify(TOOLS));
  script.push(({ stream }) => {
    const answer = stream();
    answer.delta({ reasoning_content: HOSTILE });
    answer.delta({ content: `${HOSTILE}\n\`\`\`\n${HOSTILE}\n\`\`\`` });
    answer.delta({ tool_calls: [{ index: 0, id: HOSTILE, function: { name: HOSTILE, arguments: HOSTILE } }] });
    answer.write({ choices: [], warnings: [{ message: HOSTILE }] });
    answer.end("tool_calls");
  });
  await say(test, HOSTILE);
  await done(test, "The model waits for the results of its calls.");
  script.push(({ refuse }) => refuse(500, HOSTILE));
  await page.locator(".call textarea").fill(HOSTILE);
  await page.getByRole("button", { name: "Give results and go on" }).click();
  await done(test, "Not answered.");
  const markup = await page.locator("#turns").evaluate((list) => [...list.querySelectorAll("img, script, iframe, a")].length);
  const shown = (await page.locator("#turns").evaluate((list) => list.textContent)).split(HOSTILE).length - 1;
  check(markup === 0 && shown >= 8, `hostile texts are shown as text: ${shown} times, ${markup} elements`);
  await page.locator("#tools").fill("");
  await reset(test);
}

async function changes(test) {
  const { page, script, asked, check } = test;
  const answer = (text) => script.push(({ stream }) => { const made = stream(); made.delta({ content: text }); made.end(); });
  for (const text of ["a", "b"]) {
    answer(`re ${text}`);
    await say(test, text);
    await done(test);
  }
  answer("re b again");
  await page.getByRole("button", { name: "Regenerate" }).last().click();
  await page.getByText("re b again").waitFor();
  check(asked.at(-1).body.messages.map((one) => one.content).join() === "a,re a,b", "regenerating asks the same again");
  await done(test);
  answer("re c");
  await page.getByRole("button", { name: "Edit" }).first().click();
  await page.getByLabel("Edited message").first().fill("c");
  await page.getByRole("button", { name: "Send again" }).first().click();
  await page.getByText("re c").waitFor();
  check(asked.at(-1).body.messages.map((one) => one.content).join() === "c" && (await page.locator("#turns > li").count()) === 2, "an edited message forgets what came after it");
  await done(test);
  await page.getByRole("button", { name: "Copy" }).last().click();
  await page.getByRole("button", { name: "Copied" }).waitFor();
  check(true, "an answer can be copied");
}

async function files(test) {
  const { page, check, folder } = test;
  const [download] = await Promise.all([page.waitForEvent("download"), page.locator("#export").click()]);
  const path = join(folder, "conversation.json");
  await download.saveAs(path);
  const turns = JSON.parse(readFileSync(path, "utf8")).turns.map((turn) => turn.text);
  check(turns.join() === "c,re c", `an export has the turns: ${turns.join()}`);
  const before = await page.locator("#turns").innerText();
  await reset(test);
  await page.locator("#file").setInputFiles({ name: "bad.json", mimeType: "application/json", buffer: Buffer.from('{"format":') });
  await test.until("error", async () => (await page.locator("#status").innerText()).includes("Line 1, column 11"));
  await page.locator("#file").setInputFiles(path);
  await page.getByText("re c").waitFor();
  const words = (text) => text.replace(/Cop(y|ied)/g, "").split("\n").filter((line) => /^re c$|^c$/.test(line)).join();
  check(words(await page.locator("#turns").innerText()) === words(before), "an import shows the same conversation");
}

async function narrow({ page, check }) {
  await page.setViewportSize({ width: 360, height: 740 });
  const over = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  check(over <= 0, `nothing is wider than a narrow screen (${over})`);
  await page.setViewportSize({ width: 1280, height: 1000 });
}

/** A conversation for people to see, and for the checks of a dark page. */
async function picture(browser, server, tools, scheme) {
  const { script } = server;
  const { context, page } = await tools.browse(browser, server.url, "/ui/chat", { scheme, size: { width: 1280, height: 1060 } });
  const test = { ...tools, page };
  await page.locator("#system").fill("Answer in one sentence.");
  await page.locator("#tools").fill(JSON.stringify(TOOLS));
  script.push(({ stream }) => {
    const answer = stream();
    answer.delta({ reasoning_content: "The user asks for the weather in Bern, so the tool is needed." });
    answer.delta({ tool_calls: [{ index: 0, id: "call_1", function: { name: "weather", arguments: '{"city":"Bern"}' } }] });
    answer.end("tool_calls");
  });
  await say(test, "What is the weather in Bern?");
  await done(test, "The model waits for the results of its calls.");
  script.push(({ stream }) => { const answer = stream(); answer.delta({ content: "It is sunny in Bern, at 21 °C." }); answer.end(); });
  await page.locator(".call textarea").fill('{"sky": "clear", "celsius": 21}');
  await page.getByRole("button", { name: "Give results and go on" }).click();
  await page.getByText("at 21 °C").waitFor();
  await done(test);
  await page.locator(".times summary").last().click();
  if (scheme === "dark") await tools.accessible(page, "chat, dark");
  if (tools.shots) await page.screenshot({ path: join(tools.shots, `chat-${scheme}.png`), fullPage: true });
  await context.close();
}
