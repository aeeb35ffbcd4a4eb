"""instructor has no tools of its own: each step is a record that the model fills in."""

import instructor
import openai
from pydantic import BaseModel
from two_steps import WISH, Record, tell


class Reading(BaseModel):
    city: str
    celsius: int


client = instructor.from_openai(openai.OpenAI())
messages = [{"role": "user", "content": "How warm is it in Paris?"}]
reading = client.chat.completions.create(model="tiny", response_model=Reading, messages=messages)
messages += [{"role": "assistant", "content": reading.model_dump_json()}, {"role": "user", "content": WISH}]
record = client.chat.completions.create(model="tiny", response_model=Record, messages=messages)
tell(f"{record.fahrenheit} degrees Fahrenheit", record)
