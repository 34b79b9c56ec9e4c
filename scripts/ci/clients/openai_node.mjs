// Tests a running server with the official OpenAI Node client: `node openai_node.mjs BASE_URL`, in a folder where
// `openai` is installed. Exits with 0 when every check held; the first check that fails throws.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { pathToFileURL } from "node:url";

// The module is resolved from the working folder, where the client is installed.
const here = createRequire(pathToFileURL(`${process.cwd()}/`));
const { default: OpenAI } = await import(pathToFileURL(here.resolve("openai")).href);
const { version } = JSON.parse(readFileSync(join(dirname(here.resolve("openai")), "package.json"), "utf8"));

const baseURL = `${process.argv[2]}/v1`;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

const model = (await client.models.list()).data[0].id;
assert.equal((await client.models.retrieve(model)).id, model);

// Chat gives the same text whole and streamed.
const ask = { model, messages: [{ role: "user", content: "What is a slice?" }], temperature: 0, max_tokens: 24 };
const whole = await client.chat.completions.create(ask);
const text = whole.choices[0].message.content;
assert.ok(text);
assert.equal(whole.usage.total_tokens, whole.usage.prompt_tokens + whole.usage.completion_tokens);
let streamed = "";
let usage = null;
let finish = null;
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  finish = chunk.choices[0]?.finish_reason ?? finish;
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, text);
assert.equal(finish, whole.choices[0].finish_reason);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

// Completions take several prompts, a stop string, a seed and log-probabilities.
const complete = (more) => client.completions.create({ model, prompt: "A vector is", temperature: 0, max_tokens: 24, ...more });
const plain = (await complete({})).choices[0].text;
let pieces = "";
for await (const chunk of await complete({ stream: true })) pieces += chunk.choices[0].text;
assert.equal(pieces, plain);
const several = await complete({ prompt: ["A vector is", "The borrow"], max_tokens: 8 });
assert.deepEqual(several.choices.map((choice) => choice.index), [0, 1]);
const cut = plain.slice(8, 11);
const stopped = (await complete({ stop: [cut] })).choices[0];
assert.equal(stopped.text, plain.slice(0, plain.indexOf(cut)));
const draw = { temperature: 1, seed: 11, n: 2 };
const [first, second] = [await complete(draw), await complete(draw)];
assert.deepEqual(first.choices.map((c) => c.text), second.choices.map((c) => c.text));
const scored = await client.chat.completions.create({ ...ask, max_tokens: 4, logprobs: true, top_logprobs: 3 });
assert.equal(scored.choices[0].logprobs.content[0].top_logprobs.length, 3);

// Errors have their class and name the field; the answer has the request's id.
await assert.rejects(complete({ model: "nonesuch" }), (error) => error instanceof OpenAI.NotFoundError && error.param === "model");
await assert.rejects(complete({ temperature: -1 }), (error) =>
  error instanceof OpenAI.BadRequestError && error.param === "temperature" && error.requestID?.length > 0);

// The server goes on serving after a client that leaves in the middle of an answer.
const left = await client.completions.create({ model, prompt: "A", max_tokens: 400, stream: true, ignore_eos: true });
for await (const _ of left) break;
assert.equal((await complete({})).choices[0].text, plain);

// The client retries a refused request, not before its retry-after, and gives up after its only retry.
const seen = [];
const patient = new OpenAI({
  baseURL,
  apiKey: "none",
  maxRetries: 1,
  fetch: async (...request) => {
    const answer = await fetch(...request);
    seen.push({ at: performance.now(), status: answer.status, told: Number(answer.headers.get("retry-after-ms")) });
    return answer;
  },
});
await assert.rejects(
  patient.completions.create({ model, prompt: "Never in time", max_tokens: 4 }, { headers: { "x-slo-ttft-ms": "0.001" } }),
  (error) => error instanceof OpenAI.RateLimitError && error.code === "slo_ttft_unreachable",
);
assert.deepEqual(seen.map(({ status }) => status), [429, 429]);
for (let i = 1; i < seen.length; i++) assert.ok(seen[i].at - seen[i - 1].at >= seen[i - 1].told, JSON.stringify(seen));

console.log("openai", version, "ok");
