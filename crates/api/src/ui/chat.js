// The chat: sends requests as any client's and shows their streams. Owns: the requests, the key, and the page around
// the turns. Never: stores a text, or sends anything to another server.
import { Conversation, readSettings } from "./conversation.js";
import { events } from "./events.js";
import { followTheme } from "./theme.js";
import { AnswerView, MessageView } from "./turn_view.js";
import { $, make, offerModels, say } from "./words.js";

const chat = new Conversation();
const views = new WeakMap();
let abort = null;

followTheme();

// === requests

function headers() {
  const all = { "content-type": "application/json", "x-cleave-timing": "1" };
  const name = chat.settings.sloClass.trim();
  if (name) all["x-slo-class"] = name;
  if ($("api-key").value) all.authorization = `Bearer ${$("api-key").value}`;
  return all;
}

/** Streams the open answer. */
async function answer() {
  abort = new AbortController();
  const { signal } = abort;
  show();
  try {
    const body = JSON.stringify({ model: $("model").value, ...chat.request() });
    const reply = await fetch("../v1/chat/completions", { method: "POST", headers: headers(), body, signal, credentials: "omit" });
    if (!reply.ok) throw await refusal(reply);
    for await (const { data } of events(reply.body)) {
      // An answer that was stopped takes nothing more.
      if (signal.aborted) return;
      if (data !== "[DONE]") chat.take(JSON.parse(data), Date.now());
      show();
    }
    chat.end(Date.now());
  } catch (error) {
    if (signal.aborted) return;
    chat.fail(error instanceof Error ? { message: error.message } : error, Date.now());
  } finally {
    if (abort?.signal === signal) abort = null;
    show();
  }
}

/** The reason in words, and when to come back. */
async function refusal(reply) {
  const told = (await reply.json().catch(() => null))?.error?.message ?? `status ${reply.status}`;
  if (reply.status === 401) {
    askKey();
    return { status: 401, message: `${told} Enter the API key, and try again.` };
  }
  const seconds = Number(reply.headers.get("retry-after-ms") ?? NaN) / 1000 || Number(reply.headers.get("retry-after") ?? NaN);
  return { status: reply.status, message: told, retryAt: seconds > 0 ? Date.now() + seconds * 1000 : undefined };
}

function askKey() {
  $("settings-fold").open = true;
  $("api-key-field").hidden = false;
  $("api-key").focus();
}

function stop() {
  if (!chat.open) return;
  abort?.abort();
  chat.stop(Date.now());
  show();
}

/** Does a command of the user; what cannot be done is said in words. */
function attempt(command) {
  try {
    command();
  } catch (error) {
    say($("status"), error.message);
    return;
  }
  answer();
  $("message").focus();
}

// === turns

const actions = {
  edit: (turn, text) => attempt(() => chat.edit(turn, text, Date.now())),
  regenerate: (turn) => attempt(() => chat.regenerate(turn, Date.now())),
  results: (all) => attempt(() => chat.answerCalls(all, Date.now())),
};

function view(turn) {
  if (!views.has(turn)) views.set(turn, turn.role === "user" ? new MessageView(turn, actions) : new AnswerView(turn, actions));
  return views.get(turn);
}

let isDue = false;

/** Shows the state before the next frame, however many chunks came. */
function show() {
  if (isDue) return;
  isDue = true;
  // A hidden page has no frames.
  if (document.hidden) setTimeout(draw);
  else requestAnimationFrame(draw);
}

function draw() {
  isDue = false;
  const list = $("turns");
  const page = document.scrollingElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < 80;
  const [isOpen, waiting, now] = [Boolean(chat.open), chat.waiting.length > 0, Date.now()];
  const shown = chat.turns.filter((turn) => turn.role !== "tool");
  shown.forEach((turn, at) => {
    const { element } = view(turn);
    if (list.children[at] !== element) list.insertBefore(element, list.children[at] ?? null);
    view(turn).update(isOpen, { now, result: (call) => chat.result(turn, call), waits: waiting && turn === chat.turns.at(-1) });
  });
  while (list.children.length > shown.length) list.lastChild.remove();
  $("empty").hidden = shown.length > 0;
  say($("send"), isOpen ? "Stop" : "Send");
  say($("status"), state(chat.turns.at(-1), waiting));
  if (isAtEnd) page.scrollTop = page.scrollHeight;
  // The advised wait is counted down.
  if (shown.at(-1)?.error?.retryAt > now) setTimeout(show, 500);
}

function state(last, waiting) {
  if (!last) return "";
  if (waiting) return "The model waits for the results of its calls.";
  return { open: "Answering.", done: "The answer is complete.", stopped: "Stopped.", failed: "Not answered." }[last.state] ?? "";
}

// === composer

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.open) return stop();
  attempt(() => {
    chat.ask($("message").value, Date.now());
    $("message").value = "";
  });
});

$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.open) $("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});

// === settings

const inputs = [...document.querySelectorAll("[data-setting]")];

function check() {
  const { errors } = readSettings(chat.settings);
  for (const input of inputs) {
    const problem = $(`${input.dataset.setting}-problem`);
    if (!problem) continue;
    const error = errors[input.dataset.setting];
    problem.hidden = !error;
    say(problem, error ?? "");
    if (error) {
      input.setAttribute("aria-invalid", "true");
      input.setAttribute("aria-describedby", problem.id);
    } else {
      input.removeAttribute("aria-invalid");
    }
  }
}

for (const input of inputs) {
  input.addEventListener("input", () => {
    chat.settings[input.dataset.setting] = input.value;
    check();
  });
}
$("settings").addEventListener("submit", (event) => event.preventDefault());

function fill() {
  for (const input of inputs) input.value = chat.settings[input.dataset.setting];
  check();
}

// === files

$("new").addEventListener("click", () => {
  stop();
  chat.turns = [];
  show();
  $("message").focus();
});

$("export").addEventListener("click", () => {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([chat.export()], { type: "application/json" }));
  link.download = "conversation.json";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
});

$("import").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  if (!file) return;
  const text = await file.text();
  $("file").value = "";
  try {
    chat.import(text);
  } catch (error) {
    say($("status"), error.message);
    return;
  }
  fill();
  show();
});

// === the server

/** Finds the served models; another port may serve clients. */
async function look() {
  const reply = await fetch("../v1/models", { headers: headers(), credentials: "omit" }).catch(() => null);
  if (reply?.status === 401) {
    askKey();
    return;
  }
  if (reply?.status === 404) {
    say($("status"), "This address serves operators alone; open the chat at the address of clients.");
    $("send").disabled = true;
    return;
  }
  const models = reply?.ok ? (await reply.json()).data : [];
  setTimeout(look, offerModels(models) ? 30_000 : 2000);
}

$("api-key").addEventListener("change", look);

/** Offers the policy's classes, where this page may see them. */
async function offerClasses() {
  const key = sessionStorage.getItem("cleave-admin-key");
  const reply = await fetch("events", { headers: key ? { authorization: `Bearer ${key}` } : {}, credentials: "omit" });
  if (!reply.ok) return;
  for await (const { data } of events(reply.body)) {
    $("classes").replaceChildren(...JSON.parse(data).classes.map((one) => {
      const option = make("option");
      option.value = one.name;
      return option;
    }));
    return;
  }
}

if (innerWidth <= 900) $("settings-fold").open = false;
fill();
look();
offerClasses().catch(() => {});
