"""Archives whose bytes depend on their contents alone: every time is SOURCE_DATE_EPOCH (that of the commit), every
owner is root, and names are sorted."""

import gzip
import io
import os
import subprocess
import tarfile
import zipfile
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True)
class Entry:
    """A file of an archive; without data, a folder."""

    name: str
    data: bytes | None
    mode: int = 0o644
    owner: int = 0


def epoch() -> int:
    """Seconds since 1970 that stand for every time."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    commit = subprocess.run(["git", "log", "-1", "--format=%ct"], capture_output=True, text=True, check=True)
    return int(commit.stdout)


def tar(entries: list[Entry]) -> bytes:
    """An uncompressed archive with a folder for each path that needs one."""
    folders = {parent for entry in entries for parent in parents(entry.name)}
    folders -= {entry.name for entry in entries}
    every = entries + [Entry(folder, None, 0o755) for folder in folders]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for entry in sorted(every, key=lambda entry: entry.name):
            info = tarfile.TarInfo(entry.name)
            info.mtime, info.mode, info.uid, info.gid = epoch(), entry.mode, entry.owner, entry.owner
            if entry.data is None:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(entry.data)
                archive.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


def parents(name: str) -> list[str]:
    """Every folder above a path, the outermost first; not `.`."""
    parts = name.split("/")[:-1]
    paths = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return [path for path in paths if path not in ("", ".")]


def compressed(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=9, mtime=0)


def zipped(entries: list[Entry]) -> bytes:
    out = io.BytesIO()
    moment = datetime.fromtimestamp(max(epoch(), 315532800), tz=UTC).timetuple()[:6]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for entry in entries:
            info = zipfile.ZipInfo(entry.name, date_time=moment)
            info.external_attr = (0o100000 | entry.mode) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, entry.data or b"")
    return out.getvalue()


def ar(members: list[tuple[str, bytes]]) -> bytes:
    """The archive of ar(5), as Debian packages are."""
    out = io.BytesIO(b"!<arch>\n")
    out.seek(0, io.SEEK_END)
    for name, data in members:
        out.write(f"{name:<16}{epoch():<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode())
        out.write(data + b"\n" * (len(data) % 2))
    return out.getvalue()
