from google import genai
from google.genai import types
from two_steps import GOOGLE_ADDRESS, KEY, QUESTION, WISH, Record, convert, tell, weather

client = genai.Client(api_key=KEY, http_options={"base_url": GOOGLE_ADDRESS})
thinking = types.ThinkingConfig(include_thoughts=True, thinking_budget=-1)
chat = client.chats.create(
    model="tiny", config=types.GenerateContentConfig(tools=[weather, convert], thinking_config=thinking)
)
answer = chat.send_message(QUESTION).text
form = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Record)
tell(answer, client.models.generate_content(model="tiny", contents=WISH, config=form).parsed)
