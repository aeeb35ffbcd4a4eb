import asyncio

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from two_steps import ADDRESS, KEY, QUESTION, WISH, Record, convert, tell, weather


async def main() -> None:
    llm = OpenAILike(
        model="tiny", api_base=ADDRESS, api_key=KEY, is_chat_model=True, is_function_calling_model=True,
        context_window=30000,
    )  # fmt: skip
    answer = await FunctionAgent(tools=[weather, convert], llm=llm, system_prompt="You know cities.").run(QUESTION)
    tell(str(answer), (await llm.as_structured_llm(Record).acomplete(WISH)).raw)


asyncio.run(main())
