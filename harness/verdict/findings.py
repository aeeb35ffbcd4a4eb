"""What an agent did to the files of its sandbox, and what was done about that before the verdict."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.environment.file_manifest import FileDifference, write_difference


@dataclass(frozen=True)
class IsolationFindings:
    """What the agent did to the files, and what was done about it."""

    difference: FileDifference
    """Files that the agent added, changed or removed."""
    removed: list[str]
    """Steering files that the agent had added and that were removed."""
    restored: list[str]
    """Steering files whose content from before the agent was restored."""
    left: list[str]
    """Steering files that the agent changed and that could not be restored."""
    left_out: list[str] = field(default_factory=list)
    """What is no data, so it does not travel into a fresh sandbox: links that lead out, FIFOs, sockets, odd names."""
    originals: dict[str, bytes] = field(default_factory=dict)
    """Absolute path -> what small files that the agent changed or removed had held, where somebody looks at that."""


def write_findings(directory: Path, name: str, findings: IsolationFindings) -> None:
    """Write what the agent did: NAME.changes.json.gz, and NAME.steering.json when it touched what steers a verifier."""
    write_difference(directory / f"{name}.changes.json.gz", findings.difference)
    steering = {"removed": findings.removed, "restored": findings.restored, "left": findings.left}
    steering |= {"left_out": findings.left_out} if findings.left_out else {}
    if any(steering.values()):
        (directory / f"{name}.steering.json").write_bytes(msgspec.json.encode(steering))
