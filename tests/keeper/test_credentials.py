"""Who may do what: the owner everything, a member of the group attach, anybody else nothing."""

import os
from pathlib import Path

import pytest

from tests.keeper.clients import ClientProcess
from tests.keeper.serving import Serving, attaches_quickly
from tests.keeper.shards import shard_of

NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="another user's part can only be played by root")


def test_another_user_is_refused_with_a_reason(open_folder: Path) -> None:
    with Serving(open_folder) as serving:
        serving.put(shard_of())
        serving.path.chmod(0o666)  # so that the keeper has to look who it is
        with ClientProcess(serving.path, "attach", uid=NOBODY, gid=NOBODY) as other:
            assert other.line() == (
                f"refused not_permitted user {NOBODY} is neither the keeper's user nor in its group"
            )
        attaches_quickly(serving)


def test_another_user_cannot_even_connect(open_folder: Path) -> None:
    with Serving(open_folder) as serving, ClientProcess(serving.path, "status", uid=NOBODY, gid=NOBODY) as other:
        assert other.line().startswith("failed ConfigError")


def test_a_member_of_the_group_attaches_and_neither_donates_nor_evicts(open_folder: Path) -> None:
    with Serving(open_folder, gid=NOBODY) as serving:
        serving.put(shard_of())
        steps = ("describe", "attach", "offer", "donate", "evict", "checkpoint", "status")
        with ClientProcess(serving.path, *steps, uid=NOBODY, gid=NOBODY) as member:
            member.wait_for("describe")
            member.wait_for("attach")
            assert member.line() == f"refused not_permitted user {NOBODY} may attach, but not fill a slot"
            assert member.line() == "refused bad_donation nobody granted this client to fill a slot"
            assert member.line() == f"refused not_permitted user {NOBODY} may attach, but not evict"
            assert member.line() == f"refused not_permitted user {NOBODY} may attach, but not say what is on disk"
            member.wait_for("status")
        assert serving.holdings.missing == []
