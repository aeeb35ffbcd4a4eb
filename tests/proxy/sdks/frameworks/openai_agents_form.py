"""A call is required first, and the answer has a form: behind the first call the SDK leaves the choice to the model."""

from agents import Agent, ModelSettings, Runner, function_tool
from two_steps import QUESTION, Record, convert, tell, weather

tools = [function_tool(weather), function_tool(convert)]
settings = ModelSettings(tool_choice="required")
agent = Agent(name="formed", model="tiny", tools=tools, output_type=Record, model_settings=settings)
tell("", Runner.run_sync(agent, f"{QUESTION} Make a record of it.").final_output)
