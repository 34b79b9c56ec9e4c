// One turn of a chat on the page. Owns: its elements, which stay while the turn grows. Never: shows a text otherwise
// than as text, whoever wrote it, or changes a turn.
import { mismatch, parseJson } from "./json.js";
import { waterfallRows } from "./waterfall.js";
import { make, number, say, time } from "./words.js";

/** A button that calls when it is pressed. */
export function button(text, call, name = "") {
  const element = make("button", name, text);
  element.type = "button";
  element.addEventListener("click", call);
  return element;
}

/** Parts of an answer: text, and blocks of code between lines of three backticks. */
export function parts(text) {
  const found = [{ kind: "words", text: "" }];
  for (const line of text.split("\n")) {
    const last = found.at(-1);
    if (line.startsWith("```")) found.push({ kind: last.kind === "code" ? "words" : "code", text: "" });
    else last.text += `${line}\n`;
  }
  return found.map(({ kind, text: all }) => ({ kind, text: all.replace(/\n$/, "") })).filter((part) => part.text);
}

/** Copies a text; a page without TLS on another machine has no clipboard of its own. */
async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const box = document.body.appendChild(make("textarea", "visually-hidden"));
    box.value = text;
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  say(pressed, "Copied");
  setTimeout(() => say(pressed, "Copy"), 1500);
}

function copyButton(text) {
  const pressed = button("Copy", () => copy(text(), pressed));
  return pressed;
}

/** Puts words and code into an element, and leaves what has not changed. */
function write(element, text) {
  parts(text).forEach((part, at) => {
    let child = element.children[at];
    if (child?.dataset.kind !== part.kind) {
      const fresh = part.kind === "code" ? make("div") : make("div", "words");
      if (part.kind === "code") {
        const code = make("pre");
        fresh.append(code, copyButton(() => code.textContent));
      }
      fresh.dataset.kind = part.kind;
      if (child) child.replaceWith(fresh);
      else element.append(fresh);
      child = fresh;
    }
    say(part.kind === "code" ? child.firstChild : child, part.text);
  });
  while (element.children.length > parts(text).length) element.lastChild.remove();
}

/** A message of the user, with its editor. */
export class MessageView {
  constructor(turn, { edit }) {
    this.turn = turn;
    this.element = make("li", "turn turn-user");
    this.head = make("div", "turn-head");
    this.change = button("Edit", () => this.open());
    this.head.append(make("h3", "", "You"), copyButton(() => turn.text), this.change);
    this.words = make("div", "words", turn.text);
    this.form = make("form");
    this.form.hidden = true;
    this.box = make("textarea");
    this.box.rows = 4;
    this.box.setAttribute("aria-label", "Edited message");
    const tools = make("div", "tools");
    const send = make("button", "primary", "Send again");
    tools.append(button("Cancel", () => this.close()), send);
    const label = make("label", "block");
    label.append(this.box);
    this.form.append(label, tools);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      edit(turn, this.box.value);
    });
    this.element.append(this.head, this.words, this.form);
  }

  open() {
    this.box.value = this.turn.text;
    [this.form.hidden, this.words.hidden] = [false, true];
    this.box.focus();
  }

  close() {
    [this.form.hidden, this.words.hidden] = [true, false];
    this.change.focus();
  }

  update(isOpen) {
    this.change.disabled = isOpen;
  }
}

/** An answer: reasoning, text, calls, and where its time went. */
export class AnswerView {
  constructor(turn, { regenerate, results }) {
    this.turn = turn;
    this.element = make("li", "turn turn-answer");
    const head = make("div", "turn-head");
    this.again = button("Regenerate", () => regenerate(turn));
    head.append(make("h3", "", "Model"), copyButton(() => turn.text), this.again);
    this.reasoning = fold("reasoning");
    this.thoughts = this.reasoning.appendChild(make("div", "words"));
    this.thoughts.tabIndex = 0;
    this.thoughts.setAttribute("role", "region");
    this.thoughts.setAttribute("aria-label", "Reasoning");
    this.text = make("div", "text");
    this.verdict = make("p", "checked");
    this.calls = make("form");
    this.give = make("button", "primary", "Give results and go on");
    this.calls.addEventListener("submit", (event) => {
      event.preventDefault();
      results([...this.calls.querySelectorAll("textarea")].map((box) => box.value));
    });
    this.error = make("p", "error");
    this.error.setAttribute("role", "alert");
    this.times = fold("times");
    this.stages = make("tbody");
    const table = make("table", "waterfall");
    table.append(make("caption", "visually-hidden", "Where the request's time went"), this.stages);
    this.facts = make("dl", "facts");
    this.times.append(table, this.facts);
    this.element.append(head, this.reasoning, this.text, this.verdict, this.calls, this.error, this.times);
  }

  /** Shows the turn as it is. `result` gives a call's result, `waits` says whether calls wait for theirs. */
  update(isOpen, { result, waits, now }) {
    const { turn } = this;
    this.again.disabled = isOpen;
    this.element.setAttribute("aria-busy", String(turn.state === "open"));
    this.reasoning.hidden = !turn.reasoning;
    if (turn.reasoning) {
      const thinks = turn.state === "open" && !turn.text && !turn.calls.length;
      say(this.reasoning.firstChild, `${thinks ? "Reasoning now" : "Reasoning"}, ${number(turn.reasoning.length)} characters`);
      say(this.thoughts, turn.reasoning);
    }
    this.showText();
    this.showCalls(result, waits);
    this.showError(now);
    this.showTimes();
  }

  /** An answer by a schema is checked and printed with line breaks once it is whole. */
  showText() {
    const { turn } = this;
    const isChecked = turn.schema && turn.state === "done" && !turn.calls.length;
    const { value, error } = isChecked ? parseJson(turn.text) : {};
    const fault = isChecked ? error ?? mismatch(value, turn.schema) : null;
    write(this.text, isChecked && !error ? `\`\`\`\n${JSON.stringify(value, null, 2)}` : turn.text);
    this.verdict.hidden = !isChecked;
    this.verdict.dataset.holds = fault ? "no" : "yes";
    say(this.verdict, fault ? `✕ Not by the schema: ${fault}` : "✓ JSON by the schema");
  }

  showCalls(result, waits) {
    const { turn, calls } = this;
    calls.hidden = !turn.calls.length;
    turn.calls.forEach((call, at) => {
      const box = calls.children[at] ?? calls.appendChild(callView(call, at));
      say(box.children[0], `Call: ${call.name || "…"}`);
      const { value, error } = turn.state === "open" ? { error: true } : parseJson(call.text);
      say(box.children[1], error ? call.text : JSON.stringify(value, null, 2));
      const given = result(call);
      const input = box.querySelector("label");
      if (waits && !input) box.append(resultInput(call));
      if (!waits) input?.remove();
      if (given !== undefined && !box.querySelector(".given")) box.append(make("h4", "", "Result"), make("pre", "given", given));
    });
    const extra = turn.calls.length;
    while (calls.children.length > extra) calls.lastChild.remove();
    if (waits) calls.append(this.give);
  }

  showError(now) {
    const { error, state } = this.turn;
    const isStopped = state === "stopped";
    this.error.hidden = !error && !isStopped;
    if (!error) return say(this.error, isStopped ? "Stopped." : "");
    const left = Math.ceil(((error.retryAt ?? now) - now) / 1000);
    say(this.error, `Not answered: ${error.message}`);
    say(this.again, left > 0 ? `Try again (advised in ${left} s)` : "Try again");
  }

  showTimes() {
    const { at, usage, timing, finish, warnings, state } = this.turn;
    this.times.hidden = state === "open" || (!usage && !timing);
    if (this.times.hidden || this.stages.children.length || this.facts.children.length) return;
    const here = at.first === null ? null : at.first - at.sent;
    const head = [`first token ${time(timing?.ttft_ms ?? here)}`];
    if (timing?.tpot_ms) head.push(`${time(timing.tpot_ms)} per token`);
    if (usage) head.push(`${number(usage.output)} tokens`);
    if (timing?.e2e_ms) head.push(`${time(timing.e2e_ms)} in all`);
    say(this.times.firstChild, head.join(" · "));
    this.stages.replaceChildren(...(timing ? waterfallRows(timing) : []));
    const facts = [];
    if (usage) facts.push(["Prompt", `${number(usage.prompt)} tokens, ${number(usage.cached)} of them from the prefix cache`]);
    if (here !== null) facts.push(["First text here", time(here)]);
    if (at.end && at.first) facts.push(["Answered here in", time(at.end - at.sent)]);
    if (finish) facts.push(["Ended by", { stop: "the model", length: "the limit of tokens", tool_calls: "its calls" }[finish] ?? finish]);
    for (const warning of warnings) facts.push(["Warning", warning]);
    this.facts.replaceChildren(...facts.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  }
}

function fold(name) {
  const details = make("details", name);
  details.append(make("summary"));
  return details;
}

function callView(call, at) {
  const box = make("section", "call");
  box.setAttribute("aria-label", `Call ${at + 1}`);
  box.append(make("h4"), make("pre"));
  return box;
}

function resultInput(call) {
  const label = make("label", "block");
  const box = make("textarea", "code");
  box.rows = 3;
  label.append(make("span", "", `Result of ${call.name}`), box);
  return label;
}
