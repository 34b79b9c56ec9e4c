// Where a request's time went: a row for each stage. Never: measures anything.
import { make, time } from "./words.js";

/** Name, colour, and the field of the answer's `timing`. */
const STAGES = [
  ["router queue", "queued", "router_queue_ms"],
  ["retry", "queued", "retry_ms"],
  ["prefill wait", "prefill", "prefill_wait_ms"],
  ["prefill", "prefill", "prefill_ms"],
  ["transfer", "transfer", "transfer_ms"],
  ["decode wait", "decode", "decode_wait_ms"],
  ["first decode", "decode", "first_decode_ms"],
  ["decode", "decode", "decode_ms"],
];

/** Rows of a table, for the stages that are known. */
export function waterfallRows(timing) {
  const known = STAGES.filter(([, , field]) => timing[field] !== undefined);
  const all = known.reduce((sum, [, , field]) => sum + timing[field], 0) || 1;
  let before = 0;
  return known.map(([name, tone, field]) => {
    const row = make("tr");
    const head = make("th", "", name);
    head.scope = "row";
    const cell = make("td");
    const lane = make("div", `lane tone-${tone}`);
    const bar = lane.appendChild(make("i"));
    bar.style.left = `${(before / all) * 100}%`;
    bar.style.width = `${(timing[field] / all) * 100}%`;
    bar.hidden = !timing[field];
    before += timing[field];
    cell.append(lane);
    row.append(head, cell, make("td", "num", time(timing[field])));
    return row;
  });
}
