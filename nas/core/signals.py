"""Ctrl-C and SIGTERM in the training loop. nas/core/errors.py says what the user then sees."""

import os
import signal


class StopSignal:
    """Ctrl-C and SIGTERM as a flag that the loop reads between steps. A second signal interrupts at once."""

    def __init__(self):
        self.received = False

    def __enter__(self) -> "StopSignal":
        self.handlers = {number: signal.signal(number, self.handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def handle(self, number, frame) -> None:
        if self.received and int(os.environ.get("WORLD_SIZE", 1)) == 1:  # torchrun repeats a signal itself
            raise KeyboardInterrupt
        self.received = True
