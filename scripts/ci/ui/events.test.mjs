// The groups of the log of events, by Node.js alone.
import assert from "node:assert/strict";
import { test } from "node:test";
import { grouped, names } from "../../../crates/api/src/ui/event_log.js";
import { mostDifferent } from "../../../crates/api/src/ui/workers.js";

const event = (kind, about, at_ms, count = 1) => ({ kind, reason: "r", about, at_ms, count });

test("neighbours of one kind and reason are one entry", () => {
  const groups = grouped([event("joined", "d-2", 9), event("joined", "d-1", 8, 2), event("lost", "d-1", 7), event("joined", "d-1", 6)]);
  assert.deepEqual(groups.map(({ kind, abouts, count, at_ms }) => [kind, abouts, count, at_ms]), [
    ["joined", ["d-2", "d-1"], 3, 9], ["lost", ["d-1"], 1, 7], ["joined", ["d-1"], 1, 6],
  ]);
});

test("names are in natural order, and beyond three counted", () => {
  assert.equal(names(["d-10", "d-9", "d-9"]), "d-9, d-10");
  assert.equal(names(["d-4", "d-3", "d-2", "d-1", "d-0"]), "d-0, d-1, d-2 and 2 more");
});

test("the map shows the measure in which workers of a role differ most", () => {
  const row = (role, running, held, step) => ({ role, running, blocks_held: held, blocks_count: 100, queue_tokens: 0, step_ms: step });
  assert.equal(mostDifferent([row("decode", 8, 50, 10), row("decode", 1, 52, 10)]), "batch");
  assert.equal(mostDifferent([row("decode", 4, 50, 10), row("decode", 4, 50, 90)]), "step");
  assert.equal(mostDifferent([row("decode", 2, 13, 10), row("decode", 0, 0, 10)]), "batch", "KV in use is a part of 100 %");
  assert.equal(mostDifferent([row("prefill", 0, 9, 90), row("decode", 8, 90, 10)]), "kv", "roles always differ");
});
