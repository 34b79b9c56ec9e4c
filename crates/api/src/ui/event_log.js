// The log of events: refusals, failures, changes of workers. Owns: how entries are grouped. Never: stores one.
import { $, make, number, say } from "./words.js";

const KINDS = {
  refused: ["◆", "v-refused"], failed: ["✕", "v-failed"], late: ["▲", "v-late"], retried: ["↻", "v-late"],
  passed_over: ["→", "muted"], stayed: ["↺", "muted"], stuck: ["✕", "v-failed"], lost: ["✕", "v-failed"],
  joined: ["+", "v-good"], role: ["⇄", "muted"], left: ["−", "muted"],
};

/** Names that a group shows; the others are counted. */
const NAMES_MAX = 3;

/** Neighbours of one kind and reason become one entry: of the latest time, with all classes or workers. */
export function grouped(all) {
  const groups = [];
  for (const one of all) {
    const last = groups.at(-1);
    if (last && last.kind === one.kind && last.reason === one.reason) {
      last.abouts.push(one.about);
      last.count += one.count;
    } else groups.push({ kind: one.kind, reason: one.reason, at_ms: one.at_ms, abouts: [one.about], count: one.count });
  }
  return groups;
}

/** The names of a group in natural order; beyond a few their number. */
export function names(abouts) {
  const all = [...new Set(abouts)].sort(new Intl.Collator("en", { numeric: true }).compare);
  const shown = all.slice(0, NAMES_MAX).join(", ");
  return all.length > NAMES_MAX ? `${shown} and ${all.length - NAMES_MAX} more` : shown;
}

export function showEvents(all) {
  const groups = grouped(all);
  const body = $("events");
  while (body.children.length > groups.length) body.lastChild.remove();
  groups.forEach((one, at) => {
    let row = body.children[at];
    if (!row) {
      row = body.appendChild(make("tr"));
      row.append(make("td", "when"), make("td"), make("td", "why"), make("td", "about"), make("td", "num muted"));
    }
    const [when, kind, why, about, count] = row.children;
    const [sign, tone] = KINDS[one.kind] ?? ["·", "muted"];
    say(when, clock(one.at_ms));
    kind.className = tone;
    say(kind, `${sign} ${one.kind.replaceAll("_", " ")}`);
    say(why, one.reason.replaceAll("_", " "));
    say(about, names(one.abouts));
    about.title = one.abouts.join(", ");
    say(count, one.count > 1 ? `×${number(one.count)}` : "");
  });
  $("events-empty").hidden = groups.length > 0;
}

/** Time of the day of milliseconds since 1970. */
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");
