"""Compiles every kernel for each target and compares the result with kernels/table.txt; and every lab.

usage: check_kernels.py --nvcc NVCC [--jobs N] [--target sm_80 …] [--json FILE]

Fails on a warning of the compiler, on products of warpgroups between which it inserts waits, on more registers than the
table allows, on spills, on a stack (local memory), on a kernel that does not wait for earlier launches, on one that the
table does not list or that is missing, and on machine code without the instructions that the table requires
(`sm_80:HMMA`: tensor cores are used; a kernel without them would be right, and slow). cuobjdump and nvdisasm lie beside
nvcc, or on the PATH. Standard library only.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
# The limit applies beside dynamic shared memory: crates/cuda/src/images.rs counts on it for blocks that have little.
STATIC_SHARED_BYTES_MAX = 2048
TARGETS = ["sm_80", "sm_90a", "sm_100a"]
# The machine code of `wait_for_previous`.
WAITS_FOR_PREVIOUS = "ACQBULK"
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# ptxas prints this for a wait that it inserts between products of warpgroups.
REMARK = re.compile(r"\(C75\d\d\) (.*) in function '(\w+)'")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass
class Listed:
    file: str
    name: str
    threads: int
    registers: int
    shared: int
    required: list[str] = field(default_factory=list)


@dataclass
class Found:
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    remarks: list[str] = field(default_factory=list)
    instructions: set[str] = field(default_factory=set)


def table() -> list[Listed]:
    rows = []
    for line in (KERNELS / "table.txt").read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            file, name, threads, registers, shared, *required = line.split()
            rows.append(Listed(file, name, int(threads), int(registers), int(shared), required))
    return rows


def run(command: list[str], path: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compiled(nvcc: Path, file: str, target: str, folder: str) -> dict[str, Found]:
    """Compiles a file; returns registers, stack and instructions of each kernel."""
    path = f"{nvcc.parent}:{os.environ['PATH']}"
    cubin = f"{folder}/{file.replace('/', '-')}.{target}.cubin"
    architecture = f"-gencode=arch={target.replace('sm', 'compute')},code={target}"
    flags = ["-std=c++17", "-O3", "-cubin", "-Werror", "all-warnings", "-Xptxas", "-v", f"-I{KERNELS / 'include'}"]
    told = run([str(nvcc), *flags, architecture, "-o", cubin, str(KERNELS / file)], path)
    kernels: dict[str, Found] = {}
    current = None
    for line in told.splitlines():
        if match := REMARK.search(line):
            kernels.setdefault(match[2], Found()).remarks.append(match[1])
        elif match := ENTRY.search(line):
            current = kernels.setdefault(match[1], Found())
        elif current and (match := STACK.search(line)):
            current.stack, current.spills = int(match[1]), int(match[2]) + int(match[3])
        elif current and (match := USED.search(line)):
            current.registers, current.shared = int(match[1]), int(match[2] or 0)
    for line in run(["cuobjdump", "-sass", cubin], path).splitlines():
        if match := re.search(r"Function : (\w+)", line):
            current = kernels.get(match[1])
        elif current and (match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", line)):
            current.instructions.add(match[1])
    return kernels


def translated(nvcc: Path, program: Path, folder: str) -> None:
    """Translates a program with a host side, without machine code, which takes longer and is not compared."""
    path = f"{nvcc.parent}:{os.environ['PATH']}"
    to = f"{folder}/{program.parent.name}-{program.stem}.ii"
    flags = ["-std=c++17", "--cuda", "-gencode=arch=compute_90a,code=compute_90a", "-Werror", "all-warnings", f"-I{KERNELS / 'include'}"]
    run([str(nvcc), *flags, "-o", to, str(program)], path)


def wrongs(row: Listed, target: str, found: Found | None) -> list[str]:
    if found is None:
        return ["is not in its file"]
    said = []
    if found.registers > row.registers:
        said.append(f"takes {found.registers} registers, {row.registers} are allowed")
    if found.spills:
        said.append(f"spills {found.spills} bytes")
    if found.stack or found.instructions & {"LDL", "STL"}:
        said.append(f"uses local memory ({found.stack} bytes of stack)")
    said += [f"waits: {remark}" for remark in found.remarks]
    if target != "sm_80" and WAITS_FOR_PREVIOUS not in found.instructions:
        said.append("never calls wait_for_previous, though it may begin before earlier launches are over")
    for one in row.required:
        of, instruction = one.split(":")
        if of not in (target, "all"):
            continue
        if instruction.startswith("!"):
            if instruction[1:] in found.instructions:
                said.append(f"has {instruction[1:]}, which the table forbids")
        elif instruction not in found.instructions:
            said.append(f"has no {instruction}")
    if row.shared and found.shared > STATIC_SHARED_BYTES_MAX:
        said.append(f"has {found.shared} bytes of static shared memory beside the dynamic, {STATIC_SHARED_BYTES_MAX} are allowed")
    return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvcc", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--target", nargs="+", default=TARGETS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = table()
    files = sorted({row.file for row in rows})
    pairs = [(file, target) for file in files for target in args.target]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        programs = [*KERNELS.glob("*/lab.cu"), ROOT / "scripts/gpu/ceilings.cu"]
        translations = [pool.submit(translated, args.nvcc, program, folder) for program in programs]
        results = list(pool.map(lambda pair: compiled(args.nvcc, *pair, folder), pairs))
        for translation in translations:
            translation.result()
    found = dict(zip(pairs, results, strict=True))
    problems, report = [], []
    for row in rows:
        for target in args.target:
            kernel = found[row.file, target].get(row.name)
            problems += [f"{target} {row.name}: {what}" for what in wrongs(row, target, kernel)]
            if kernel:
                report.append({"kernel": row.name, "target": target, "registers": kernel.registers, "shared": kernel.shared})
    listed = {(row.file, row.name) for row in rows}
    for (file, target), kernels in found.items():
        problems += [f"{target} {name}: in {file}, but not in the table" for name in kernels if (file, name) not in listed]
    for one in report:
        print(f"{one['target']:8} {one['kernel']:36} {one['registers']:4} registers {one['shared']:7} bytes shared")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if problems:
        sys.exit("\n".join(problems))
    print(f"{len(rows)} kernels for {len(args.target)} targets: no spill, no local memory, instructions as listed")


if __name__ == "__main__":
    main()
