// Reads server-sent events by fetch, because an EventSource cannot send a key or a body. Never: knows an event.

/** Yields `{ kind, data }` of each event of an answer's body; `kind` is empty where the event has none. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const whole = rest.split("\n\n");
      rest = whole.pop();
      for (const event of whole) {
        const lines = event.split("\n");
        const kind = lines.find((line) => line.startsWith("event: "))?.slice(7) ?? "";
        const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield { kind, data: data.join("\n") };
      }
    }
  } finally {
    // A reader that stops early ends the request, too.
    reader.cancel().catch(() => {});
  }
}
