"""Figures that the code lets us expect of an H200, before any run; a run confirms or contradicts them.

usage: expected.py [--check]      (writes the table in docs/design/gpu-backend.md; --check only compares)

Ratios compare with ceilings measured in the same run: copy bandwidth for decode, the rate of matrix products for
prefill. Reasons are in docs/design/gpu-backend.md. Standard library only.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs/design/gpu-backend.md"
BEGIN, END = "<!-- expected: begin, by scripts/gpu/expected.py -->", "<!-- expected: end -->"
# The model of the expected figures.
MODEL = "llama-3.1-8b"
INT4 = "llama-3.2-1b-int4"


@dataclass(frozen=True)
class Expected:
    """One figure of one shape: `kind` and `sizes` as records have them."""

    name: str
    kind: str
    model: str
    sizes: tuple[int, ...]
    value: float
    why: str

    def of(self, rows: list[dict]) -> float | None:
        """Returns the ratio that a run measured of our own system alone, if it did."""
        keys = ("batch", "context") if self.kind == "decode" else ("tokens",)
        for row in rows:
            mine = row["system"] == "cleave" and row["model"] == self.model and not row["beside"]
            if mine and tuple(row[key] for key in keys) == self.sizes and "ratio" in row:
                return row["ratio"]
        return None


FIGURES = [
    Expected(
        "decode MBU, batch 1, context 1k", "decode", MODEL, (1, 1024), 0.72,
        "7 kernels a layer at 2 to 3 µs of begin and end that no copy hides; the products' own use is 0.8 to 0.85",
    ),
    Expected(
        "decode MBU, batch 32, context 1k", "decode", MODEL, (32, 1024), 0.69,
        "the same, and rows of activations go through the second-level cache once for each of 64 columns",
    ),
    Expected(
        "prefill MFU, 2k tokens", "prefill", MODEL, (2048,), 0.75,
        "products at nine tenths of the library's rate; attention on mma.sync and norms come between them",
    ),
    Expected(
        "prefill MFU, 32k tokens, attention not counted", "prefill", MODEL, (32768,), 0.43,
        "attention on mma.sync, which reaches five eighths of the tensor cores, is half of the operations there",
    ),
    Expected(
        "int4 decode, share of copy bandwidth, batch 1", "decode", INT4, (1, 1024), 0.40,
        "widening codes takes more instructions than a quarter of the bytes leaves time for",
    ),
]


def table() -> str:
    rows = ["| figure | expected | why |", "|---|---|---|"]
    rows += [f"| {one.name} | {one.value:.2f} | {one.why} |" for one in FIGURES]
    return "\n".join(rows)


def main() -> None:
    text = PAGE.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"{PAGE.name} lacks {BEGIN} or {END}")
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{after}"
    if "--check" not in sys.argv:
        PAGE.write_text(wanted)
    elif wanted != text:
        sys.exit("docs/design/gpu-backend.md does not say what scripts/gpu/expected.py does: run it")


if __name__ == "__main__":
    main()
