"""Measures the bandwidth of reads from a disk. usage: disk.py FOLDER      (a checkpoint that was written there)

Writes the ceiling `disk_read`, past the page cache, several files and threads at once; then drops the folder's files
from the page cache, so that the next reader reads the disk. Standard library only.
"""

import mmap
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import record

PIECE_BYTES = 16 << 20
# The most that is read for the ceiling.
BYTES_MAX = 4 << 30
THREADS = 8


def read(work: tuple[Path, int]) -> int:
    path, offset = work
    buffer = mmap.mmap(-1, PIECE_BYTES)
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return os.preadv(file, [buffer], offset)
    finally:
        os.close(file)
        buffer.close()


def forget(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def main() -> None:
    os.sync()
    files = sorted(Path(sys.argv[1]).glob("*.safetensors"))
    pieces = [(path, offset) for path in files for offset in range(0, path.stat().st_size - PIECE_BYTES, PIECE_BYTES)]
    for path in files:
        forget(path)
    begin = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        done = sum(pool.map(read, pieces[: BYTES_MAX // PIECE_BYTES]))
    how = f"{done >> 20} MiB of {len(files)} files, {THREADS} threads, O_DIRECT"
    record.put("ceiling", name="disk_read", value=done / (time.perf_counter() - begin), unit="bytes/s", how=how)
    for path in files:
        forget(path)


if __name__ == "__main__":
    main()
