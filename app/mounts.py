"""Which folders lie on a disk that several machines may share: there SQLite's write-ahead log must not be used."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import NamedTuple

from app.settings import StoreSettings, load

_NETWORK_TYPES = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cephfs",
        "cifs",
        "coda",
        "fhgfs",
        "gfs2",
        "gpfs",
        "lustre",
        "mmfs",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "prl_fs",
        "pvfs2",
        "quobyte",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "vmhgfs",
        "weka",
        "wekafs",
    }
)
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.ntfs-3g", "fuse.unionfs"})
"""Of `fuse` and `fuse.*`, which may be anything (sshfs, glusterfs, s3fs, ...), those of one machine's own disks."""
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    point: str
    type: str


@functools.lru_cache(maxsize=1024)
def is_shared(folder: Path) -> bool:
    """Tell whether several machines may use the folder: as MILL_SHARED_FOLDER says, else by its file system."""
    said = load(StoreSettings).shared_folder
    if said != "auto":
        return said == "yes"
    return is_network_type(type_of(folder.resolve(), read_mounts()))


def is_network_type(type_: str) -> bool:
    """Tell whether a file system of this type may be mounted on several machines at once."""
    return type_ in _NETWORK_TYPES or (type_.partition(".")[0] == "fuse" and type_ not in _LOCAL_FUSE)


def read_mounts(path: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """Return the mounts of this process, oldest first; none where the system does not tell."""
    try:
        lines = path.read_bytes().decode("utf-8", "surrogateescape").splitlines()
    except OSError:
        return []
    return [mount for line in lines if (mount := _parse(line))]


def type_of(path: Path, mounts: list[Mount]) -> str:
    """Return the type of the file system that an absolute path without links lies on; empty where nobody knows."""
    text, found = os.fspath(path), Mount("", "")
    for mount in mounts:  # of two at one place the later hides the earlier
        inside = mount.point in {"/", text} or text.startswith(f"{mount.point}/")
        if inside and len(mount.point) >= len(found.point):
            found = mount
    return found.type


def _parse(line: str) -> Mount | None:
    # 36 35 98:0 /root /mnt/point rw,noatime master:1 - ext4 /dev/sda1 rw
    before, separator, after = line.partition(" - ")
    words, more = before.split(" "), after.split(" ")
    if not separator or len(words) < 5:
        return None
    return Mount(_OCTAL.sub(lambda match: chr(int(match[1], 8)), words[4]), more[0])
