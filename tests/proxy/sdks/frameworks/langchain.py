from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from two_steps import QUESTION, WISH, Record, convert, tell, weather

model = ChatOpenAI(model="tiny")
asked = create_agent(model, tools=[weather, convert]).invoke({"messages": [{"role": "user", "content": QUESTION}]})
formed = create_agent(model, tools=[], response_format=Record).invoke({"messages": [{"role": "user", "content": WISH}]})
tell(asked["messages"][-1].content, formed["structured_response"])
