from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from two_steps import ADDRESS, KEY, QUESTION, convert, tell, weather

model = OpenAIServerModel("tiny", api_base=ADDRESS, api_key=KEY)
tell(ToolCallingAgent(tools=[tool(weather), tool(convert)], model=model, max_steps=5).run(QUESTION))
