"""smolagents' ToolCallingAgent, unmodified, with one tool that runs a command.

It reads $INSTRUCTION and calls the model at $OPENAI_BASE_URL with $OPENAI_API_KEY and $MODEL, as every agent of the
adapter `command` does.
"""

import os
import subprocess

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

SECONDS = 30


@tool
def shell(command: str) -> str:
    """Run a command and return what it prints.

    Args:
        command: the command line
    """
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=SECONDS)
    return done.stdout + done.stderr


if __name__ == "__main__":
    model = OpenAIServerModel(
        os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
    )
    ToolCallingAgent(tools=[shell], model=model, max_steps=3).run(os.environ["INSTRUCTION"])
