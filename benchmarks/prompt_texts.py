"""The texts of the built-in prompts: 14 chat questions, 14 coding tasks, 14 edits of a given text or program."""

from __future__ import annotations

from textwrap import dedent

CHAT_TEXTS = {
    "tides": "Why are there two high tides a day although the Moon passes overhead only once?",
    "bread": "My sourdough loaf comes out flat and dense. Name the three likeliest causes and how to check each one.",
    "trip": "Plan a quiet rainy Sunday in a small harbour town, hour by hour, for two people who like books.",
    "letter": "Write a short, friendly letter to a neighbour whose dog barks every night at three o'clock.",
    "lease": "Explain to a student who rents for the first time what a deposit is and when it is paid back.",
    "bicycle": "A bicycle stays upright when it rolls but falls over when it stands. Explain why in a few sentences.",
    "story": "Tell a very short story about a lighthouse keeper who receives a parcel addressed to somebody else.",
    "sleep": "I wake up at four every morning and cannot sleep again. Give me some careful, practical advice.",
    "vote": "Compare two ways of electing a club's chairperson: one round, most votes wins, or two rounds.",
    "chess": "How would you explain the idea of a pin in chess to a ten-year-old?",
    "soup": "I have lentils, carrots, one onion, lemon and stale bread. What can I cook in half an hour?",
    "glass": "Is glass a liquid that flows very slowly? Answer with the evidence for and against it.",
    "interview": "Give me five good questions to ask at the end of a job interview for a librarian's position.",
    "storm": "Describe a thunderstorm that approaches over a lake, in the voice of an old fisherman.",
}

CODE_TEXTS = {
    "running_median": "Write a Python class that receives integers one by one and returns the median so far.",
    "intervals": "Write a Python function `merge(intervals)` that joins overlapping half-open intervals.",
    "roman": "Write a Python function that turns an integer between 1 and 3999 into a Roman numeral; add assertions.",
    "csv_total": "Write a short Python script that reads a CSV file and sums the column `amount` per `month`.",
    "lru": "Implement a small least-recently-used cache in Python without functools: get, put and a fixed capacity.",
    "sql": "Given tables customers(id, name) and orders(id, customer_id, total), find the ten largest customers.",
    "bash": "Write a Bash one-liner that lists the five largest files below this directory, then explain it.",
    "matrix": "Write a Python function that rotates a square matrix in place and explain the index arithmetic.",
    "retry": "Write a Python decorator `retry(times, delay)` that calls a function again when it raises an exception.",
    "javascript": "Write a JavaScript function `debounce(f, ms)` and show how it is used with an input field.",
    "binary_search": dedent("""\
        This function should return the first index whose value is at least x, but it loops for ever. Find the mistake.

        def lower_bound(values, x):
            low, high = 0, len(values)
            while low < high:
                middle = (low + high) // 2
                if values[middle] < x:
                    low = middle
                else:
                    high = middle
            return low"""),
    "tests": dedent("""\
        Write pytest tests for this function, with at least four cases.

        def initials(name):
            return "".join(word[0].upper() for word in name.split() if word)"""),
    "tree": "Define a binary search tree in Python with insert, contains and an in-order iterator.",
    "rust": "Write a Rust function that counts the words of a string and returns the three most frequent.",
}

EDIT_TEXTS = {
    "rename_variable": dedent("""\
        Rename the variable `n` to `count` in this code and change nothing else. Answer with the whole code.

        def average(values):
            total = 0.0
            n = 0
            for value in values:
                total += value
                n += 1
            if n == 0:
                raise ValueError("no values")
            return total / n"""),
    "past_tense": dedent("""\
        Repeat this text in the past tense and change nothing else.

        The ferry leaves the old harbour at seven. Two gulls follow it as far as the breakwater. On the upper deck a
        man reads his newspaper, and a child counts the buoys aloud. When the bell rings, everybody looks towards the
        island, but the fog hides it."""),
    "new_date": dedent("""\
        Repeat this notice, but move the meeting from Tuesday to Thursday.

        Dear members, the next meeting of the garden club is on Tuesday at six in the evening, in the small hall behind
        the library. Please bring the seeds that you want to exchange. After the meeting on Tuesday we will visit the
        greenhouse together. Tea and cake are provided by the committee."""),
    "add_type_hints": dedent("""\
        Add type hints to the parameters and results of these functions. Keep everything else as it is.

        def area(width, height):
            return width * height

        def perimeter(width, height):
            return 2 * (width + height)

        def describe(width, height):
            return f"{width} x {height}: area {area(width, height)}, perimeter {perimeter(width, height)}\""""),
    "fix_bug": dedent("""\
        One line of this function is wrong: it should return the largest value. Return the corrected function.

        def largest(values):
            if not values:
                raise ValueError("values is empty")
            best = values[0]
            for value in values[1:]:
                if value < best:
                    best = value
            return best"""),
    "spelling": dedent("""\
        Correct the two spelling mistakes and repeat the text otherwise word for word.

        The museum owns a colection of two hundred clocks, most of them built in the valley between 1780 and 1850. A
        volunteer winds them every Monday. At noon they do not strike togehter, and visitors wait until the last of
        them has finished."""),
    "json_key": dedent("""\
        Set "retries" to 5 in this JSON and print the whole file again.

        {
          "name": "weather-station",
          "interval_seconds": 60,
          "retries": 3,
          "sensors": ["temperature", "humidity", "pressure"],
          "upload": {"host": "station.example", "port": 8443, "compress": true}
        }"""),
    "list_order": dedent("""\
        Move the last item of this list to the top and repeat the whole list.

        1. Switch off the main valve and open the tap in the cellar.
        2. Unscrew the filter housing with the large key.
        3. Rinse the filter under running water until it is clean.
        4. Grease the seal thinly and put it back into its groove.
        5. Put a bucket below the housing and some towels on the floor."""),
    "pronoun": dedent("""\
        Rewrite this paragraph so that it is about Martin instead of Anna. Keep all other words.

        Anna repairs old radios. She buys them at flea markets, cleans their contacts and replaces the capacitors that
        have dried out. Her workshop smells of solder and floor wax. When a set works again, Anna listens to it for one
        whole evening before she gives it away."""),
    "docstring": dedent("""\
        Add a one-line docstring to this function and return the complete function.

        def clamp(value, low, high):
            if low > high:
                raise ValueError(f"empty range: {low} > {high}")
            if value < low:
                return low
            if value > high:
                return high
            return value"""),
    "css_colour": dedent("""\
        Change the background colour to #102030 and repeat the stylesheet.

        body {
          margin: 0;
          font-family: serif;
          background: #ffffff;
          color: #222222;
        }

        nav a {
          padding: 0.5em 1em;
          text-decoration: none;
        }"""),
    "sql_limit": dedent("""\
        Add a condition so that only orders of the year 2023 are counted. Repeat the whole query.

        SELECT c.name, COUNT(o.id) AS orders, SUM(o.total) AS revenue
        FROM customers AS c
        JOIN orders AS o ON o.customer_id = c.id
        WHERE o.status = 'paid'
        GROUP BY c.name
        ORDER BY revenue DESC
        LIMIT 20;"""),
    "verbatim": dedent("""\
        Repeat the following text exactly.

        The path climbs through beech woods to a clearing, where a stone marks the old border. From here the view
        reaches over three valleys to the snow on the far ridge. In autumn the whole slope turns red within a week, and
        the last walkers come down before the lamps are lit in the village."""),
    "loop_to_sum": dedent("""\
        Replace the loop in `total_price` by the built-in function sum and repeat the rest without changes.

        class Basket:
            def __init__(self):
                self.items = []

            def add(self, name, price):
                self.items.append((name, price))

            def total_price(self):
                total = 0
                for name, price in self.items:
                    total += price
                return total"""),
}
