"""Records of a run's findings: one JSON object a line, appended to the file that CLEAVE_GPU_RECORDS names.

A run may be cut off at any moment, and several programs write to the file; so a record is whole in itself, and is
written at once. Each has a `kind`; `report.py` knows them all:

machine    chip, driver, memory_bytes, date, commit, …: the machine and the build
stage      name, status (ok, failed, timed out, skipped), seconds, why
ceiling    name, value, unit, how: a measured limit of the hardware
tests      suite, passed, failed (names), seconds
lab        lab, variant, shape, seconds, and bytes or operations; error, tolerance
golden     model, precision, prompts, same, wrong (prompts with a wrong answer)
counter    kernel, and shares of peaks that the hardware counted
sanitizer  tool, suite, passed, failed (names), seconds
model      name and sizes, as model.Model has them
load       system, model, bytes, seconds, from (memory, disk)
decode     system, model, batch, context, seconds (of one step), beside (systems that took turns)
prefill    system, model, tokens, seconds (of the prompt), beside
skipped    system, model, shape, why
handoff    model, arrangement, and times and bytes
finding    test, text: an observation of a test that is no failure
absent     what, why: a tool that the run would have used

Standard library only.
"""

import json
import os
import sys

VARIABLE = "CLEAVE_GPU_RECORDS"
# The exit status of a step whose tools are absent; the last line that it prints names them.
ABSENT = 75


def put(kind: str, **fields: object) -> None:
    """Appends a record; to standard output if no file is named."""
    line = json.dumps({"kind": kind, **fields}) + "\n"
    path = os.environ.get(VARIABLE)
    if path is None:
        sys.stdout.write(line)
        return
    # One write in append mode keeps the lines of two programs apart.
    with open(path, "a") as file:
        file.write(line)


def read(path: str) -> list[dict]:
    """Returns every whole record of a file; a last line that was cut off is left out."""
    records = []
    with open(path) as lines:
        for line in lines:
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                print(f"{path}: not a record: {line[:80]!r}", file=sys.stderr)
    return records


def main() -> None:
    """Appends a record from a shell: `record.py KIND name=value …`; values that are JSON are parsed."""
    kind, *pairs = sys.argv[1:]
    fields = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    put(kind, **fields)


if __name__ == "__main__":
    main()
