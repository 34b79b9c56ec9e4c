// The box for a prompt of the viewer, with the durations of its stages. Owns: that box. Never: stores a
// prompt.
import { events } from "./events.js";
import { waterfallRows } from "./waterfall.js";
import { $, make, offerModels, say, time } from "./words.js";

let stop = null;
let known = "";

/** Offers the policy's classes. */
export function prepare(classes) {
  const names = classes.map((one) => one.name).join("\n");
  if (names === known) return;
  known = names;
  const list = $("class");
  const before = list.value;
  list.replaceChildren(...["", ...names.split("\n").filter(Boolean)].map((name) => {
    const option = make("option", "", name || "default");
    option.value = name;
    return option;
  }));
  list.value = [...list.options].some((option) => option.value === before) ? before : "";
}

/** Finds the served models; without any (another port serves clients) the box stays hidden. */
async function look() {
  const answer = await fetch("v1/models", { headers: headers(), credentials: "omit" }).catch(() => null);
  if (answer?.status === 401) {
    $("api-key-field").hidden = false;
    return;
  }
  $("try").hidden = answer?.status === 404;
  const models = answer?.ok ? (await answer.json()).data : [];
  const count = offerModels(models);
  if (answer?.status !== 404) setTimeout(look, count ? 30_000 : 2000);
}

function headers() {
  const all = { "content-type": "application/json", "x-cleave-timing": "1" };
  if ($("class").value) all["x-slo-class"] = $("class").value;
  if ($("api-key").value) all.authorization = `Bearer ${$("api-key").value}`;
  return all;
}

async function send() {
  stop = new AbortController();
  say($("send"), "Stop");
  say($("answer"), "");
  $("waterfall").hidden = true;
  say($("prompt-status"), "Sent.");
  const kind = $("kind").value;
  const text = $("prompt").value;
  const asked = kind === "completions" ? { prompt: text } : { messages: [{ role: "user", content: text }] };
  const body = JSON.stringify({ model: $("model").value, ...asked, max_tokens: Number($("max-tokens").value) || 64, stream: true, stream_options: { include_usage: true } });
  const begun = performance.now();
  try {
    const answer = await fetch(`v1/${kind}`, { method: "POST", headers: headers(), body, signal: stop.signal, credentials: "omit" });
    if (answer.status === 401) $("api-key-field").hidden = false;
    if (!answer.ok) {
      const said = await answer.json().catch(() => null);
      throw new Error(said?.error?.message ?? `status ${answer.status}`);
    }
    await show(answer.body, begun);
  } catch (error) {
    say($("prompt-status"), stop.signal.aborted ? "Stopped." : `Not answered: ${error.message}`);
  }
  stop = null;
  say($("send"), "Send");
}

async function show(body, begun) {
  let [first, usage, timing] = [null, null, null];
  for await (const { data } of events(body)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices?.[0];
    const text = choice?.text ?? choice?.delta?.content ?? "";
    if (text) {
      first ??= performance.now() - begun;
      $("answer").append(text);
      $("answer").scrollTop = $("answer").scrollHeight;
    }
    usage = chunk.usage ?? usage;
    timing = chunk.timing ?? timing;
  }
  const tokens = usage ? `${usage.prompt_tokens} prompt tokens, ${usage.completion_tokens} output tokens. ` : "";
  const gap = timing?.tpot_ms ? `, ${time(timing.tpot_ms)} per token` : "";
  say($("prompt-status"), `${tokens}First text here after ${time(first)}; at the router first token ${time(timing?.ttft_ms)}${gap}, ${time(timing?.e2e_ms)} in all.`);
  if (timing) $("stages").replaceChildren(...waterfallRows(timing));
  $("waterfall").hidden = !timing;
}

$("prompt-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stop) stop.abort();
  else send();
});
look();
