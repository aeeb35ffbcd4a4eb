import asyncio

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient
from two_steps import QUESTION, WISH, Record, convert, tell, weather


async def main() -> None:
    info = ModelInfo(vision=False, function_calling=True, json_output=True, family="unknown", structured_output=True)
    client = OpenAIChatCompletionClient(model="tiny", model_info=info)
    asked = AssistantAgent("asked", client, tools=[weather, convert], max_tool_iterations=4)
    formed = AssistantAgent("formed", client, output_content_type=Record)
    answer = (await asked.run(task=QUESTION)).messages[-1].content
    tell(answer, (await formed.run(task=WISH)).messages[-1].content)


asyncio.run(main())
