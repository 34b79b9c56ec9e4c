// A server with answers by script: the pages come from `cleave`, with its headers, and each request of a chat is
// answered by the next function of the script.
import { createServer } from "node:http";

/** A promise that its owner resolves. */
export function gate() {
  const made = {};
  made.passed = new Promise((open) => { made.open = open; });
  return made;
}

/** The beginning of a stream: writes chunks of a choice, and everything else of a chunk. */
function stream(response) {
  response.writeHead(200, { "content-type": "text/event-stream" });
  const write = (chunk) => response.write(`data: ${JSON.stringify(chunk)}\n\n`);
  const delta = (part, finish = null) => write({ choices: [{ index: 0, delta: part, finish_reason: finish }] });
  return {
    write,
    delta,
    /** Ends with counts and stages, as a real server. */
    end: (finish = "stop") => {
      delta({}, finish);
      write({
        choices: [],
        usage: { prompt_tokens: 40, completion_tokens: 12, prompt_tokens_details: { cached_tokens: 32 } },
        timing: {
          router_queue_ms: 1.5, retry_ms: 0, prefill_wait_ms: 2, prefill_ms: 30, transfer_ms: 4, decode_wait_ms: 1, first_decode_ms: 9,
          decode_ms: 90, ttft_ms: 33.5, tpot_ms: 9.1, e2e_ms: 137.5,
        },
      });
      response.end("data: [DONE]\n\n");
    },
  };
}

/** Starts it before the server at `base`. `script` takes functions of (answer, request), `asked` has what came. */
export async function scripted(base) {
  const [script, asked] = [[], []];
  const server = createServer(async (request, response) => {
    if (request.url === "/v1/models") {
      response.writeHead(200, { "content-type": "application/json" });
      return response.end(JSON.stringify({ data: [{ id: "scripted", task: "generate" }] }));
    }
    if (request.method === "POST") {
      let text = "";
      for await (const part of request) text += part;
      asked.push({ body: JSON.parse(text), headers: request.headers });
      const refuse = (status, message, headers = {}) => {
        response.writeHead(status, { "content-type": "application/json", ...headers });
        response.end(JSON.stringify({ error: { message } }));
      };
      return script.shift()({ stream: () => stream(response), refuse, left: new Promise((done) => response.on("close", done)) });
    }
    const leaves = new AbortController();
    response.on("close", () => leaves.abort());
    const page = await fetch(base + request.url, { signal: leaves.signal });
    // `fetch` gives the body decoded, and it is sent as it is.
    const changed = ["content-length", "content-encoding", "transfer-encoding"];
    response.writeHead(page.status, Object.fromEntries([...page.headers].filter(([name]) => !changed.includes(name))));
    if (request.url !== "/ui/events") return response.end(Buffer.from(await page.arrayBuffer()));
    try {
      for await (const part of page.body) response.write(part);
    } catch { /* The page or the server left. */ }
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${server.address().port}`, script, asked, end: () => server.closeAllConnections() ?? server.close() };
}
