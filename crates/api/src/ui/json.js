// JSON that a person pasted, and JSON that a model wrote. Owns: the place of the first error, which browsers give in
// different words or not at all, and the first mismatch with a schema. Never: changes a value.

const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const STRING = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const WORD = /true|false|null/y;

/** Parses a text: `{ value }`, or `{ error }`, a sentence with line and column of the first error. */
export function parseJson(text) {
  try {
    return { value: JSON.parse(text) };
  } catch {
    const [at, wanted] = firstError(text);
    const before = text.slice(0, at).split("\n");
    const found = at < text.length ? JSON.stringify(text[at]) : "the end";
    return { error: `Line ${before.length}, column ${before.at(-1).length + 1}: expected ${wanted}, found ${found}.` };
  }
}

/** The offset of the first character that cannot be JSON, and a word for what could stand there. */
function firstError(text) {
  let at = 0;
  const skip = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text)?.[0].length ?? 0;
    at += found;
    return found > 0;
  };
  const expect = (letter, wanted) => {
    skip(SPACE);
    if (text[at] !== letter) throw wanted;
    at += 1;
  };
  const string = () => { if (!skip(STRING)) throw "a text in double quotes"; };
  const list = (close, item) => {
    at += 1;
    skip(SPACE);
    if (text[at] === close) { at += 1; return; }
    for (;;) {
      skip(SPACE);
      item();
      skip(SPACE);
      if (text[at] === close) { at += 1; return; }
      expect(",", `"," or "${close}"`);
    }
  };
  const value = () => {
    skip(SPACE);
    if (text[at] === "{") list("}", () => { string(); expect(":", '":"'); value(); });
    else if (text[at] === "[") list("]", value);
    else if (text[at] === '"') string();
    else if (!skip(WORD) && !skip(NUMBER)) throw "a value";
  };
  try {
    value();
    skip(SPACE);
    return [at, "the end"];
  } catch (wanted) {
    return [at, typeof wanted === "string" ? wanted : "a value that is nested less deeply"];
  }
}

const KINDS = {
  object: (value) => value !== null && typeof value === "object" && !Array.isArray(value),
  array: Array.isArray,
  string: (value) => typeof value === "string",
  number: (value) => typeof value === "number",
  integer: (value) => Number.isInteger(value),
  boolean: (value) => typeof value === "boolean",
  null: (value) => value === null,
};

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/**
 * The first place where a value differs from a schema, as a sentence, or null. Knows the keywords of shape (`type`,
 * `enum`, `const`, `properties`, `required`, `additionalProperties`, `items`, `anyOf`, `allOf`, local `$ref`); the
 * server enforces the others.
 */
export function mismatch(value, schema, root = schema, path = "$", depth = 0) {
  if (schema === false) return `${path} is not allowed.`;
  if (!KINDS.object(schema) || depth > 200) return null;
  const inner = (part, its, where) => mismatch(part, its, root, where, depth + 1);
  if (typeof schema.$ref === "string" && schema.$ref.startsWith("#")) {
    const steps = schema.$ref.split("/").slice(1).map((step) => decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~"));
    const found = inner(value, steps.reduce((at, step) => at?.[step], root), path);
    if (found) return found;
  }
  const kinds = [schema.type ?? []].flat();
  if (kinds.length && !kinds.some((kind) => KINDS[kind]?.(value))) return `${path} is not of the type ${kinds.join(" or ")}.`;
  if (schema.enum && !schema.enum.some((one) => same(one, value))) return `${path} is none of ${JSON.stringify(schema.enum)}.`;
  if ("const" in schema && !same(schema.const, value)) return `${path} is not ${JSON.stringify(schema.const)}.`;
  for (const one of schema.allOf ?? []) {
    const found = inner(value, one, path);
    if (found) return found;
  }
  const any = (schema.anyOf ?? []).map((one) => inner(value, one, path));
  if (any.length && !any.includes(null)) return any[0];
  if (KINDS.array(value) && schema.items !== undefined) {
    for (const [at, part] of value.entries()) {
      const found = inner(part, schema.items, `${path}[${at}]`);
      if (found) return found;
    }
  }
  return KINDS.object(value) ? members(value, schema, path, inner) : null;
}

function members(value, schema, path, inner) {
  const known = schema.properties ?? {};
  const absent = (schema.required ?? []).find((name) => !Object.hasOwn(value, name));
  if (absent !== undefined) return `${path} has no ${JSON.stringify(absent)}.`;
  for (const [name, part] of Object.entries(value)) {
    const where = `${path}.${name}`;
    const rest = schema.patternProperties ? undefined : schema.additionalProperties;
    const found = inner(part, Object.hasOwn(known, name) ? known[name] : rest, where);
    if (found) return found;
  }
  return null;
}
