"""The facts that shape a shard's bytes, as one flat printable record; equal records, and only those, may attach.

Two of them exist for every shard. The *target* is what a keeper can know without torch or an engine: root digest,
settings, installed versions, GPUs. The *fingerprint* is taken inside the engine and holds the target's facts and more.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.errors import PeerError

ROOT_DIGEST = "root_digest"
DRAFT_ROOT_DIGEST = "draft.root_digest"
ABSENT = "(absent)"

MAX_FACTS = 256
MAX_NAME_CHARS = 128
MAX_VALUE_CHARS = 2048


@dataclass(frozen=True)
class Difference:
    """One fact on which two records disagree."""

    name: str
    wanted: str
    held: str

    def __str__(self) -> str:
        return f"{self.name}: wanted {self.wanted}, held {self.held}"


@dataclass(frozen=True)
class Fingerprint:
    """Sorted name and value pairs, every one short and printable. Build it with `of` or `from_json`."""

    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> "Fingerprint":
        """Take facts as they come; every value becomes text. One that could not be shown is spelled out or digested."""
        return cls(tuple(sorted((name, _shown(str(value))) for name, value in facts.items())))

    @classmethod
    def from_json(cls, data: Any) -> "Fingerprint":
        """Take a JSON object from another process; PeerError where it is not a flat, bounded, printable record."""
        if not isinstance(data, dict) or len(data) > MAX_FACTS:
            raise PeerError(f"fingerprint: not an object of at most {MAX_FACTS} facts")
        for name, value in data.items():
            if not isinstance(value, str) or len(value) > MAX_VALUE_CHARS or not value.isprintable():
                raise PeerError(f"fingerprint: the value of {name[:MAX_NAME_CHARS]!r} is not short printable text")
            if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
                raise PeerError(f"fingerprint: {name[:MAX_NAME_CHARS]!r} is no name of a fact")
        return cls.of(data)

    def to_json(self) -> dict[str, str]:
        return dict(self.facts)

    def get(self, name: str) -> str:
        return dict(self.facts).get(name, ABSENT)

    @property
    def root_digest(self) -> str:
        return self.get(ROOT_DIGEST)

    def differences(self, held: "Fingerprint") -> tuple[Difference, ...]:
        """Return every fact that differs between what is wanted (self) and what is held; empty means equal."""
        wanted_facts, held_facts = dict(self.facts), dict(held.facts)
        return tuple(
            Difference(name, wanted_facts.get(name, ABSENT), held_facts.get(name, ABSENT))
            for name in sorted(wanted_facts.keys() | held_facts.keys())
            if wanted_facts.get(name) != held_facts.get(name)
        )

    def violations(self, fingerprint: "Fingerprint") -> tuple[Difference, ...]:
        """Return the facts of this target that a full fingerprint contradicts or leaves out."""
        facts = dict(fingerprint.facts)
        return tuple(
            Difference(name, value, facts.get(name, ABSENT)) for name, value in self.facts if facts.get(name) != value
        )


def _shown(value: str) -> str:
    # An environment variable may hold anything, and a keeper refuses what it could not print.
    text = value if value.isprintable() else ascii(value)
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()} of {len(text)} characters"
