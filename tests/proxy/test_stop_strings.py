"""Stop strings are found where they stand, however the tokens come, and no text is searched for them twice."""

import random
from array import array

from proxy.call import Call
from proxy.prompt.splice import Prompt
from proxy.prompt.template import ChatTemplate
from proxy.recording.turn import Turn

LETTERS = "ab .\n"


class Searched(str):
    """A text that grows as a turn's does, and counts the characters that are searched in it."""

    characters = 0

    def find(self, part: str, begin: int = 0) -> int:  # type: ignore[override]
        Searched.characters += len(self) - begin
        return str.find(self, part, begin)

    def __add__(self, more: str) -> "Searched":
        return Searched(str.__add__(self, more))


def turn_of(template: ChatTemplate, *stop: str) -> Turn:
    return Turn(Call(model="m", messages=(), stop=stop), Prompt(array("i"), "", None, None, 0), template)


def words(chance: random.Random, most: int) -> str:
    return "".join(chance.choices(LETTERS, k=chance.randint(1, most)))


def test_stop_strings_are_found_however_the_tokens_come(template: ChatTemplate) -> None:
    """As a search of the whole text would find them, behind given tokens only. The seed is fixed."""
    chance = random.Random(3)
    for _ in range(300):
        stops = tuple(words(chance, 6) for _ in range(chance.randint(1, 3)))
        turn, text = turn_of(template, *stops), words(chance, 60)
        ids = template.encode(text)
        begin = chance.choice((0, 0, chance.randint(1, len(ids))))
        turn.sampling.ids, turn.sampling.given = array("i", ids), ((0, begin),) if begin else ()
        turn.take(ids[:begin])
        free, place = len(turn._decoded) if begin else 0, begin
        while place < len(ids):
            step = chance.randint(1, 4)
            turn.take(ids[place : place + step])
            place += step
            places = {turn._decoded.find(stop, free): stop for stop in stops}
            assert turn._stops() == {at: stop for at, stop in places.items() if at >= 0}, (stops, text, begin)
        turn.close()
        found = [at for at in (text.find(stop, free) for stop in stops) if at >= 0]
        assert turn.reply().content == text[: min(found, default=len(text))]


def test_a_stop_string_of_several_tokens_and_one_among_given_tokens(template: ChatTemplate) -> None:
    stop, given = "an end of several tokens", "said: an end of several tokens; "
    turn, before, ids = turn_of(template, stop), template.encode(given), template.encode(f"more {stop} and more")
    turn.sampling.ids, turn.sampling.given = array("i", before + ids), ((0, len(before)),)
    turn.take(before)
    for id in ids:
        turn.take([id])
    turn.close()
    reply = turn.reply()
    assert (reply.content, reply.stop_sequence) == (f"{given}more ", stop) and len(template.encode(stop)) > 2


def test_no_text_is_searched_again_for_each_token(template: ChatTemplate) -> None:
    stops = tuple(f"stop {number}" for number in range(64))
    turn, ids = turn_of(template, *stops), template.encode("all is well. " * 1000)
    turn._decoded, Searched.characters = Searched(), 0
    turn.sampling.ids = array("i", ids)
    for id in ids:
        turn.take([id])
    assert isinstance(turn._decoded, Searched)
    assert Searched.characters <= len(stops) * (len(turn._decoded) + len(ids) * max(map(len, stops)))
