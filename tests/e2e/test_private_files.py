"""What an instance writes is for its user alone, and a kill leaves nothing of it for good."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.service import application, new_instance, running, warm_up

if TYPE_CHECKING:
    from balance_service.devtools.local.stack import LocalStack


def test_a_killed_instance_leaves_no_files_once_it_has_started_again_and_none_are_for_others(
    stack: LocalStack,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        temporary = Path(folder)
        instance = new_instance(stack, application(TMPDIR=folder, XDG_RUNTIME_DIR=""))
        scratch = instance.state_dir / "scratch"
        with running(instance):
            warm_up(instance.url)
            left = {path.name for path in scratch.iterdir()}
            assert any(name.startswith("blockmgr-") for name in left), left
            instance.kill()
            instance.launch()
            instance.wait_ready()
            warm_up(instance.url)

            assert [path.name for path in scratch.iterdir() if path.name in left] == []
            (sockets,) = temporary.iterdir()
            assert list(sockets.iterdir()) == []
            open_to_others = [
                path
                for path in (sockets, instance.state_dir, *instance.state_dir.rglob("*"))
                if stat.S_IMODE(path.lstat().st_mode) & 0o077
            ]
            assert open_to_others == []
        assert list(temporary.iterdir()) == []
