"""The task that every SDK and framework gets: a question that takes two tools, one after the other, and a record.

Each script of frameworks/ has this folder on its path, and not its own: there, its name would hide the package.
"""

import json
import os

from pydantic import BaseModel

ADDRESS, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
GOOGLE_ADDRESS = ADDRESS.removesuffix("/v1")
QUESTION = "How warm is it in Paris, as people in Boston say it?"
WISH = "Make a record: in Paris it is 70 degrees Fahrenheit."


class Record(BaseModel):
    city: str
    fahrenheit: int


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return "21 degrees Celsius"


def convert(celsius: int) -> str:
    """A temperature as people in Boston say it.

    Args:
        celsius: the temperature
    """
    return "70 degrees Fahrenheit"


def tell(answer: str, record: Record | None = None) -> None:
    """Print the outcome as the script's last line. Frameworks without prescribed forms have no record."""
    print(json.dumps({"answer": answer} | ({} if record is None else {"record": record.model_dump()})))
