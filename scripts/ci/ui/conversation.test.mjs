// Tests of the chat's state without a page: `node --test scripts/ci/ui/conversation.test.mjs`.
import assert from "node:assert/strict";
import { cpSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import test from "node:test";
import { fileURLToPath, pathToFileURL } from "node:url";

// Node.js takes the page's files for modules only where a package says so.
const folder = mkdtempSync(join(tmpdir(), "cleave-chat-"));
cpSync(fileURLToPath(new URL("../../../crates/api/src/ui", import.meta.url)), folder, { recursive: true });
writeFileSync(join(folder, "package.json"), '{"type": "module"}');
const module = (name) => import(pathToFileURL(join(folder, name)).href);
const { Conversation, readSettings, readTools, SETTINGS } = await module("conversation.js");
const { mismatch, parseJson } = await module("json.js");
test.after(() => rmSync(folder, { recursive: true }));

const chunk = (delta, finish = null) => ({ choices: [{ index: 0, delta, finish_reason: finish }] });

/** Answers the open turn by these deltas. */
function answered(chat, ...deltas) {
  deltas.forEach((delta, at) => chat.take(chunk(delta), at));
  chat.take(chunk({}, chat.open.calls.length ? "tool_calls" : "stop"), deltas.length);
  chat.end(deltas.length);
}

const call = (index, id, name, text) => ({ tool_calls: [{ index, id, type: "function", function: { name, arguments: text } }] });
const more = (index, text) => ({ tool_calls: [{ index, function: { arguments: text } }] });

/** A conversation with a call and its result. */
function withCalls() {
  const chat = new Conversation();
  chat.ask("weather?", 0);
  answered(chat, { reasoning_content: "hm" }, call(0, "a", "weather", ""), more(0, '{"city":'), more(0, '"Bern"}'), call(1, "b", "time", "{}"));
  return chat;
}

test("turns are sent in the order in which they were spoken", () => {
  const chat = new Conversation();
  chat.settings.system = "Be short.";
  chat.ask("one", 0);
  answered(chat, { reasoning_content: "th" }, { reasoning_content: "ink" }, { content: "1" });
  chat.ask("two", 0);
  assert.deepEqual(chat.request().messages, [
    { role: "system", content: "Be short." },
    { role: "user", content: "one" },
    { role: "assistant", content: "1", reasoning_content: "think" },
    { role: "user", content: "two" },
  ]);
});

test("calls go back with their results, and block the next message until then", () => {
  const chat = withCalls();
  assert.deepEqual(chat.waiting.map(({ id, name, text }) => [id, name, text]), [["a", "weather", '{"city":"Bern"}'], ["b", "time", "{}"]]);
  assert.throws(() => chat.ask("more", 0), /results first/);
  assert.throws(() => chat.answerCalls(["one alone"], 0), /Each call/);
  chat.answerCalls(["sunny", "noon"], 0);
  const [, asked, sunny, noon] = chat.request().messages;
  assert.equal(asked.content, null);
  assert.deepEqual(asked.tool_calls.map((one) => one.function), [{ name: "weather", arguments: '{"city":"Bern"}' }, { name: "time", arguments: "{}" }]);
  assert.deepEqual([sunny, noon], [{ role: "tool", tool_call_id: "a", content: "sunny" }, { role: "tool", tool_call_id: "b", content: "noon" }]);
});

test("an answer that was stopped takes nothing more, and keeps its text", () => {
  const chat = new Conversation();
  chat.ask("one", 0);
  chat.take(chunk({ content: "par" }), 1);
  chat.take(chunk(call(0, "a", "f", '{"cut')), 1);
  chat.stop(2);
  chat.take(chunk({ content: "tial" }), 3);
  assert.equal(chat.open, null);
  assert.deepEqual(chat.waiting, []);
  chat.ask("two", 4);
  assert.deepEqual(chat.messages().map((one) => one.content), ["one", "par", "two"]);
});

test("editing and regenerating forget what came after", () => {
  const chat = new Conversation();
  for (const text of ["one", "two"]) {
    chat.ask(text, 0);
    answered(chat, { content: `re ${text}` });
  }
  chat.regenerate(chat.turns[1], 0);
  assert.deepEqual(chat.messages().map((one) => one.content), ["one"]);
  answered(chat, { content: "again" });
  chat.edit(chat.turns[0], "other", 0);
  assert.deepEqual(chat.messages().map((one) => one.content), ["other"]);
  assert.throws(() => chat.edit(chat.turns[0], "x", 0), /still open/);
});

test("a refused answer is left out of the next request", () => {
  const chat = new Conversation();
  chat.ask("one", 0);
  chat.fail({ status: 429, message: "full", retryAt: 9 }, 0);
  chat.regenerate(chat.turns[1], 0);
  assert.deepEqual(chat.messages().map((one) => one.content), ["one"]);
  assert.throws(() => chat.take({ error: { message: "broken" } }, 0), /broken/);
  chat.end(0);
  assert.match(chat.turns[1].error.message, /stream ended/);
});

test("an exported conversation is the same after its import", () => {
  const chat = withCalls();
  chat.answerCalls(["sunny", "noon"], 0);
  answered(chat, { content: "It is sunny." });
  chat.settings.temperature = "0.5";
  const other = new Conversation();
  other.import(chat.export());
  assert.deepEqual(other.messages(), chat.messages());
  assert.deepEqual(other.settings, chat.settings);
  for (const [bad, why] of [["{", /line 1, column 2/i], ["[]", /no conversation/], ['{"format":"cleave-chat-1","settings":{},"turns":[{"role":"x"}]}', /Turn 1/]]) {
    assert.throws(() => other.import(bad), why);
  }
  assert.deepEqual(other.messages(), chat.messages(), "a bad file changes nothing");
});

test("settings that cannot be read are named, and open no answer", () => {
  const read = (settings) => readSettings({ ...SETTINGS, ...settings });
  const { fields } = read({ temperature: "0", maxTokens: "9", effort: "none", tools: '[{"name":"f"}]', schema: "{}" });
  assert.deepEqual(fields, {
    temperature: 0, max_tokens: 9, reasoning_effort: "none", tool_choice: "auto",
    tools: [{ type: "function", function: { name: "f" } }],
    response_format: { type: "json_schema", json_schema: { name: "answer", schema: {} } },
  });
  for (const [name, text] of [["temperature", "hot"], ["temperature", "3"], ["maxTokens", "0"], ["maxTokens", "1.5"], ["tools", "{}"], ["schema", "[]"]]) {
    assert.ok(read({ [name]: text }).errors[name], `${name} ${text}`);
  }
  const chat = new Conversation();
  chat.settings.tools = "[";
  assert.throws(() => chat.ask("one", 0), /settings/);
  assert.deepEqual(chat.turns, []);
  assert.match(readTools('[{"name":"f"},{"name":"f"}]').error, /Tool 2.*already/);
  assert.match(readTools('[{"name":"f","parameters":[]}]').error, /"parameters"/);
});

test("an error in JSON has its line and column", () => {
  for (const [text, line, column] of [
    ["", 1, 1], ["{", 1, 2], ['{"a": 1,}', 1, 9], ["[1 2]", 1, 4], ['{\n  "a" 1}', 2, 7], ['"open', 1, 1], ["[01]", 1, 3], ["nul", 1, 1], ["1 x", 1, 3],
    ['{"a": "tab\there"}', 1, 7],
  ]) {
    assert.match(parseJson(text).error, new RegExp(`^Line ${line}, column ${column}:`), text);
  }
  for (const text of ['{"a":[1,-2.5e+3,true,null,"\\u00e9\\n"]}', " [] ", "{ }"]) assert.deepEqual(parseJson(text), { value: JSON.parse(text) });
});

test("a mismatch with a schema has its path", () => {
  const schema = {
    type: "object", required: ["n"], additionalProperties: false,
    properties: { n: { type: "integer" }, tags: { type: "array", items: { $ref: "#/$defs/tag" } }, x: { anyOf: [{ type: "string" }, { type: "null" }] } },
    $defs: { tag: { enum: ["a", "b"] } },
  };
  assert.equal(mismatch({ n: 1, tags: ["a", "b"], x: null }, schema), null);
  for (const [value, path] of [[[], "$"], [{}, '"n"'], [{ n: 1.5 }, "$.n"], [{ n: 1, tags: ["a", "c"] }, "$.tags[1]"], [{ n: 1, more: 1 }, "$.more"], [{ n: 1, x: 2 }, "$.x"]]) {
    assert.ok(mismatch(value, schema)?.includes(path), path);
  }
  assert.equal(mismatch(1, { $ref: "#" }), null, "a schema that names itself ends");
});
