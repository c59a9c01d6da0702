"""A click of the simulated stream as one sample."""

import json

from dataset.generator import DataGenerator


class Clicks(DataGenerator):
    """See module docstring."""

    def generate(self, event):
        shown = json.loads(event)
        yield {"user": [shown["user"]], "item": [shown["shown"][0]], "click": [float(shown["clicked"][0])]}


if __name__ == "__main__":
    Clicks().run()
