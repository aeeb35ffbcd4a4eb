"""Write the shop's database: the same rows every time."""

import datetime
import random
import sqlite3
import sys

NAMES = ["Aas", "Berg", "Dahl", "Eide", "Foss", "Grøn", "Hagen", "Lund", "Moen", "Vik"]
COUNTRIES = ["Norway", "Sweden", "Norway", "Denmark", "Norway"]


def orders(chance):
    """Rows of the table `orders`."""
    first = datetime.date(2025, 1, 1)
    for number in range(400):
        promised = first + datetime.timedelta(days=chance.randrange(300))
        delivered = str(promised + datetime.timedelta(days=chance.randrange(-4, 5)))
        customer, cents = chance.randrange(len(NAMES)), chance.randrange(500, 90_000)
        yield number, customer, cents, str(promised), delivered if chance.random() < 0.9 else None


shop = sqlite3.connect(sys.argv[1])
shop.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, country TEXT)")
shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id, cents, promised, delivered)")
customers = [(number, name, COUNTRIES[number % len(COUNTRIES)]) for number, name in enumerate(NAMES)]
shop.executemany("INSERT INTO customers VALUES (?, ?, ?)", customers)
shop.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", orders(random.Random(7)))
shop.commit()
