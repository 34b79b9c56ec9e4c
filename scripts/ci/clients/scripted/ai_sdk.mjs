// Tests a server that answers by script.yaml with Vercel's AI SDK and three of its providers:
// `node ai_sdk.mjs BASE_URL`, in a folder where they are installed. Exits with 0 when every check held; the first check
// that fails throws.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// Modules are resolved from the working folder, where they are installed.
const here = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(here.resolve(name)).href);
const { generateText, streamText, generateObject, Output, tool, isStepCount } = await load("ai");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createAnthropic } = await load("@ai-sdk/anthropic");
const { z } = await load("zod");

const url = process.argv[2];
const served = (await (await fetch(`${url}/v1/models`)).json()).data[0].id;
// Items that the provider has by reference.
let references = 0;
const counting = (address, request) => {
  const input = JSON.parse(request?.body ?? "{}").input;
  if (Array.isArray(input)) references += input.filter((item) => item.type === "item_reference").length;
  return fetch(address, request);
};
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none", fetch: counting });
const compatible = createOpenAICompatible({
  name: "cleave", baseURL: `${url}/v1`, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" });
// Reasoning is shown by Messages only if it is asked for. From Responses the provider takes summaries, which Cleave has
// none of.
const thinking = { providerOptions: { anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } } };
// The provider otherwise has the items of earlier answers by reference.
const stateless = { providerOptions: { openai: { store: false } } };
const PROVIDERS = {
  "chat completions": { model: openai.chat(served), reasoning: "" },
  responses: { model: openai.responses(served), reasoning: "", more: stateless },
  "stored responses": { model: openai.responses(served), reasoning: "", has: "references" },
  "openai-compatible": { model: compatible(served), reasoning: 'A greeting, in "several" scripts.' },
  messages: { model: anthropic(served), reasoning: 'A greeting, in "several" scripts.', more: thinking },
};

const GREETING = "Hello, grüß dich, 你好 👋\nand that is all.";
const trip = z.object({ city: z.string(), days: z.number().int() });
const TRIP = { city: "Rome", days: 3 };
const asked = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: trip,
  execute: async (input) => {
    asked.push(input);
    return `clear, 21 degrees in ${input.city}`;
  },
});

for (const [name, { model, reasoning, more, has }] of Object.entries(PROVIDERS)) {
  references = 0;
  const ask = { model, maxRetries: 0, ...more };

  // A text, whole and streamed, with its reasoning apart, and usage.
  const whole = await generateText({ ...ask, prompt: "Greet me" });
  assert.equal(whole.text, GREETING, name);
  assert.equal((whole.reasoningText ?? "").trim(), reasoning, name);
  assert.equal(whole.finishReason, "stop", name);
  assert.ok(whole.usage.inputTokens > 0 && whole.usage.outputTokens > 0, name);
  const stream = streamText({ ...ask, prompt: "Greet me" });
  let text = "";
  let pieces = 0;
  for await (const piece of stream.textStream) {
    text += piece;
    pieces += 1;
  }
  assert.equal(text, GREETING, name);
  assert.ok(pieces > 1, `${name}: it came in pieces`);
  assert.equal(((await stream.reasoningText) ?? "").trim(), reasoning, name);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens, name);

  // Two turns with a tool.
  const turns = { ...ask, prompt: "How is the weather in Rome?", tools: { weather }, stopWhen: isStepCount(3) };
  const done = await generateText(turns);
  assert.equal(done.text, "Rome is clear, at 21 degrees.", name);
  assert.equal(done.steps.length, 2, name);
  assert.equal(done.steps[0].finishReason, "tool-calls", name);
  const streamed = streamText(turns);
  const calls = [];
  for await (const part of streamed.fullStream) {
    if (part.type === "tool-call") calls.push([part.toolName, part.input]);
    assert.notEqual(part.type, "error", `${name}: ${part.error}`);
  }
  assert.deepEqual(calls, [["weather", TRIP]], name);
  assert.equal(await streamed.text, "Rome is clear, at 21 degrees.", name);
  assert.deepEqual(asked.splice(0), [TRIP, TRIP], name);

  // Two calls in one answer, and their results in the next request.
  const both = await generateText({ ...turns, prompt: "Compare Rome and Oslo" });
  assert.equal(both.steps[0].text.trim(), "I ask twice.", name);
  assert.deepEqual(asked.splice(0), [TRIP, { city: "Oslo", days: 1 }], name);
  assert.equal(both.text, "Both cities have 21 degrees.", name);

  // A further turn has the messages of those before it, and with them the items of their answers.
  const messages = [{ role: "user", content: turns.prompt }, ...done.responseMessages, { role: "user", content: "Greet me" }];
  assert.equal((await generateText({ ...ask, messages, tools: { weather } })).text, "Rome is clear, at 21 degrees.", name);
  assert.equal(references > 0, has === "references", name);

  // An object of a schema, in three ways.
  const prompt = "Describe the trip";
  assert.deepEqual((await generateText({ ...ask, prompt, output: Output.object({ schema: trip }) })).output, TRIP, name);
  assert.deepEqual((await generateObject({ ...ask, prompt, schema: trip })).object, TRIP, name);
  const partial = streamText({ ...ask, prompt, output: Output.object({ schema: trip }) });
  const objects = [];
  for await (const object of partial.partialOutputStream) objects.push(object);
  assert.deepEqual(objects.at(-1), TRIP, name);
}
