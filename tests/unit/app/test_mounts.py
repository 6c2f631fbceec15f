"""Which disks several machines may share."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.ledger import Ledger
from app.mounts import is_network_type, is_shared, read_mounts, type_of
from app.places import DatasetFolder
from tests.support.folders import fill, fresh_picture, picture

_MOUNTINFO = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 0:27 / /proc rw,nosuid shared:12 - proc proc rw
41 22 0:45 / /data rw,relatime shared:20 - nfs4 filer:/export rw,vers=4.2,proto=tcp
42 41 0:46 / /data/local rw - xfs /dev/sdb1 rw
43 22 0:47 / /my\\040disk rw,relatime master:5 - lustre 10.0.0.1@tcp:/scratch rw,flock
44 22 0:48 / /remote rw - fuse.sshfs user@host:/ rw,user_id=0
45 22 0:49 / /over rw - overlay overlay rw,lowerdir=/a - b
46 22 0:50 / /twice rw - cifs //filer/share rw
47 46 0:51 / /twice rw - tmpfs tmpfs rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "type_", "shared"),
    [
        ("/", "ext4", False),
        ("/home/me/prepared", "ext4", False),
        ("/database", "ext4", False),
        ("/data/prepared", "nfs4", True),
        ("/data", "nfs4", True),
        ("/data/local/prepared", "xfs", False),
        ("/my disk/prepared", "lustre", True),
        ("/remote/prepared", "fuse.sshfs", True),
        ("/over/prepared", "overlay", False),
        ("/twice/prepared", "tmpfs", False),
    ],
)
def test_the_disk_of_a_path_is_found(tmp_path: Path, path: str, type_: str, shared: bool) -> None:
    """The innermost, newest mount of a path says whether other machines may use it."""
    file = tmp_path / "mountinfo"
    file.write_text(_MOUNTINFO, encoding="utf-8")
    assert type_of(Path(path), read_mounts(file)) == type_
    assert is_network_type(type_) is shared


@pytest.mark.parametrize(
    ("type_", "shared"),
    [
        *[(name, True) for name in ("nfs", "cifs", "smb3", "ceph", "gpfs", "beegfs", "9p", "virtiofs", "fuse")],
        *[(name, True) for name in ("fuse.glusterfs", "fuse.s3fs")],
        *[(name, False) for name in ("btrfs", "zfs", "tmpfs", "fuseblk", "fuse.fuse-overlayfs", "nfsd", "")],
    ],
)
def test_network_disks_are_known_by_their_type(type_: str, shared: bool) -> None:
    """Every usual network disk counts as shared, a machine's own as not, an unknown FUSE as shared."""
    assert is_network_type(type_) is shared


def test_a_system_that_tells_no_mounts_shares_nothing(tmp_path: Path) -> None:
    """Without a mountinfo nothing is known, and nothing is shared."""
    assert type_of(Path("/data"), read_mounts(tmp_path / "none")) == ""


@pytest.mark.parametrize(("said", "shared"), [("yes", True), ("no", False), ("auto", False)])
def test_the_setting_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, shared: bool) -> None:
    """MILL_SHARED_FOLDER chooses the index; both kinds say the same of the same lines."""
    monkeypatch.setenv("MILL_SHARED_FOLDER", said)
    folder = DatasetFolder(tmp_path / "d")
    assert is_shared(folder.path) is shared
    with Ledger.open(folder) as ledger:
        fill(ledger)
        names = {path.name for path in folder.path.iterdir()}
        assert (folder.shared_index.name in names, folder.index.name in names) == (shared, not shared)
        assert any(name.endswith("-wal") for name in names) is not shared
        assert picture(ledger) == fresh_picture(folder)
