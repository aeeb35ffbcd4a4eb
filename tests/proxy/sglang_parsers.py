"""SGLang's own parsers over turns: JSON on stdin, JSON on stdout. Run as a program in SGLang's environment."""

import json
import sys
from typing import Any


def main() -> None:
    """Reads {tools, turns: [[tool parser, reasoning parser, text], ...]}; writes [reasoning, text, calls] for each."""
    from sglang.srt.entrypoints.openai.protocol import Tool  # torch comes with it, which only this process may load
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    asked = json.load(sys.stdin)
    tools = [Tool.model_validate(tool) for tool in asked["tools"]]

    def parsed(tool_parser: str, reasoning_parser: str, text: str) -> list[Any]:
        reasoning, rest = ReasoningParser(reasoning_parser, request=None).parse_non_stream(text)
        content, calls = FunctionCallParser(tools, tool_parser).parse_non_stream(rest or "")
        return [reasoning or "", content, [[call.name, json.loads(call.parameters)] for call in calls]]

    json.dump([parsed(*turn) for turn in asked["turns"]], sys.stdout)


if __name__ == "__main__":
    main()
