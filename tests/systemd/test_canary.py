from pathlib import Path

import pytest

from appliance.canary import CanaryRecord
from appliance.errors import HostError
from appliance.fingerprint import Fingerprint

ONE, OTHER = Fingerprint.of({"root_digest": "a"}), Fingerprint.of({"root_digest": "b"})


def test_tokens_are_kept_for_one_fingerprint_alone(tmp_path: Path) -> None:
    CanaryRecord.of(tmp_path, ONE).save([1, 2, 3])
    assert CanaryRecord.of(tmp_path, ONE).load() == (1, 2, 3)
    assert CanaryRecord.of(tmp_path, OTHER).load() is None


def test_a_record_is_for_its_owner_and_group_alone(tmp_path: Path) -> None:
    record = CanaryRecord.of(tmp_path, ONE)
    record.save([1])
    assert record.path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"token_ids": 3}', '{"token_ids": ["x"]}', "\0" * 9])
def test_a_damaged_record_is_an_error_and_not_a_match(tmp_path: Path, text: str) -> None:
    record = CanaryRecord.of(tmp_path, ONE)
    record.save([1])
    record.path.write_text(text)
    with pytest.raises(HostError, match="cannot be read"):
        record.load()
