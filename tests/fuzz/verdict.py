"""What running a case on one rank says."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Verdict:
    """`kind` is right, refused (raised as it may), wrong, silent (no error where one is due), or hung."""

    kind: str
    text: str = ""
    notes: dict[str, str] = field(default_factory=dict)  # counted in the summary

    @property
    def bad(self) -> bool:
        return self.kind not in ("right", "refused")
