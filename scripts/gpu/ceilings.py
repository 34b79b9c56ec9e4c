"""Measures large bf16 matrix products through PyTorch (cublasLt). usage: ceilings.py [--seconds S] [--device DEVICE]

Writes a `ceiling` record for each size, and `matmul`, the fastest of the square ones: the rate with which prefill is
compared. Operands are noise, never zeros, and each size runs for a while, since a card that gets hot gets slower.
"""

import argparse
import statistics
import time

import record

# Sizes as rows, columns, inner size: squares, and the products of an 8B model's layers with 2048 and 8192 tokens.
SQUARES = [(4096, 4096, 4096), (8192, 8192, 8192), (16384, 16384, 16384)]
LAYERS = [(tokens, columns, inner) for tokens in (2048, 8192) for columns, inner in ((6144, 4096), (28672, 4096), (4096, 14336))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.7, help="for each size")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=int, default=1, help="divide every size by this, to try the script out")
    args = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        record.put("absent", what="bf16 matrix product ceiling", why=f"no PyTorch: {error}")
        print(f"no PyTorch: {error}")
        raise SystemExit(record.ABSENT)

    def settle() -> None:
        if args.device != "cpu":
            torch.cuda.synchronize()

    def rate(rows: int, columns: int, inner: int) -> float:
        a = torch.randn(rows, inner, device=args.device, dtype=torch.bfloat16)
        b = torch.randn(columns, inner, device=args.device, dtype=torch.bfloat16).t()
        out = torch.empty(rows, columns, device=args.device, dtype=torch.bfloat16)
        for _ in range(3):
            torch.mm(a, b, out=out)
        settle()
        samples, until = [], time.perf_counter() + args.seconds
        while time.perf_counter() < until or len(samples) < 3:
            begin = time.perf_counter()
            for _ in range(8):
                torch.mm(a, b, out=out)
            settle()
            samples.append((time.perf_counter() - begin) / 8)
        return 2 * rows * columns * inner / statistics.median(samples)

    best, of = 0.0, ""
    for sizes in SQUARES + LAYERS:
        rows, columns, inner = (max(size // args.scale, 8) for size in sizes)
        found = rate(rows, columns, inner)
        name = f"{rows}x{columns}x{inner}"
        record.put("ceiling", name=f"matmul_{name}", value=found, unit="operations/s", how="torch.mm, bf16, median")
        if sizes in SQUARES and found > best:
            best, of = found, name
    record.put("ceiling", name="matmul", value=best, unit="operations/s", how=f"torch.mm, bf16, {of}, the fastest square")


if __name__ == "__main__":
    main()
