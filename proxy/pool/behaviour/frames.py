"""The frames in which a model may be shown the results of its tools (docs/augmentation.md), and results without them.

Who looks whether a call failed reads the result as the tool gave it.
"""

from msgspec.structs import replace

from proxy.pool.completions.observed import ToolResult

FRAMES = (
    ("Output:\n", ""),
    ("<output>\n", "\n</output>"),
    ("```\n", "\n```"),
    ("[tool result]\n", "\n[end of tool result]"),
)
"""What stands before a result and behind it."""


def unframed(result: ToolResult) -> ToolResult:
    """A result without its frame, if it has one."""
    for begin, end in FRAMES:
        if result.head.startswith(begin) and (result.tail or result.head).endswith(end):
            head = result.head.removeprefix(begin)
            tail = result.tail.removesuffix(end)
            return replace(result, head=head if tail or result.tail else head.removesuffix(end), tail=tail)
    return result
