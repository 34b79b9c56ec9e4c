// The state of a chat: settings, turns, and the request that goes on with them. Owns: the order of turns, which of
// them are sent, and the meaning of each chunk of a stream. Never: sends, waits, or touches the page.
// Invariant: at most one answer is open, and it is the last turn.
import { parseJson } from "./json.js";

/** The form of an exported conversation. */
const FORMAT = "cleave-chat-1";

/** Texts as they were typed; an empty one leaves the choice to the server. */
export const SETTINGS = {
  system: "", temperature: "", maxTokens: "", sloClass: "", effort: "", tools: "", toolChoice: "auto", schema: "",
};

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);

/** Reads tools, as functions or in OpenAI's form: `{ value }`, or `{ error }` with the place. */
export function readTools(text) {
  const { value: all, error } = parseJson(text);
  if (error) return { error };
  if (!Array.isArray(all)) return { error: "Expected a list: [{\"name\": …, \"parameters\": {…}}]." };
  const value = [];
  for (const [at, one] of all.entries()) {
    const tool = isObject(one) && !("function" in one) ? { type: "function", function: one } : one;
    const place = `Tool ${at + 1}`;
    if (!isObject(tool?.function)) return { error: `${place}: expected an object with the function.` };
    const { name, parameters } = tool.function;
    if (typeof name !== "string" || !name) return { error: `${place}: it needs a "name".` };
    if (parameters !== undefined && !isObject(parameters)) return { error: `${place}, "${name}": "parameters" is not an object.` };
    if (value.some((other) => other.function.name === name)) return { error: `${place}: "${name}" is there already.` };
    value.push(tool);
  }
  return { value };
}

/** Reads a JSON Schema: `{ value }`, or `{ error }` with the place. */
export function readSchema(text) {
  const read = parseJson(text);
  if (!read.error && !isObject(read.value)) return { error: "Expected a schema: {\"type\": \"object\", …}." };
  return read;
}

function readNumber(text, fits, wanted) {
  const value = Number(text);
  return fits(value) ? { value } : { error: `Expected ${wanted}.` };
}

/** The settings as fields of a request, and an error for each that cannot be read. */
export function readSettings(settings) {
  const [fields, errors] = [{}, {}];
  const take = (name, read, put) => {
    if (!settings[name].trim()) return;
    const { value, error } = read(settings[name]);
    if (error) errors[name] = error;
    else put(value);
  };
  take("temperature", (text) => readNumber(text, (value) => value >= 0 && value <= 2, "a number from 0 to 2"), (value) => { fields.temperature = value; });
  take("maxTokens", (text) => readNumber(text, (value) => Number.isInteger(value) && value > 0, "a whole number from 1 on"), (value) => { fields.max_tokens = value; });
  take("effort", (value) => ({ value }), (value) => { fields.reasoning_effort = value; });
  take("tools", readTools, (value) => { if (value.length) Object.assign(fields, { tools: value, tool_choice: settings.toolChoice }); });
  take("schema", readSchema, (schema) => { fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } }; });
  return { fields, errors };
}

/** An answer without anything in it. `at` has the times in milliseconds: sent, first token, end. */
function emptyAnswer(now, schema) {
  return {
    role: "assistant", state: "open", reasoning: "", text: "", calls: [], finish: null, usage: null, timing: null,
    warnings: [], error: null, schema, at: { sent: now, first: null, end: null },
  };
}

export class Conversation {
  constructor() {
    this.settings = { ...SETTINGS };
    this.turns = [];
  }

  // === getters

  /** The answer that is streamed now, or null. */
  get open() {
    const last = this.turns.at(-1);
    return last?.state === "open" ? last : null;
  }

  /** Calls at the end that have no result. */
  get waiting() {
    const last = this.turns.at(-1);
    return last?.role === "assistant" && last.state === "done" ? last.calls : [];
  }

  /** The result of a call that is a part of this turn, or undefined. */
  result(turn, call) {
    // Results follow in the order of the calls, whose ids may be empty or alike.
    const from = this.turns.indexOf(turn) + 1;
    const turns = this.turns.slice(from, from + turn.calls.indexOf(call) + 1);
    return turns.every((next) => next.role === "tool") ? turns[turn.calls.indexOf(call)]?.text : undefined;
  }

  /** The body of the request for the open answer. */
  request() {
    const { fields } = readSettings(this.settings);
    return { messages: this.messages(), ...fields, stream: true, stream_options: { include_usage: true } };
  }

  /** Everything before the open answer, in its order. Calls without results and empty answers are left out. */
  messages() {
    const system = this.settings.system.trim();
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const turn of this.turns) {
      if (turn.role === "user") messages.push({ role: "user", content: turn.text });
      if (turn.role === "tool") messages.push({ role: "tool", tool_call_id: turn.call, content: turn.text });
      if (turn.role !== "assistant" || turn.state === "open") continue;
      const calls = turn.calls.filter((call) => this.result(turn, call) !== undefined);
      if (!turn.text && !calls.length) continue;
      const message = { role: "assistant", content: turn.text || null };
      if (turn.reasoning) message.reasoning_content = turn.reasoning;
      if (calls.length) {
        message.tool_calls = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
      }
      messages.push(message);
    }
    return messages;
  }

  // === commands: each opens an answer

  ask(text, now) {
    this.demand(text.trim(), "There is no message.");
    this.demand(!this.waiting.length, "The calls need their results first.");
    this.ready();
    this.turns.push({ role: "user", text });
    return this.begin(now);
  }

  /** Gives the results of all calls that wait, in their order. */
  answerCalls(results, now) {
    const calls = this.waiting;
    this.demand(calls.length && calls.length === results.length, "Each call needs a result.");
    this.ready();
    calls.forEach((call, at) => this.turns.push({ role: "tool", call: call.id, text: results[at] }));
    return this.begin(now);
  }

  /** Replaces an answer, and forgets everything after it. */
  regenerate(turn, now) {
    this.ready();
    this.turns.length = this.place(turn, "assistant");
    return this.begin(now);
  }

  /** Replaces a message, and forgets everything after it. */
  edit(turn, text, now) {
    this.demand(text.trim(), "There is no message.");
    this.ready();
    this.turns.length = this.place(turn, "user");
    return this.ask(text, now);
  }

  /** Throws, before anything is changed, if no answer can be opened. */
  ready() {
    this.demand(!this.open, "An answer is still open; stop it first.");
    this.demand(!Object.keys(readSettings(this.settings).errors).length, "The settings have an error.");
  }

  begin(now) {
    const { fields } = readSettings(this.settings);
    const answer = emptyAnswer(now, fields.response_format?.json_schema.schema ?? null);
    this.turns.push(answer);
    return answer;
  }

  place(turn, role) {
    const at = this.turns.indexOf(turn);
    this.demand(at >= 0 && turn.role === role, "This turn is gone.");
    return at;
  }

  demand(holds, otherwise) {
    if (!holds) throw new Error(otherwise);
  }

  // === facts about the open answer

  /** Takes a chunk of the stream; one with an error throws it. */
  take(chunk, now) {
    const answer = this.open;
    if (!answer) return;
    if (chunk.error) throw new Error(chunk.error.message ?? "The server reported an error.");
    answer.usage = chunk.usage ? readUsage(chunk.usage) : answer.usage;
    answer.timing = chunk.timing ?? answer.timing;
    answer.warnings.push(...(chunk.warnings ?? []).map((warning) => warning.message));
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (reasoning || delta.content || delta.tool_calls?.length) answer.at.first ??= now;
    answer.reasoning += reasoning;
    answer.text += delta.content ?? "";
    for (const part of delta.tool_calls ?? []) takeCall(answer.calls, part);
    answer.finish = choice.finish_reason ?? answer.finish;
  }

  /** The stream ended by itself. */
  end(now) {
    if (this.open && !this.open.finish) this.fail({ message: "The stream ended before the answer did." }, now);
    else this.close("done", now);
  }

  /** The user stopped the answer; its calls may be cut, so they are dropped. */
  stop(now) {
    if (this.open) this.open.calls = [];
    this.close("stopped", now);
  }

  /** `error` has a message, and for a refusal its status and `retryAt` in milliseconds. */
  fail(error, now) {
    if (!this.open) return;
    Object.assign(this.open, { error, calls: [] });
    this.close("failed", now);
  }

  close(state, now) {
    const answer = this.open;
    if (!answer) return;
    answer.at.end = now;
    answer.state = state;
  }

  // === files

  export() {
    return JSON.stringify({ format: FORMAT, settings: this.settings, turns: this.turns.filter((turn) => turn.state !== "open") }, null, 2);
  }

  /** Replaces everything by an exported conversation; throws an error that says what is wrong with it. */
  import(text) {
    this.demand(!this.open, "An answer is still open; stop it first.");
    const { value, error } = parseJson(text);
    this.demand(!error, `This is not JSON. ${error}`);
    this.demand(value?.format === FORMAT && isObject(value.settings) && Array.isArray(value.turns), `This is no conversation of this page (format ${FORMAT}).`);
    const turns = value.turns.map((turn, at) => readTurn(turn, `Turn ${at + 1}`));
    const settings = { ...SETTINGS };
    for (const name of Object.keys(SETTINGS)) if (typeof value.settings[name] === "string") settings[name] = value.settings[name];
    Object.assign(this, { turns, settings });
  }
}

const readUsage = (usage) => ({
  prompt: usage.prompt_tokens, cached: usage.prompt_tokens_details?.cached_tokens ?? 0, output: usage.completion_tokens,
});

/** Takes a part of a call: the first has its id and name, later ones more of its arguments. */
function takeCall(calls, part) {
  const at = Number.isInteger(part.index) && part.index >= 0 && part.index < 1024 ? part.index : calls.length;
  while (calls.length <= at) calls.push({ id: "", name: "", text: "" });
  const call = calls[at];
  call.id ||= part.id ?? "";
  call.name ||= part.function?.name ?? "";
  call.text += part.function?.arguments ?? "";
}

/** A turn of a file, with texts where texts belong. */
function readTurn(turn, place) {
  const text = (value) => {
    if (typeof value !== "string") throw new Error(`${place} lacks a text.`);
    return value;
  };
  if (turn?.role === "user") return { role: "user", text: text(turn.text) };
  if (turn?.role === "tool") return { role: "tool", call: text(turn.call), text: text(turn.text) };
  if (turn?.role !== "assistant") throw new Error(`${place} is of nobody: expected user, assistant or tool.`);
  const calls = (Array.isArray(turn.calls) ? turn.calls : []).map((call) => ({ id: text(call?.id), name: text(call?.name), text: text(call?.text) }));
  const state = ["stopped", "failed"].includes(turn.state) ? turn.state : "done";
  const error = state === "failed" ? { message: String(turn.error?.message ?? "It failed.") } : null;
  return {
    ...emptyAnswer(0, isObject(turn.schema) ? turn.schema : null), state, error, calls, text: text(turn.text), reasoning: text(turn.reasoning),
    finish: typeof turn.finish === "string" ? turn.finish : null, at: { sent: 0, first: null, end: null },
    usage: isObject(turn.usage) ? numbers(turn.usage) : null, timing: isObject(turn.timing) ? numbers(turn.timing) : null,
  };
}

const numbers = (object) => Object.fromEntries(Object.entries(object).filter(([, value]) => typeof value === "number"));
