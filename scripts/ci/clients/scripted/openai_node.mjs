// Tests a server that answers by script.yaml with the official OpenAI Node client and its helpers:
// `node openai_node.mjs BASE_URL`, in a folder where it is installed. Exits with 0 when every check held; the first
// check that fails throws.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const here = createRequire(pathToFileURL(`${process.cwd()}/`));
const load = (name) => import(pathToFileURL(here.resolve(name)).href);
const { default: OpenAI } = await load("openai");
const { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } = await load("openai/helpers/zod");
const { z } = await load("zod");

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const GREETING = "Hello, grüß dich, 你好 👋\nand that is all.";
const FINAL = "Rome is clear, at 21 degrees.";
const trip = z.object({ city: z.string(), days: z.number().int() });
const TRIP = { city: "Rome", days: 3 };
const says = (content) => ({ model, messages: [{ role: "user", content }] });

// Chat: an object by a schema, whole and streamed.
const format = { response_format: zodResponseFormat(trip, "trip") };
const parsed = await client.chat.completions.parse({ ...says("Describe the trip"), ...format });
assert.deepEqual(parsed.choices[0].message.parsed, TRIP);
assert.equal(parsed.choices[0].message.reasoning_content.trim(), "An object.");
const final = await client.chat.completions.stream({ ...says("Describe the trip"), ...format }).finalChatCompletion();
assert.deepEqual(final.choices[0].message.parsed, TRIP);

// Chat: a stream of pieces, and two turns by the helper that runs tools.
let text = "";
for await (const chunk of await client.chat.completions.create({ ...says("Greet me"), stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(text, GREETING);
const asked = [];
const weather = zodFunction({
  name: "weather", parameters: trip, description: "The weather of a city.",
  function: (input) => {
    asked.push(input);
    return `clear, 21 degrees in ${input.city}`;
  },
});
for (const stream of [false, true]) {
  const runner = client.chat.completions.runTools({ ...says("How is the weather in Rome?"), tools: [weather], stream });
  assert.equal(await runner.finalContent(), FINAL);
  assert.deepEqual(asked.splice(0), [TRIP]);
}

// Responses: a text, an object, and two turns.
const plain = await client.responses.create({ model, input: "Greet me" });
assert.equal(plain.output_text, GREETING);
assert.deepEqual(plain.output.map((item) => item.type), ["reasoning", "message"]);
const object = { text: { format: zodTextFormat(trip, "trip") } };
assert.deepEqual((await client.responses.parse({ model, input: "Describe the trip", ...object })).output_parsed, TRIP);
const tools = [zodResponsesFunction({ name: "weather", parameters: trip })];
const input = [{ role: "user", content: "How is the weather in Rome?" }];
const events = client.responses.stream({ model, input, tools });
const kinds = new Set();
for await (const event of events) kinds.add(event.type);
assert.ok(kinds.has("response.function_call_arguments.done") && kinds.has("response.completed"), [...kinds].join());
const first = await events.finalResponse();
const call = first.output.find((item) => item.type === "function_call");
assert.deepEqual([call.name, call.parsed_arguments], ["weather", TRIP]);
const result = { type: "function_call_output", call_id: call.call_id, output: "clear, 21 degrees in Rome" };
const { parsed_arguments: _, ...sent } = call;
const second = await client.responses.create({ model, input: [...input, sent, result], tools });
assert.equal(second.output_text, FINAL);
