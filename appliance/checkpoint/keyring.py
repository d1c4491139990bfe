"""The public keys an operator trusts, found again by the fingerprint that a signature carries."""

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from appliance.checkpoint.keys import PublicKey, load_public_key
from appliance.checkpoint.os_refusal import os_refusal
from appliance.errors import ConfigError

SUFFIXES = (".pub", ".pem")


@dataclass(frozen=True)
class Keyring:
    """Trusted keys, each fingerprint and each name once."""

    keys: tuple[PublicKey, ...]

    @classmethod
    def load(cls, paths: Iterable[Path]) -> "Keyring":
        """Load key files, and of directories every `*.pub` and `*.pem`.

        ConfigError where one cannot be used, where none is found, or where one name stands for two keys: the name is
        shown as the signer. The same key twice counts once, under the name found first.
        """
        by_fingerprint: dict[str, PublicKey] = {}
        by_name: dict[str, Path] = {}
        paths = list(paths)
        for path in paths:
            for file in _key_files(path):
                key = load_public_key(file)
                if key.fingerprint in by_fingerprint:
                    continue
                if key.name in by_name:
                    raise ConfigError(
                        f"trust: {by_name[key.name]} and {file} are two keys named {key.name!r}", hint="rename one file"
                    )
                by_fingerprint[key.fingerprint] = key
                by_name[key.name] = file
        if not by_fingerprint:
            looked = ", ".join(map(str, paths)) or "nowhere"
            raise ConfigError(
                f"trust: no public key found (looked in: {looked})", hint="add a *.pub file, or a path to it"
            )
        return cls(tuple(by_fingerprint.values()))

    def find(self, fingerprint: str) -> PublicKey | None:
        """Return the key with this fingerprint."""
        return next((key for key in self.keys if key.fingerprint == fingerprint), None)


def _key_files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    try:
        if path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise ConfigError(f"trust: everybody may put keys into {path}", hint=f"look into it, then chmod 755 {path}")
        return sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    except OSError as error:
        raise os_refusal(error, f"list keys in {path}") from error
